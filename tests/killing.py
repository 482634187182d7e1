"""A process that trains, kills its own children in the middle of training, resumes, and says what it found.

Run as a script with a folder and a kind of noise: one warm process, so that a child costs a fork and not an import. Children
die by SIGKILL, sent from outside at a random moment, or raised by themselves inside a write to the disk. Prints one JSON
list.

With a seed all runs are the same from their beginning. Secure runs are the same from a checkpoint on, so all of them begin
with copies of one that was saved before the first step.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from clipless.app.data.dataset import Data, make_data
from clipless.app.training import TrainingProgress, TrainingSettings, save_run, train
from clipless.app.training.saving import Saving
from clipless.errors import Interrupted
from clipless.runs.ledger_file import read_ledger

REAL_WRITE = os.write
KILLS = {"secure": {"moment": 12, "write": 10}, "seeded": {"moment": 3, "write": 4}}
SECURE = TrainingSettings(model="linear", clipping="dc-e", epsilon=5.0, epochs=8, batch_size=32, accountant="rdp")
STEPS = 24
SETTINGS = {"secure": SECURE, "seeded": replace(SECURE, seed=1)}


def blobs() -> Data:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 3
    features = 3 * torch.eye(3, 8)[labels] + torch.randn(120, 8, generator=generator)
    x, y = features.numpy(), labels.numpy()
    return make_data("blobs", (x[:96], y[:96]), (x[96:], y[96:]))


def saved_start(data: Data, out: Path) -> Path:
    """A secure run that has only been saved."""
    with suppress(Interrupted):
        train(data, SECURE, saving=Saving(out), stop=lambda: True)
    return out


def run(data: Data, out: Path) -> None:
    """Begin or resume, and finish. After each step a line in a side file says that its result was seen, and what it was:
    the threshold set from the released statistic stands for it."""
    seen = os.open(out.with_suffix(".seen"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(progress: TrainingProgress) -> None:
        REAL_WRITE(seen, f"{progress.step} {progress.threshold!r}\n".encode())

    result = train(data, SETTINGS[NOISE], note, Saving(out, resume=True, every=0.02))
    save_run(result, out)
    os.close(seen)


def child(work: Callable[[], None]) -> int:
    """The number of a process that does the work and exits."""
    number = os.fork()
    if not number:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
    return number


def killed_at_moment(data: Data, out: Path, steps: int, seconds: float) -> bool:
    """The child dies some seconds after it has seen so many more steps, however fast the machine is today."""
    seen = out.with_suffix(".seen")
    goal = (len(seen.read_text().splitlines()) if seen.exists() else 0) + steps
    number = child(lambda: run(data, out))
    while (not seen.exists() or len(seen.read_text().splitlines()) < goal) and not os.waitid(
        os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT
    ):
        time.sleep(0.0005)
    time.sleep(seconds)
    os.kill(number, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == -signal.SIGKILL


def killed_in_write(data: Data, out: Path, call: int, share: float) -> bool:
    """The child dies in its `call`-th call of the system's write, fsync, replace or link; of a write after a share."""
    real = {name: getattr(os, name) for name in ("write", "fsync", "replace", "link")}
    left = [call]

    def deadly(name: str) -> Callable[..., object]:
        def system_call(*arguments: object, **options: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                if name == "write" and share:
                    content = arguments[1]
                    assert isinstance(content, bytes)
                    real["write"](arguments[0], content[: int(share * len(content))])
                elif share:
                    real[name](*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*arguments, **options)

        return system_call

    def work() -> None:
        for name in real:
            vars(os)[name] = deadly(name)
        run(data, out)

    return os.waitstatus_to_exitcode(os.waitpid(child(work), 0)[1]) == -signal.SIGKILL


def found(out: Path) -> dict[str, object]:
    """Steps whose result was seen, against steps in the ledger, at this moment."""
    ledger, seen = out / "ledger.jsonl", out.with_suffix(".seen")
    lines = seen.read_text().splitlines() if seen.exists() else []
    file = read_ledger(ledger, torn=True) if ledger.exists() else None
    return {
        "seen": max((int(line.split()[0]) for line in lines), default=0),
        "recorded": len(file.entries) if file else 0,
        "torn": bool(file and file.torn),
        "begun": file is not None,
        "checkpoint": (out / "checkpoint.pt").exists(),
        "finished": (out / "run.json").exists(),
    }


def ended(data: Data, out: Path) -> dict[str, object]:
    """The same run brought to its end."""
    if not (out / "run.json").exists():
        code = os.waitstatus_to_exitcode(os.waitpid(child(lambda: run(data, out)), 0)[1])
        assert code == 0, f"the resumed run in {out} failed"
    lines = set(out.with_suffix(".seen").read_text().splitlines())
    record = json.loads((out / "run.json").read_text())
    return {
        "steps": record["metrics"]["steps"],
        "recorded_at_end": len(read_ledger(out / "ledger.jsonl").entries),
        "epsilon": record["metrics"]["epsilon"],
        "accuracies": record["metrics"]["test_accuracy_per_epoch"],
        "weights": hashlib.sha256((out / "model.pt").read_bytes()).hexdigest(),
        "differently_seen": len(lines) - len({line.split()[0] for line in lines}),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    data, chance = blobs(), random.Random(0)
    first = saved_start(data, folder / "start") if NOISE == "secure" else None
    for name in ("whole", "again"):  # the first also pays for what is computed once
        if first:
            shutil.copytree(first, folder / name)
        start = time.perf_counter()
        run(data, folder / name)
        seconds = time.perf_counter() - start
    trials = [{"how": "never", **found(folder / "whole"), **ended(data, folder / "whole")}]
    for kind, kills in KILLS[NOISE].items():
        number = 0
        while number < kills:
            out = folder / f"{kind}-{len(trials)}"
            if first:
                shutil.copytree(first, out)
            trial: dict[str, object] = {"how": kind, "kills": 0, "states": []}
            for _ in range(chance.choice([1, 1, 1, 3])):
                if (out / "run.json").exists():
                    break
                if kind == "moment":
                    steps = chance.randrange(STEPS)
                    struck = killed_at_moment(data, out, steps, chance.uniform(0, 3 * seconds / STEPS))
                else:
                    call = round(120 ** chance.random())
                    struck = killed_in_write(data, out, call, chance.choice([0, 0.3, 0.9, 1]))
                number += struck
                trial["states"].append(found(out))  # type: ignore[attr-defined]
                trial["kills"] += struck  # type: ignore[operator]
            trials.append(trial | ended(data, out))
    sys.stdout.write(json.dumps(trials))


NOISE = sys.argv[2] if __name__ == "__main__" else "secure"

if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""`private.step` on models that nobody here wrote: does it refuse one that trains with `private.backward`?

    python experiments/step_alarms.py                    all cases of the zoo, about half an hour
    python experiments/step_alarms.py --family "torch.nn"  one family, without writing anything

Every case of the zoo (tests/model_zoo.py) is checked by both forms: as it is, with dropout, under autocast, and
checkpointed where it can be. Writes step_alarms.json among the stored results: a count for each family, and every case
that only one form takes."""

import argparse
import json
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "step_alarms.json"
SECONDS = 60
sys.path.insert(0, str(ROOT / "tests"))

import model_zoo as zoo
import package_zoo
from clipless.errors import CliplessError
from clipless.torch_internals import AnyDropout
from self_checking import self_checked, step_checked

Form = Callable[..., dict[str, Tensor]]
FORMS: dict[str, Form] = {"backward": partial(self_checked, per_record=True), "step": step_checked}


class TooLong(BaseException):
    """A case took longer than anybody would wait."""


def interrupted(*_: Any) -> None:
    raise TooLong


def with_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout at a quarter; raises if it has none."""
    modules = [module for module in model.modules() if isinstance(module, AnyDropout)]
    for module in modules:
        module.p = 0.25
    if not modules:
        raise ValueError("no dropout")
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    """The model with checkpoints, as transformers sets them; raises if it has none."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ValueError("no checkpoints")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


SETTINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "autocast": lambda model: model,
    "dropout": with_dropout,
    "checkpointed": checkpointed,
}


def outcome(case: zoo.Case, setting: str, form: Form) -> str:
    """ "trains", "unbuilt" if the case cannot be built in this setting, or why it is refused."""
    torch.manual_seed(0)
    try:
        model, batch = SETTINGS[setting](case.make()), (case.inputs(), torch.arange(case.records))
        zoo.losses(model, batch)
    except Exception:
        return "unbuilt"
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
            form(model, zoo.losses, batch, case.records)
    except CliplessError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    except Exception as trouble:
        return f"crash, {type(trouble).__name__}: {trouble}"
    return "trains"


def compared(number: int) -> list[dict[str, str]]:
    """Both forms on one case, in every setting that it has."""
    torch.set_num_threads(1)
    case, rows = CASES[number], []
    for setting in SETTINGS:
        signal.signal(signal.SIGPROF, interrupted)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            with warnings.catch_warnings(action="ignore"):
                found = {name: outcome(case, setting, form)[:300] for name, form in FORMS.items()}
        except TooLong:
            found = dict.fromkeys(FORMS, "unbuilt")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        rows.append({"family": case.family, "name": case.name, "setting": setting} | found)
    return rows


def verdict(row: dict[str, str]) -> str:
    """One word for a row."""
    backward, step = row["backward"], row["step"]
    if "unbuilt" in (backward, step):
        return "unbuilt"
    if backward == "trains":
        return "both" if step == "trains" else "alarm"
    return "step alone" if step == "trains" else "neither"


CASES = [*zoo.transformers_cases(), *zoo.torch_cases(), *package_zoo.package_cases()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", help="only cases of this family; writes nothing")
    parser.add_argument("--name", help="only cases of this name; writes nothing")
    parser.add_argument("--every", type=int, default=1, help="only every n-th case; writes nothing unless 1")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    numbers = [
        k
        for k, case in enumerate(CASES)
        if (not given.family or case.family in given.family) and given.name in (None, case.name)
    ][:: given.every]
    began, rows = time.monotonic(), []
    with ProcessPoolExecutor(given.jobs) as pool:
        for done, found in enumerate(pool.map(compared, numbers), 1):
            rows += found
            sys.stderr.write(f"\r{done} of {len(numbers)} cases, {time.monotonic() - began:.0f} s ")
            sys.stderr.flush()
    sys.stderr.write("\n")
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row["family"], Counter())[f"{row['setting']}, {verdict(row)}"] += 1
    different = [row | {"verdict": verdict(row)} for row in rows if verdict(row) in ("alarm", "step alone")]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, **package_zoo.package_versions()}
    record = {"versions": versions, "counts": counts, "different": different}
    text = json.dumps(record, indent=1) + "\n"
    if given.family or given.name or given.every > 1:
        sys.stdout.write(text)
    else:
        RESULTS.write_text(text, encoding="utf-8")
    total = Counter(verdict(row) for row in rows)
    sys.stdout.write(", ".join(f"{count} {word}" for word, count in total.most_common()) + "\n")
    sys.exit(1 if total["alarm"] else 0)


if __name__ == "__main__":
    main()

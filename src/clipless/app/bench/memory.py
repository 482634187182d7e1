"""Peak memory of a few steps, each way in a fresh process: `python -m clipless.app.bench.memory '{"model": ...}'`.

Measured is the resident set, which includes kernel buffers and fragmentation.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipless.app.bench import opacus_ways
from clipless.app.bench.problems import PROBLEMS, TINY_PROBLEMS, sgd
from clipless.app.bench.ways import OPACUS, WAYS

STEPS = 3
SECONDS = 1800
MEGABYTE = 1e6


@dataclass(frozen=True)
class Memory:
    """Megabytes of resident memory: once everything is imported, with model and batch built, and at the peak of 3 steps.

    `reset` tells whether the peak is that of the steps alone; on systems that cannot reset it, it is that of the whole
    process.
    """

    imported_mb: float
    built_mb: float
    peak_mb: float
    reset: bool

    @property
    def above_import_mb(self) -> float:
        return self.peak_mb - self.imported_mb


def measure(model: str, way: str, *, tiny: bool = False, threads: int = 1) -> Memory | str:
    """The memory of a way on a model, or the reason for which it could not be measured."""
    request = json.dumps({"model": model, "way": way, "tiny": tiny, "threads": threads})
    command = [sys.executable, "-m", __name__, request]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"{STEPS} steps took more than {SECONDS} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"the process ended with code {done.returncode}"
    return Memory(**json.loads(done.stdout.splitlines()[-1]))


def steps(model: str, way: str, tiny: bool, threads: int) -> Memory:
    """Build the model and take the steps in this process, which must be fresh."""
    torch.set_num_threads(threads)
    if way.startswith(OPACUS):
        with opacus_ways.quiet():
            import opacus  # noqa: F401 (so that it counts as imported)
    import_all()
    imported = resident("VmRSS")
    runner = WAYS[way]((TINY_PROBLEMS if tiny else PROBLEMS)[model])
    built = resident("VmRSS")
    reset = forget_peak()
    with opacus_ways.quiet():
        for _ in range(STEPS):
            runner.step(*runner.draw())
    return Memory(imported, built, resident("VmHWM"), reset)


def import_all() -> None:
    """One step of a model of two parameters: torch imports its optimizers' machinery, tens of megabytes, at first use."""
    model = nn.Linear(1, 1)
    optimizer = sgd(model)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def resident(field: str) -> float:
    """Megabytes, from the system's record of this process; outside Linux, the peak so far."""
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        import resource  # absent on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MEGABYTE
    line = next(line for line in text.splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / MEGABYTE


def forget_peak() -> bool:
    """Reset the process's peak to its current size, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def main(request: str) -> None:
    answer: dict[str, Any] = asdict(steps(**json.loads(request)))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

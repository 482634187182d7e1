"""Judges every model of the zoo (tests/model_zoo.py) and writes zoo.json among the benchmark's results: `make zoo`.

The table is in docs/models.md. A name as argument judges the cases of that class or family alone, and shows them.
"""

import json
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "zoo.json"
SECONDS = 120
sys.path.insert(0, str(ROOT / "tests"))

import model_zoo as zoo
import package_zoo


class TooLong(BaseException):
    """A case took longer than anybody would wait."""


def interrupted(*_: Any) -> None:
    raise TooLong


def judged(number: int) -> dict[str, Any]:
    """The verdict on one case, as plain data."""
    torch.set_num_threads(1)
    case = CASES[number]
    signal.signal(signal.SIGPROF, interrupted)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        verdict = zoo.judge(case)
    except TooLong:
        verdict = zoo.Verdict("slow", f"not judged in {SECONDS} seconds of processor time")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    error = None if verdict.error != verdict.error else float(f"{verdict.error:.1e}")
    return {"family": case.family, "name": case.name, "verdict": verdict.kind, "why": verdict.why, "error": error}


CASES = [*zoo.transformers_cases(), *zoo.torch_cases(), *package_zoo.package_cases()]


def main(only: list[str]) -> None:
    numbers = [k for k, case in enumerate(CASES) if not only or case.name in only or case.family in only]
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(judged, numbers))
    if only:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, **package_zoo.package_versions()}
    RESULTS.write_text(json.dumps({"versions": versions, "cases": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

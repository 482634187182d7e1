"""Breaks the source in one place at a time and looks whether the tests notice: `python tests/sabotages.py [name ...]`.

Every sabotage is applied to a copy of the sources, on which the tests named for it are run. Prints "caught" where a test
fails and "SURVIVED" where none does; exits with 1 if one survived or could not be applied. A test that is thinned out must
still catch what it caught before.
"""

import argparse
import atexit
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sabotage_lists import SABOTAGES
from sabotage_lists.one import Sabotage

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "clipless"
# A process of tests exits with this plus the exit code of pytest, which is 0 if all pass and 1 if one fails; with any other
# code nothing was tested.
ENDED = 100
MOST_SECONDS = 900.0
# Tests run in processes that are forked from one which has imported what is not ours. A program has only one to fork from,
# so this is for the script: elsewhere it may have been begun for other purposes.
PROCESSES: Any = get_context("forkserver" if __name__ == "__main__" else "spawn")
if __name__ == "__main__":
    PROCESSES.set_forkserver_preload(["torch", "scipy.stats", "sklearn.datasets", "dp_accounting", "pytest"])


def occurrences(sabotage: Sabotage, sources: Path = SOURCES) -> int:
    """How often the text that is to be changed occurs in its file."""
    file = sources / sabotage.file
    return file.read_text(encoding="utf-8").count(sabotage.old) if file.is_file() else 0


def apply(sabotage: Sabotage, sources: Path) -> None:
    """Break a copy of the sources, and compile it anew if that is C."""
    file = sources / sabotage.file
    file.write_text(file.read_text(encoding="utf-8").replace(sabotage.old, sabotage.new), encoding="utf-8")
    for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        stale.unlink()
    if file.suffix in (".c", ".h"):
        sys.path.insert(0, str(ROOT))
        from hatch_build import compile_all

        problem = compile_all(sources / "native", sources / "native" / "_compiled.so")
        if problem is not None:
            raise RuntimeError(problem)


def outcome(sabotage: Sabotage) -> str:
    """ "caught", "SURVIVED", or why neither could be told."""
    if occurrences(sabotage) != 1:
        return f"NOT APPLIED: its text occurs {occurrences(sabotage)} times in {sabotage.file}"
    with tempfile.TemporaryDirectory() as folder:
        sources, told = Path(folder, "src", "clipless"), Path(folder, "told.txt")
        shutil.copytree(SOURCES, sources)
        apply(sabotage, sources)
        process = PROCESSES.Process(target=run_tests, args=(sabotage.tests, sources.parent, told))
        process.start()
        process.join(MOST_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            return f"NOT TESTED: no test has failed after {MOST_SECONDS:g} s"
        last = told.read_text(encoding="utf-8").strip().splitlines()[-3:] if told.exists() else []
    if process.exitcode == ENDED + 1:
        return "caught"
    return "SURVIVED" if process.exitcode == ENDED else f"NOT TESTED: {' | '.join(last)}"


def run_tests(tests: Sequence[str], sources: Path, told: Path) -> None:
    """Be a process that runs these tests on these sources and nothing else."""
    assert "clipless" not in sys.modules, "the sources to be tested must not be loaded before they are broken"
    written = os.open(told, os.O_WRONLY | os.O_CREAT)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(sources))
    sys.dont_write_bytecode = True
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=line"]
    code = pytest.main([*options, *tests])
    atexit._run_exitfuncs()
    sys.exit(ENDED + code)


def timed(sabotage: Sabotage) -> tuple[str, float]:
    begin = time.perf_counter()
    return outcome(sabotage), time.perf_counter() - begin


def main(names: list[str], jobs: int) -> int:
    known = {sabotage.name: sabotage for sabotage in SABOTAGES}
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"no such sabotage: {', '.join(unknown)}. There are {', '.join(known)}.")
    chosen = [known[name] for name in names] if names else list(SABOTAGES)
    import conftest  # noqa: F401  finds out once, and not in every process of tests, what this machine can do

    found: Counter[str] = Counter()
    with ThreadPoolExecutor(jobs) as pool:
        for sabotage, (result, seconds) in zip(chosen, pool.map(timed, chosen), strict=True):
            found[result.partition(":")[0]] += 1
            print(f"{result:8}  {sabotage.name}  ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen)} sabotages: {', '.join(f'{count} {result}' for result, count in found.most_common())}")
    return 0 if found["caught"] == len(chosen) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="sabotages to try; all of them if none is named")
    parser.add_argument("--jobs", type=int, default=2, help="how many to try at the same time")
    given = parser.parse_args()
    sys.exit(main(given.names, given.jobs))

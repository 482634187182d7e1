"""Breaks the source in one place at a time and looks whether the tests notice: `python tests/sabotages.py [name ...]`.

Every sabotage is applied to a copy of the sources, on which the tests named for it are run. Prints "caught" where a test
fails and "SURVIVED" where none does; exits with 1 if one survived or could not be applied. A test that is thinned out must
still catch what it caught before.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sabotage_lists import SABOTAGES
from sabotage_lists.one import Sabotage

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "clipless"
# The exit code of pytest if a test has failed; others than this and 0 say that nothing was tested.
FAILED = 1
MOST_SECONDS = 900.0


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
    if file.suffix == ".c":
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
        sources = Path(folder, "src", "clipless")
        shutil.copytree(SOURCES, sources)
        apply(sabotage, sources)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=line"]
        environment = os.environ | {"PYTHONPATH": str(sources.parent), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-B", "-m", "pytest", *options, *sabotage.tests]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"NOT TESTED: no test has failed after {MOST_SECONDS:g} s"
    if done.returncode == FAILED:
        return "caught"
    last = (done.stdout + done.stderr).strip().splitlines()[-3:]
    return "SURVIVED" if done.returncode == 0 else f"NOT TESTED: {' | '.join(last)}"


def timed(sabotage: Sabotage) -> tuple[str, float]:
    begin = time.perf_counter()
    return outcome(sabotage), time.perf_counter() - begin


def main(names: list[str], jobs: int) -> int:
    known = {sabotage.name: sabotage for sabotage in SABOTAGES}
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"no such sabotage: {', '.join(unknown)}. There are {', '.join(known)}.")
    chosen = [known[name] for name in names] if names else list(SABOTAGES)
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

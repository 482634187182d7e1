"""Times the way from `git clone` to the first private model in an empty environment. It needs git and Python, nothing else.

python benchmarks/first_model.py --out benchmarks/results/first_model.json
python benchmarks/first_model.py --from benchmarks/results/first_model.json --page README.md
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
START, END = "<!-- first model -->", "<!-- end of first model -->"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time from git clone to the first private model.")
    parser.add_argument("--out", type=Path, help="file for the result")
    parser.add_argument("--from", dest="stored", type=Path, help="measure nothing, read this file")
    parser.add_argument("--page", type=Path, help="page with the markers between which the sentence goes")
    options = parser.parse_args()
    found = json.loads(options.stored.read_text(encoding="utf-8")) if options.stored else measure()
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.page:
        page = options.page.read_text(encoding="utf-8")
        before, start, rest = page.partition(START)
        _, end, after = rest.partition(END)
        if not (start and end):
            sys.exit(f"{options.page} has no place for the sentence: put the lines {START} and {END} there.")
        options.page.write_text(f"{before}{start}\n{sentence(found)}\n{end}{after}", encoding="utf-8")
    sys.stdout.write(sentence(found) + "\n")


def measure() -> dict[str, Any]:
    """Seconds of every part of the way, on copies that are removed again. Nothing is taken from pip's cache."""
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/venv/bin/python"
        pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
        parts = {
            "git clone": ["git", "clone", "--quiet", str(ROOT), f"{folder}/clipless"],
            "environment": [sys.executable, "-m", "venv", f"{folder}/venv"],
            "torch": [*pip, torch],
            "clipless": [*pip, f"{folder}/clipless"],
            "first training": [f"{folder}/venv/bin/clipless", "train", "--out", f"{folder}/run"],
        }
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        seconds = {}
        for name, command in parts.items():
            before = time.perf_counter()
            subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
            seconds[name] = round(time.perf_counter() - before, 1)
        record = json.loads(Path(folder, "run", "run.json").read_text(encoding="utf-8"))
    return {
        "seconds": seconds,
        "epsilon": record["metrics"]["epsilon"],
        "epochs": record["arguments"]["epochs"],
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
    }


def sentence(found: dict[str, Any]) -> str:
    """The result in words."""
    seconds = found["seconds"]
    rest = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    busy = found["load_average"] - 1
    shared = f", which were busy with other work as well (load average {found['load_average']})" if busy > 1 else ""
    return (
        f"From `git clone` to the first private model (digits, {found['epochs']} epochs, ε = {found['epsilon']:.3g}) in "
        f"{sum(seconds.values()):.0f} seconds on {found['cores']} cores{shared}: {rest}. Packages "
        f"came from a mirror nearby and not from a cache; Python {found['python']}, {found['date']}."
    )


if __name__ == "__main__":
    main()

"""One small model on the digits data: without privacy, with Abadi clipping, with AUTO-S. Run it with `make demo`.

Each row is a `clipless train` of its own, with the command's defaults and the budget epsilon = 3.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EPSILON = 3.0
VERSIONS = {"not private": "none", "Abadi": "abadi", "AUTO-S": "auto-s"}


def train(clipping: str, out: Path, *more: str) -> dict[str, Any]:
    """The record that `clipless train --json` prints; an error of the command is shown and ends the demo."""
    options = ["--clipping", clipping, "--epsilon", str(EPSILON), "--out", str(out), "--json", *more]
    command = [sys.executable, "-m", "clipless.app.cli", "train", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description="Three small runs side by side.")
    parser.add_argument("--quick", action="store_true", help="one version, one epoch: to try the script")
    quick = parser.parse_args().quick
    more = ["--epochs", "1"] if quick else []
    console = Console()
    table = Table(title="clipless train, digits, defaults", title_justify="left")
    for heading in ("version", "test accuracy", "ε", "δ", "seconds"):
        table.add_column(heading, justify="left" if heading == "version" else "right")
    with tempfile.TemporaryDirectory() as folder, console.status("training …") as status:
        for name, clipping in list(VERSIONS.items())[-1 if quick else 0 :]:
            status.update(f"training: {name} …")
            metrics = train(clipping, Path(folder) / clipping, *more)["metrics"]
            private = metrics["epsilon"] is not None
            budget = (f"{metrics['epsilon']:.2f}", f"{metrics['delta']:.1e}") if private else ("∞", "-")
            table.add_row(name, f"{metrics['test_accuracy']:.1%}", *budget, f"{metrics['seconds']:.1f}")
    console.print(table)
    console.print("Same model, data and epochs. More: .venv/bin/clipless train --help")


if __name__ == "__main__":
    main()

"""What the first steps of a run cost, in which it checks itself (1, 2, 4 and 8), over plain ones.

    python benchmarks/first_steps.py --out benchmarks/results

Prints a table and writes `first_steps.json` to the machine's folder. The first step may cost four plain ones.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from clipless.app.bench import machine
from clipless.app.bench.first_steps import CHECKED, STEPS, first_steps
from clipless.app.bench.problems import PROBLEMS, TINY_PROBLEMS
from clipless.app.bench.ways import listed
from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument


def main(
    models: Annotated[str, typer.Option(help=f"Which of {', '.join(PROBLEMS)}.")] = "all",
    runs: Annotated[int, typer.Option(min=1, help="Runs begun anew, of which the least time of each step counts.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models: for trying out, not for quoting.")] = False,
    out: Annotated[Path, typer.Option(help="Folder with a folder for each machine.")] = Path("runs/bench"),
) -> None:
    names = tuple(PROBLEMS) if models == "all" else listed(models)
    if not names:
        raise InvalidArgument(f"no model to measure: name some of {', '.join(PROBLEMS)}.")
    for name in names:
        if name not in PROBLEMS:
            raise unknown_name("model", name, [*PROBLEMS, "all"])
    torch.set_num_threads(threads)
    facts = machine.facts() | {"load_average_before": machine.load_average(), "tiny": quick}
    folder = out / machine.slug(facts)
    folder.mkdir(parents=True, exist_ok=True)
    table = Table(
        "model", "plain, ms", *(f"step {n}{', checked' if n in CHECKED else ''}" for n in range(1, STEPS + 1))
    )
    found = {}
    for name in names:
        steps = first_steps((TINY_PROBLEMS if quick else PROBLEMS)[name], runs)
        found[name] = asdict(steps)
        table.add_row(name, f"{steps.plain_ms:.3g}", *(f"x{steps.over_plain(n + 1):.2f}" for n in range(STEPS)))
        record = {"kind": "clipless first steps", "machine": facts, "models": found}
        (folder / "first_steps.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)

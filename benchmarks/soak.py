"""A long run of a small model: what a step costs in memory and time must not grow with the number of steps.

    python benchmarks/soak.py
    python benchmarks/soak.py --steps 1000000 --clipping dc-e

Prints the memory of the process and the time of a step ten times on the way, with secure noise. Ends with exit code 1 if
memory grew by more than 5 bytes a step over the second half.
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

import clipless

MOST_GROWTH = 5.0


def resident() -> int:
    """Memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soaked(steps: int, clipping: str, ledger: bool) -> list[tuple[int, int, float]]:
    """Steps taken, memory, and seconds a step since the line before, ten times."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(10_000, 8), torch.randint(2, (10_000,)))
    private = clipless.make_private(
        model, optimizer, data, noise_multiplier=1.0, delta=1e-5, batch_size=32, steps=steps, clipping=clipping,
        accountant="rdp",
    )  # fmt: skip
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        if ledger:
            private.save_to(Path(folder, "ledger.jsonl"))
        start = time.perf_counter()
        for number, (x, y) in enumerate(private.loader, 1):
            optimizer.zero_grad()
            private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            if number % (steps // 10) == 0:
                now = time.perf_counter()
                lines.append((number, resident(), (now - start) / (steps // 10)))
                start = now
        private.detach()
    return lines


def main(
    steps: Annotated[int, typer.Option(min=10, help="How many steps.")] = 100_000,
    clipping: Annotated[str, typer.Option(help="auto-s keeps least, dc-e most.")] = "dc-e",
    ledger: Annotated[
        bool, typer.Option(help="Write a ledger to disk, which takes most of a small step's time.")
    ] = False,
    most_growth: Annotated[float, typer.Option(help="Bytes a step that memory may grow by.")] = MOST_GROWTH,
) -> None:
    lines = soaked(steps, clipping, ledger)
    table = Table("steps", "memory, MB", "ms a step")
    for number, memory, seconds in lines:
        table.add_row(f"{number:,}", f"{memory / 1e6:.1f}", f"{seconds * 1e3:.2f}")
    (middle, before, _), (end, after, _) = lines[len(lines) // 2 - 1], lines[-1]
    growth = (after - before) / (end - middle)
    console = Console()
    console.print(table)
    console.print(f"{clipping}: {growth:.2f} bytes a step over the second half")
    raise typer.Exit(int(growth > most_growth))


if __name__ == "__main__":
    typer.run(main)

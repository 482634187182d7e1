"""What noise costs: nanoseconds per number of each source's release, beside torch's bare generator.

    python benchmarks/noise.py

Everything is timed in turns, and the least time of each counts. `normal_` fills one tensor that is there already, from
one generator, in one thread whatever the setting. A release draws noise for every tensor, adds it to the sums and rounds to
the grid. On a busy machine read the processor time with one thread, which waiting does not enter.
"""

import os
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from clipless.noise import noise_source


def mlp() -> list[Tensor]:
    return [torch.zeros(shape) for n, k in ((1024, 784), (1024, 1024), (10, 1024)) for shape in ((n, k), (n,))]


def resnet() -> list[Tensor]:
    """The shapes of a network of 20 convolutions with group norm, and an output layer: 62 tensors."""
    widths = [64] * 5 + [128] * 5 + [256] * 5 + [512] * 5
    convolutions = zip(widths, [3, *widths], strict=False)
    shapes = [shape for n, k in convolutions for shape in ((n, k, 3, 3), (n,), (n,))]
    return [torch.zeros(shape) for shape in (*shapes, (10, 512), (10,))]


MODELS = {"mlp": mlp, "resnet": resnet}


def ways(sums: list[Tensor]) -> dict[str, Callable[[], object]]:
    """What is timed, by name; the others are compared with the first."""
    flat = torch.empty(sum(value.numel() for value in sums))
    stddevs = [1.3] * len(sums)
    sources = {"secure": noise_source(), "seeded": noise_source(seed=3)}

    def release(name: str) -> Callable[[], object]:
        return lambda: list(sources[name].release("gradient", 1, sums, stddevs))

    return {"normal_": flat.normal_} | {f"{name} release": release(name) for name in sources}


def least_times(timed: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds of each way, by the clock and of all processors: the least of several rounds, in which all take turns."""
    least = {name: (float("inf"), float("inf")) for name in timed}
    for _ in range(rounds):
        for name, run in timed.items():
            start = time.perf_counter(), time.process_time()
            run()
            spent = time.perf_counter() - start[0], time.process_time() - start[1]
            least[name] = min(least[name][0], spent[0]), min(least[name][1], spent[1])
    return least


def main(
    rounds: Annotated[int, typer.Option(help="Turns of every way.")] = 20,
    threads: Annotated[str, typer.Option(help="Numbers of threads, with commas.")] = "1,2",
) -> None:
    table = Table("model", "numbers", "threads", "way", "clock, ns", "x normal_", "cpu, ns", "x normal_")
    for count in map(int, threads.split(",")):
        torch.set_num_threads(count)
        for model, sums_of in MODELS.items():
            sums = sums_of()
            numbers = sum(value.numel() for value in sums)
            least = least_times(ways(sums), rounds)
            for name, times in least.items():
                cells = [model, f"{numbers / 1e6:.1f} M", str(count), name]
                for kind, seconds in enumerate(times):
                    cells += [f"{seconds / numbers * 1e9:.2f}", f"{seconds / least['normal_'][kind]:.2f}"]
                table.add_row(*cells)
    console = Console(width=120)
    console.print(table)
    console.print(f"torch {torch.__version__}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    typer.run(main)

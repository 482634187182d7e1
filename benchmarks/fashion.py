"""Full training end to end, private against plain, loader included: time ratio and test accuracy.

    python benchmarks/fashion.py --data path/to/fashion-mnist --epochs 40

Three runs of the 4-layer tanh CNN advance epoch by epoch in turn, so that a busy machine slows them alike:

- `private`: clipless, its Poisson loader;
- `plain`: the loop of `clipless train --clipping none`, torch's DataLoader with shuffling;
- `plain-indexed`: the same without a DataLoader, batches indexed from a shuffled permutation, the fastest loader there
  is for data in memory.

The time of a run is everything: setting up (for the private run, finding the noise for epsilon), training, testing once
an epoch and, for the private run, accounting once an epoch.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless.app import data as data_sets
from clipless.app import models, training
from clipless.app.bench import machine
from clipless.app.bench.timing import order
from clipless.runs.run_folder import RunFolder

RESULTS = Path(__file__).parent / "results"
PARTS = ("setup", "train", "test", "accounting")


@dataclass
class Run:
    """One of the three runs, and the seconds it has spent so far, by part."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Iterable[Any]
    private: Any = None
    accuracies: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def total(self) -> float:
        return sum(map(sum, self.seconds.values()))


class Indexed:
    """Shuffled batches of tensors in memory, without a DataLoader."""

    def __init__(self, records: TensorDataset, batch: int, seed: int) -> None:
        self._records, self._batch = records, batch
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for rows in torch.randperm(len(self._records), generator=self._generator).split(self._batch):
            yield tuple(tensor[rows] for tensor in self._records.tensors)


def begin(name: str, data: data_sets.Data, arguments: argparse.Namespace) -> Run:
    start = time.perf_counter()
    torch.manual_seed(arguments.seed)
    model = models.build("cnn", data.shape, data.classes)
    lr = arguments.lr if name == "private" else arguments.plain_lr
    optimizer = training.OPTIMIZERS["sgd"].make(model.parameters(), lr)
    private = None
    if name == "private":
        private = clipless.make_private(
            model,
            optimizer,
            data.train,
            epsilon=arguments.epsilon,
            delta=arguments.delta,
            batch_size=arguments.batch_size,
            epochs=arguments.epochs,
            clipping=arguments.clipping,
            seed=arguments.seed,
            loss_reduction="mean",
        )
        loader: Iterable[Any] = private.loader
    elif name == "plain":
        generator = torch.Generator().manual_seed(arguments.seed)
        loader = DataLoader(data.train, arguments.batch_size, shuffle=True, generator=generator)
    else:
        loader = Indexed(data.train, arguments.batch_size, arguments.seed)
    run = Run(model, optimizer, loader, private)
    run.seconds["setup"].append(time.perf_counter() - start)
    return run


def epoch(run: Run, data: data_sets.Data) -> None:
    times = [time.perf_counter()]
    for x, y in run.loader:
        run.optimizer.zero_grad()
        F.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()
    times.append(time.perf_counter())
    run.accuracies.append(training.accuracy(run.model, data.test))
    times.append(time.perf_counter())
    if run.private is not None:
        run.private.spent()
    times.append(time.perf_counter())
    for part, begun, ended in zip(PARTS[1:], times, times[1:], strict=False):
        run.seconds[part].append(ended - begun)


def train(data: data_sets.Data, arguments: argparse.Namespace) -> dict[str, Run]:
    names = ("private", "plain", "plain-indexed")
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch imports for seconds at the first optimizer of a process
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=len(names) * arguments.epochs)
        runs = {name: begin(name, data, arguments) for name in names}
        for number in range(arguments.epochs):
            for place in order(len(names), number):
                epoch(runs[names[place]], data)
                bar.update(task, advance=1, description=names[place])
    return runs


def record(runs: dict[str, Run], data: data_sets.Data, arguments: argparse.Namespace) -> dict[str, Any]:
    private = runs["private"].private
    expected = private.plan.steps * private.plan.expected_batch
    per_record = {name: sum(run.seconds["train"]) / (len(data.train) * arguments.epochs) for name, run in runs.items()}
    per_record["private"] = sum(runs["private"].seconds["train"]) / expected
    spent = private.spent()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.facts() | {"load_average": machine.load_average()},
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("data", "out")} | {"data": data.name},
        "records": len(data.train),
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "runs": {
            name: {
                "total_seconds": round(run.total(), 3),
                "seconds": {part: round(sum(times), 3) for part, times in run.seconds.items()},
                "train_seconds_per_epoch": [round(value, 4) for value in run.seconds["train"]],
                "test_accuracy": run.accuracies[-1],
                "test_accuracy_per_epoch": run.accuracies,
            }
            for name, run in runs.items()
        },
        "private_over": {
            name: {
                "total": runs["private"].total() / runs[name].total(),
                "train_per_record": per_record["private"] / per_record[name],
                "fastest_epoch": min(runs["private"].seconds["train"]) / min(runs[name].seconds["train"]),
            }
            for name in ("plain", "plain-indexed")
        },
    }


def show(found: dict[str, Any], written: Path) -> None:
    table = Table("run", "seconds", "of which training", "test accuracy", "private over it", title_justify="left")
    table.title = f"{found['settings']['data']}, {found['settings']['epochs']} epochs, ε = {found['epsilon']:.4f}"
    for name, run in found["runs"].items():
        over = found["private_over"].get(name)
        ratio = f"x{over['total']:.3f} (training, per record x{over['train_per_record']:.3f})" if over else ""
        seconds = (f"{run['total_seconds']:.1f}", f"{run['seconds']['train']:.1f}")
        table.add_row(name, *seconds, f"{run['test_accuracy']:.2%}", ratio)
    Console().print(table)
    Console().print(f"written: {written}", soft_wrap=True, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Full training, private against plain, loader included.")
    parser.add_argument(
        "--data", required=True, help="a folder of idx files such as FashionMNIST's, an .npz, or digits"
    )
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--clipping", default="auto-s")
    parser.add_argument("--lr", type=float, default=0.4, help="of the private run")
    parser.add_argument("--plain-lr", type=float, default=0.1, help="of the runs without privacy")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "fashion.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    RunFolder(arguments.out.parent).check_writable()
    data = data_sets.load(arguments.data)
    found = record(train(data, arguments), data, arguments)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(found, arguments.out)


if __name__ == "__main__":
    main()

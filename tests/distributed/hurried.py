"""What people in a hurry do on one rank and not on the other."""

import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared_run import SIZE, backward, begin, dataset, network, refused, released, steps
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, random_split

import clipless


class Augmented(Dataset[Any]):
    """Records that are changed at random whenever they are fetched: by torch, numpy and Python, or by generators of their
    own. Some may not be readable."""

    def __init__(self, own: int | None = None, broken: int | None = None) -> None:
        self.records, self.broken = dataset(), broken
        self.own = None if own is None else torch.Generator().manual_seed(own)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if number == self.broken:
            raise OSError("not readable")
        x, y = self.records[number]
        if self.own is not None:
            return x + torch.randn(x.shape, generator=self.own), y
        return x + torch.randn(x.shape) + random.random() + np.random.rand(), y


def records(rank: int, group: Any) -> dict[str, str]:
    """Which records the ranks have."""
    base = dataset()

    def tried(data: Any) -> str:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = refused(lambda: begin(data=data, group=group)[2].detach())
        return " ".join([found, *(str(warning.message) for warning in told)])

    part, _ = random_split(base, [SIZE - 10, 10], torch.Generator().manual_seed(rank))
    same, _ = random_split(base, [SIZE - 10, 10], torch.Generator().manual_seed(1))
    return {
        "split by each rank": tried(part),
        "split alike": tried(same),
        "divided": tried(Subset(base, range(rank, SIZE, 2))),
        "augmented": tried(Augmented()),
        "augmented in its own way": tried(Augmented(own=rank)),
        "not readable": tried(Augmented(broken=0)),
        "not readable on one": tried(Augmented(broken=0 if rank else None)),
    }


def hurried(rank: int, group: Any, folder: Path) -> dict[str, Any]:
    """Each in a run of its own."""

    def run(work: Callable[[Any, Any, clipless.Private], Any], model: Any = None, **changes: Any) -> Any:
        outer, optimizer, private = begin(model, **({"group": group, "steps": 3} | changes))
        try:
            return work(outer, optimizer, private)
        finally:
            private.detach()

    def looks(model: Any, optimizer: Any, private: clipless.Private) -> list[Tensor]:
        for _ in steps(model, optimizer, private):
            if rank == 0:
                private.spent()
                with torch.no_grad():
                    model.eval()(torch.zeros(3, 4))
                model.train()
        return [p.detach().clone() for p in model.parameters()]

    def fails(model: Any, optimizer: Any, private: clipless.Private) -> list[Tensor]:
        """One rank's forward pass fails and is taken again."""
        for x, y in private.loader:
            if rank == 1:
                with suppress(RuntimeError):
                    model(x[:, :2])
            backward(model, private, (x, y))
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def learns_faster(model: Any, optimizer: Any, private: clipless.Private) -> tuple[str, int]:
        training = steps(model, optimizer, private)
        next(training), next(training)
        optimizer.param_groups[0]["lr"] *= 1 + rank
        return refused(lambda: next(training)), private.ledger.steps

    def accumulates(model: Any, optimizer: Any, private: clipless.Private) -> tuple[str, int]:
        def loop() -> None:
            for number, batch in enumerate(private.loader):
                backward(model, private, batch)
                if number % 2:
                    optimizer.step()

        return refused(loop), private.ledger.steps

    def saves(model: Any, optimizer: Any, private: clipless.Private) -> tuple[str, int]:
        private.save_to(folder / "hurried.jsonl")
        training = steps(model, optimizer, private)
        next(training)
        save = lambda: private.save_checkpoint(folder / "hurried.pt")  # noqa: E731
        return refused(lambda: next(training) if rank else save()), private.ledger.steps

    weights: dict[str, Any] = {
        "other parts": released(micro=1 + rank, group=group)["weights"],
        "looks": run(looks),
        "looks in a wrapper": run(looks, DistributedDataParallel(network(), process_group=group)),
        "fails": run(fails),
        "workers": released(data=Workers(), group=group)["weights"],
    }
    return {
        "weights": weights,
        "learns faster": run(learns_faster),
        "accumulates": run(accumulates, steps=4),
        "saves": run(saves),
        "records": records(rank, group),
    }


class Workers(DataLoader[Any]):
    """The records by a worker of each rank."""

    def __init__(self) -> None:
        super().__init__(Listed(), batch_size=5, num_workers=1)


class Listed(Dataset[Any]):
    """Not in memory as a whole, so that they are fetched one by one."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> Any:
        return dataset()[number]

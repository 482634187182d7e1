"""A small run that any number of processes can train together, and what it releases."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import clipless

PATIENCE = timedelta(seconds=60)
SIZE, FEATURES, CLASSES, BATCH = 60, 4, 3, 5
# Noise so small that the grid to which releases are rounded is far below 1e-6 of their norm.
PLAN: dict[str, Any] = {"noise_multiplier": 1e-5, "delta": 1e-5, "batch_size": BATCH, "accountant": "gdp", "seed": 7}


def between(members: Sequence[int]) -> Any:
    """A group of these ranks, which wait for each other as long as in a world, and not for torch's half an hour."""
    return dist.new_group(list(members), timeout=PATIENCE)


def dataset(scale: float = 1.0, without: int | None = None) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SIZE, FEATURES, generator=generator) * scale, torch.arange(SIZE) % CLASSES
    if without is not None:
        x[without] = 0.0  # through layers without bias a record of zeros has no gradient: it is as if it were not there
    return TensorDataset(x, y)


def network(seed: int = 0, bias: bool = True, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    hidden = [nn.Tanh(), nn.Dropout(dropout)] if dropout else [nn.Tanh()]
    return nn.Sequential(nn.Linear(FEATURES, 6, bias=bias), *hidden, nn.Linear(6, CLASSES, bias=bias))


def begin(
    model: nn.Module | None = None, data: TensorDataset | None = None, lr: float = 0.1, **changes: Any
) -> tuple[nn.Module, Optimizer, clipless.Private]:
    model = network() if model is None else model
    optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
    settings = PLAN | {"steps": 3} | changes
    return model, optimizer, clipless.make_private(model, optimizer, dataset() if data is None else data, **settings)


def backward(model: nn.Module, private: clipless.Private, part: Any) -> None:
    private.backward(F.cross_entropy(model(part[0]), part[1], reduction="none"))


def steps(
    model: nn.Module, optimizer: Optimizer, private: clipless.Private, micro: int | None = None
) -> Iterator[list[Tensor]]:
    """Train one pass; gives the released gradient of every step."""
    for parts in private.loader.microbatches(micro) if micro else ([batch] for batch in private.loader):
        optimizer.zero_grad()
        for part in parts:
            backward(model, private, part)
        optimizer.step()
        yield [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, also of a sharded one: a call for every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def released(model: nn.Module | None = None, micro: int | None = None, **changes: Any) -> dict[str, Any]:
    """Everything that one run releases or reports."""
    model, optimizer, private = begin(model, **changes)
    gradients = list(steps(model, optimizer, private, micro))
    said = {
        "gradients": gradients,
        "weights": [whole(p.detach()).clone() for p in model.parameters()],
        "thresholds": private.thresholds,
        "history": private.history.to_dict(),
        "ledger": private.ledger.to_dict(),
        "spent": private.spent().epsilon,
        "plan": private.plan.to_dict(),
    }
    private.detach()
    return said


def refused(work: Callable[[], Any]) -> str:
    """The refusal that the work meets, with its type."""
    try:
        work()
    except clipless.CliplessError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"

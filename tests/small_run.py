"""A private run small enough to be interrupted many times: with dropout, momentum and a scheduler, so that weights,
optimizer, random states and extra state all matter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless

STEPS, SIZE, BATCH = 12, 60, 12
PLAN = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": BATCH, "steps": STEPS, "accountant": "rdp"}


def dataset(size: int = SIZE) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 5, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


@dataclass
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    private: clipless.Private

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.scheduler.step()

    def go(self, steps: int = STEPS) -> "Run":
        """Take at most so many steps."""
        for _, (x, y) in zip(range(min(steps, STEPS - self.private.steps_taken)), self.private.loader, strict=False):
            self.step(x, y)
        return self

    def save(self, path: Path) -> None:
        self.private.save_checkpoint(path, extra={"scheduler": self.scheduler.state_dict()})

    def load(self, path: Path, **options: Any) -> "Run":
        extra = self.private.load_checkpoint(path, **options)
        self.scheduler.load_state_dict(extra["scheduler"])
        return self

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def close(self) -> "Run":
        self.private.detach()
        return self


def begin(
    seed: int | None = 5, *, data: Any = None, hidden: int = 7, lr: float = 0.1, optimizer: Any = None, **options: Any
) -> Run:
    """A run before its first step. The random state after this call depends on nothing but the arguments."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, hidden), nn.Dropout(0.3), nn.Tanh(), nn.Linear(hidden, 2))
    chosen = (optimizer or (lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9)))(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(chosen, 0.95)
    private = clipless.make_private(
        model,
        chosen,
        dataset() if data is None else data,
        seed=seed,
        **{"loss_reduction": "mean", **PLAN, **options},
    )
    return Run(model, chosen, scheduler, private)

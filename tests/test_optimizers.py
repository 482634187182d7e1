"""P3 and P4: with automatic clipping the threshold is a learning rate, or nothing at all, for every optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_optimizer import LARS, Lamb
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam
from torch.utils.data import TensorDataset

import clipless

R, DECAY, STEPS = 4.0, 0.1, 12
EPS = 1e-30

Make = Callable[..., Optimizer]

NOT_ADAPTIVE: dict[str, Make] = {
    "sgd": SGD,
    "heavy-ball": lambda params, **k: SGD(params, momentum=0.9, **k),
    "nesterov": lambda params, **k: SGD(params, momentum=0.9, nesterov=True, **k),
}

ADAPTIVE: dict[str, Make] = {
    "adagrad": lambda params, **k: Adagrad(params, eps=EPS, **k),
    "adadelta": lambda params, **k: Adadelta(params, eps=1e-14, **k),
    "adam": lambda params, **k: Adam(params, eps=EPS, **k),
    "adamax": lambda params, **k: Adamax(params, eps=EPS, **k),
    "nadam": lambda params, **k: NAdam(params, eps=EPS, **k),
    "radam": lambda params, **k: RAdam(params, eps=EPS, **k),
    "lars": LARS,
}

DECOUPLED: dict[str, Make] = {
    "adamw": lambda params, **k: AdamW(params, eps=EPS, **k),
    "lamb": lambda params, **k: Lamb(params, eps=EPS, **k),
}


def trajectory(make: Make, threshold: float, **settings: Any) -> Tensor:
    """How far all weights move in a private run in double precision, under one seed of noise and sampling.

    The learning rate is 0 for the first steps: RAdam takes these without its adaptive part, as plain momentum. There are
    no biases: LARS takes vectors as they are, without its adaptive part.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    x, y = torch.randn(60, 5).double(), torch.randint(3, (60,))
    optimizer = make(model.parameters(), **settings)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step >= 6))
    private = clipless.make_private(
        model,
        optimizer,
        TensorDataset(x, y),
        noise_multiplier=1.0,
        batch_size=12,
        steps=STEPS,
        clipping=clipless.auto_s(threshold=threshold),
        seed=5,
        loss_reduction="mean",
    )
    for x, y in private.loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        warm_up.step()
    private.detach()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - start


def same(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= 1e-5 * float(one.norm())


@pytest.mark.parametrize("make", NOT_ADAPTIVE.values(), ids=NOT_ADAPTIVE)
def test_the_threshold_is_a_learning_rate_for_sgd(make: Make) -> None:
    """P3: (R, η, λ) and (1, ηR, λ/R) move the weights alike."""
    moved = trajectory(make, R, lr=0.05, weight_decay=DECAY)
    assert same(moved, trajectory(make, 1.0, lr=0.05 * R, weight_decay=DECAY / R))
    assert not same(moved, trajectory(make, 1.0, lr=0.05, weight_decay=DECAY))


@pytest.mark.parametrize("make", ADAPTIVE.values(), ids=ADAPTIVE)
def test_the_threshold_is_nothing_for_adaptive_optimizers(make: Make) -> None:
    """P4: (R, η, λ) and (1, η, λ/R) move the weights alike, exactly so as the optimizer's own eps goes to 0."""
    moved = trajectory(make, R, lr=0.05, weight_decay=DECAY)
    assert same(moved, trajectory(make, 1.0, lr=0.05, weight_decay=DECAY / R))
    assert not same(moved, trajectory(make, 1.0, lr=0.05, weight_decay=DECAY))


@pytest.mark.parametrize("make", DECOUPLED.values(), ids=DECOUPLED)
def test_decoupled_weight_decay_is_not_scaled(make: Make) -> None:
    """P4: with decay beside the gradient and not in it, (R, η, λ) and (1, η, λ) move the weights alike."""
    moved = trajectory(make, R, lr=0.05, weight_decay=DECAY)
    assert same(moved, trajectory(make, 1.0, lr=0.05, weight_decay=DECAY))
    assert not same(moved, trajectory(make, 1.0, lr=0.05, weight_decay=DECAY / R))

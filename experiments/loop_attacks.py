"""Attacks on what surrounds the model in a training loop: `python experiments/loop_attacks.py`, some minutes on one core.

Every loop trains with real noise, 120 times with one record and 120 times without it (its losses are zero then). Half of the
runs choose a direction in the space of final weights and a threshold, the other half are told apart by them. At the claimed
epsilon the true positive rate minus the false positive rate is at most tanh(epsilon / 2). Loops that clipless refuses are not
attacked: the table says what refuses them. Results go to experiments/results/loop_attacks.json, and the table to
docs/sharp_edges.md.
"""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless.auditing.rates import clopper_pearson

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "experiments" / "results" / "loop_attacks.json", ROOT / "docs" / "sharp_edges.md"
BEGIN, END = "<!-- loop attacks: written by experiments/loop_attacks.py -->", "<!-- end of loop attacks -->"
EPSILON, DELTA, CONFIDENCE = 0.93, 1e-5, 0.95
RECORDS, BATCH, STEPS, FEATURES, CLASSES = 160, 16, 24, 4, 3
# The record that is there or not, and how far it is from the others.
TARGET, FAR = 0, 50.0

Function = Callable[[nn.Module, Any], Tensor]


class Model(nn.Module):
    """An encoder and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).tanh())


def data(present: bool) -> TensorDataset:
    """Records of inputs, labels and weights; without the target its input and its weight are zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    y = torch.randint(1, CLASSES, (RECORDS,), generator=generator)
    weight = torch.ones(RECORDS)
    x[TARGET], y[TARGET], weight[TARGET] = (FAR, 0, 1.0) if present else (0.0, 1, 0.0)
    return TensorDataset(x, y, weight)


def plain(model: nn.Module, batch: Any) -> Tensor:
    x, y, weight = batch
    return weight * F.cross_entropy(model(x), y, reduction="none")


@dataclass(frozen=True)
class Loop:
    """A training loop: `train(present)` returns the weights after it, or raises what refuses it. `known` says where the
    documentation tells that clipless does not see it."""

    name: str
    form: str
    train: Callable[[bool], Tensor]
    known: bool = False


LOOPS: list[Loop] = []


def private_run(present: bool, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, clipless.Private]:
    """A run with noise from the operating system's generator."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"noise_multiplier": NOISE, "delta": DELTA, "batch_size": BATCH, "steps": STEPS, "accountant": "rdp"}
    return model, optimizer, clipless.make_private(model, optimizer, data(present), **{**given, **settings})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_step(name: str, make: Callable[[], Function]) -> None:
    """A loop with `private.step`."""

    def train(present: bool) -> Tensor:
        model, _, private = private_run(present)
        function = make()
        try:
            for batch in private.loader:
                private.step(function, batch)
        finally:
            private.detach()
        return weights(model)

    LOOPS.append(Loop(name, "private.step", train))


def by_backward(name: str, make: Callable[[], Function], known: bool = True) -> None:
    """The same loop with `private.backward`."""

    def train(present: bool) -> Tensor:
        model, optimizer, private = private_run(present)
        function = make()
        try:
            for batch in private.loader:
                optimizer.zero_grad()
                private.backward(function(model, batch))
                optimizer.step()
        finally:
            private.detach()
        return weights(model)

    LOOPS.append(Loop(name, "private.backward", train, known))


def by_loss(name: str, loss: Callable[[Tensor, Any], Tensor], reduction: str, known: bool = False) -> None:
    """A loop with `loss.backward()`; `loss` is computed from the model's outputs."""

    def train(present: bool) -> Tensor:
        model, optimizer, private = private_run(present, loss_reduction=reduction)
        try:
            for batch in private.loader:
                optimizer.zero_grad()
                loss(model(batch[0]), batch).backward()
                optimizer.step()
        finally:
            private.detach()
        return weights(model)

    LOOPS.append(Loop(name, "loss.backward()", train, known))


def cross_entropies(z: Tensor, batch: Any) -> Tensor:
    return batch[2] * F.cross_entropy(z, batch[1], reduction="none")


# Loops.


def running_scale() -> Function:
    kept = {"scale": 1.0}

    def losses(model: nn.Module, batch: Any) -> Tensor:
        found, scale = plain(model, batch), kept["scale"]
        kept["scale"] = 0.5 * scale + 0.5 * float(found.detach().sum() + 1)
        return found * scale

    return losses


def feature_queue() -> Function:
    kept = {"keys": torch.zeros(4, CLASSES)}

    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        found = cross_entropies(z, batch) + batch[2] * (z @ kept["keys"].T).logsumexp(1)
        largest = z.detach().norm(dim=1).argsort()[-1:]
        kept["keys"] = torch.cat([5 * F.normalize(z.detach()[largest]), kept["keys"]])[:4]
        return found

    return losses


def momentum_centers() -> Function:
    centers = torch.zeros(CLASSES, 6)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        h = 5 * model.encoder(batch[0]).tanh() if isinstance(model, Model) else model(batch[0])
        return batch[2] * (h - kept(h, batch)).square().sum(1) + cross_entropies(model.head(h), batch)

    def kept(h: Tensor, batch: Any) -> Tensor:
        before = centers.clone()
        if len(h):
            centers.mul_(0.5).add_(0.5 * h.detach()[h.detach().norm(dim=1).argmax()])
        return before[batch[1]]

    return losses


def trained_centers() -> Function:
    """A center loss whose centers have an optimizer of their own, which the function steps."""
    centers = nn.Parameter(torch.zeros(CLASSES, CLASSES))
    optimizer = torch.optim.SGD([centers], lr=0.5)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        if centers.grad is not None:
            optimizer.step()
            optimizer.zero_grad()
        z = model(batch[0])
        return cross_entropies(z, batch) + batch[2] * (z - centers[batch[1]]).square().sum(1)

    return losses


def with_statistics() -> Function:
    """The features of a batch are centered between encoder and head, by detached numbers."""

    def losses(model: nn.Module, batch: Any) -> Tensor:
        h = model.encoder(batch[0])
        return cross_entropies(model.head((h - h.mean(0).detach()).tanh()), batch)

    return losses


def on_inputs(change: Callable[[Tensor], Tensor]) -> Callable[[], Function]:
    return lambda: lambda model, batch: plain(model, (change(batch[0]), *batch[1:]))


def weighted(weight: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Function]:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        found = plain(model, batch)
        return found * weight(found.detach(), batch[1]) if len(found) else found

    return lambda: losses


def sign_of_the_hardest(found: Tensor, labels: Tensor) -> Tensor:
    return torch.where(found.max() > 5, -1.0, 1.0)


EVERYWHERE: dict[str, Callable[[], Function]] = {
    "a running loss scale": lambda: signed(running_scale()),
    "a feature queue": feature_queue,
    "a center loss with its own optimizer": trained_centers,
    "centers that follow the features": momentum_centers,
    "batch statistics between modules": with_statistics,
    "inputs scaled by the batch": on_inputs(lambda x: x / x.abs().max().clamp(min=1e-3)),
    "inputs centered by the batch": on_inputs(lambda x: x - x.mean(0) if len(x) else x),
    "weights from other losses": weighted(sign_of_the_hardest),
    "weights from other labels": weighted(lambda found, labels: torch.where((labels == 0).any(), -1.0, 1.0)),
}


def signed(inner: Function) -> Function:
    """The loss with the sign that its running scale has chosen: what the kept number makes of it all records follow."""

    def losses(model: nn.Module, batch: Any) -> Tensor:
        found, before = inner(model, batch), plain(model, batch)
        return torch.where((found.detach().sum() > 40 * before.detach().sum()), -1.0, 1.0) * before

    return losses


COUPLED: dict[str, tuple[Callable[[Tensor, Any], Tensor], str, bool]] = {
    "a squared mean of the outputs": (
        lambda z, b: cross_entropies(z, b).sum() + 100 * (b[2].unsqueeze(1) * z).mean(0).square().sum(),
        "sum",
        False,
    ),
    "the logarithm of a mean": (lambda z, b: len(z) * cross_entropies(z, b).mean().add(1e-3).log(), "sum", False),
    "variances of the outputs (VICReg)": (
        lambda z, b: cross_entropies(z, b).sum() - 10 * len(z) * (z.var(0) + 1e-3).sqrt().sum(),
        "sum",
        False,
    ),
    "pairwise hinges (piecewise linear)": (
        lambda z, b: 0.1 * F.relu(1 + z[:, :1] - z[:, 0].unsqueeze(0)).sum() + 0 * cross_entropies(z, b).sum(),
        "sum",
        True,
    ),
}

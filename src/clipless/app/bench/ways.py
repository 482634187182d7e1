"""The ways of taking a training step that the benchmark compares: plain, clipless with each clipping, and Opacus.

All ways of a model start from the same weights, see the same records, and step with the same optimizer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipless.app.bench import opacus_ways
from clipless.app.bench.problems import Problem
from clipless.arguments import unknown_name
from clipless.clipping import CLIPPINGS, Clipping, auto_s
from clipless.errors import InvalidArgument
from clipless.private import Private, make_private

PLAIN = "plain"
OPACUS = "opacus-"
PER_LAYER = "auto-s per-layer"
SHORT = ("auto-s", PER_LAYER, "dc-e")
NOISE_MULTIPLIER, SEED, MANY_STEPS = 1.0, 0, 1_000_000

InputsAndLabels = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Runner:
    """A model ready to train. `draw` returns the batch and is not part of a step; only `step` is timed.

    `note` tells how the way differs from the others, if it does.
    """

    draw: Callable[[], InputsAndLabels]
    step: Callable[[Tensor, Tensor], None]
    close: Callable[[], None]
    note: str | None = None


def plain(problem: Problem) -> Runner:
    """Training without privacy."""
    model, x, y = problem.make(SEED)
    return Runner(lambda: (x, y), partial(train_step, problem, model, problem.optimizer(model)), lambda: None)


def private(
    problem: Problem, clipping: Clipping, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> Runner:
    """clipless. Every record is in every batch, so that no small batch sets the minimum."""
    model, x, y = problem.make(SEED)
    model = wrap(model)
    optimizer = problem.optimizer(model)
    attached = attach(model, optimizer, x, y, clipping)
    batches: Iterator[Any] = iter(attached.loader)

    def draw() -> InputsAndLabels:
        inputs, targets = next(batches)
        return inputs, targets

    return Runner(draw, partial(train_step, problem, model, optimizer), attached.detach)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, clipping: Clipping) -> Private:
    """A private run whose every batch is the whole of x and y."""
    return make_private(
        model,
        optimizer,
        TensorDataset(x, y),
        noise_multiplier=NOISE_MULTIPLIER,
        delta=1 / (10 * len(x)),
        batch_size=len(x),
        steps=MANY_STEPS,
        clipping=clipping,
        loss_reduction="mean",
    )


def train_step(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """One step of an ordinary training loop."""
    optimizer.zero_grad()
    problem.loss(model(x), y).backward()
    optimizer.step()


def opacus(problem: Problem, mode: str) -> Runner:
    """Opacus, in one of its modes, on the same batch; its own replacement layers where it needs them."""
    model, x, y = problem.make(SEED)
    step, note = opacus_ways.step(problem, model, problem.optimizer, len(x), mode, NOISE_MULTIPLIER)
    return Runner(lambda: (x, y), step, lambda: None, note)


def _clipless(make: Callable[[], Clipping]) -> Callable[[Problem], Runner]:
    return lambda problem: private(problem, make())


_MAKERS: Mapping[str, Callable[[], Clipping]] = {PER_LAYER: partial(auto_s, groups="per-layer"), **CLIPPINGS}
CLIPLESS: Mapping[str, Callable[[Problem], Runner]] = {
    name: _clipless(_MAKERS[name]) for name in dict.fromkeys((*SHORT, *_MAKERS))
}
WAYS: Mapping[str, Callable[[Problem], Runner]] = {
    PLAIN: plain,
    **CLIPLESS,
    **{OPACUS + mode: partial(opacus, mode=mode) for mode in opacus_ways.MODES},
}


def chosen(clippings: str, with_opacus: bool | None) -> tuple[str, ...]:
    """The ways to compare with plain training. `clippings` is "short", "all", or names separated by commas.

    `with_opacus=None` includes Opacus if it is installed.

    >>> chosen("auto-s,dc-e", with_opacus=False)
    ('auto-s', 'dc-e')
    """
    names = {"short": SHORT, "all": tuple(CLIPLESS)}.get(clippings) or listed(clippings)
    for name in names:
        if name not in CLIPLESS:
            raise unknown_name("clipping", name, [*CLIPLESS, "short", "all"])
    if with_opacus and not opacus_ways.installed():
        raise InvalidArgument("Opacus is not installed: pip install 'clipless[bench]', or leave it out (--no-opacus).")
    others = with_opacus is not False and opacus_ways.installed()
    return (*names, *(OPACUS + mode for mode in opacus_ways.MODES if others))


def listed(text: str) -> tuple[str, ...]:
    """Names separated by commas, each once.

    >>> listed("mlp, cnn,mlp")
    ('mlp', 'cnn')
    """
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))

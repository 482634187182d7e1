"""Opacus on the models of the benchmark, used as its documentation says, for a fair comparison.

Its loader is left out, its optimizer's step and its noise are in. Where it needs a layer of its own (an LSTM), the
layer is replaced by its own tool; where it refuses a model, its message is kept and shown.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clipless.app.bench.problems import Problem

MODES = ("hooks", "ghost")
MAX_GRAD_NORM = 1.0

Step = Callable[[Tensor, Tensor], None]


def installed() -> bool:
    return importlib.util.find_spec("opacus") is not None


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings that Opacus gives at every use, about its generator and about hooks of first layers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def step(
    problem: Problem,
    model: nn.Module,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    batch: int,
    mode: str,
    noise_multiplier: float,
) -> tuple[Step, str | None]:
    """One training step under Opacus, and a note when a layer had to be replaced. Raises whatever Opacus raises."""
    with quiet():
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator

        replaced = sorted({type(each).__name__ for each in model.modules() if type(each) in ModuleValidator.FIXERS})
        model = ModuleValidator.fix(model) if replaced else model
        records = DataLoader(TensorDataset(torch.zeros(batch)), batch_size=batch)
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer_of(model),
            criterion=nn.CrossEntropyLoss(),
            data_loader=records,
            noise_multiplier=noise_multiplier,
            max_grad_norm=MAX_GRAD_NORM,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
    take = _ghost(problem, *made[:3]) if mode == "ghost" else _hooks(problem, *made[:2])
    note = f"{', '.join(replaced)} replaced by Opacus's own" if replaced else None
    return take, note


def _hooks(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def take(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        problem.loss(model(x), y).backward()
        optimizer.step()

    return take


def _ghost(
    problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Callable[..., Tensor]
) -> Step:
    """The criterion does both backward passes; for a loss on every position it is told the shape of the output."""

    def take(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(x)
        shape = logits.shape if problem.next_word else None
        criterion(logits.flatten(0, -2), y.flatten(), shape=shape).backward()
        optimizer.step()

    return take

"""Argument names of other libraries: each is refused with the name used here."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from clipless.arguments import unknown_name
from clipless.errors import InvalidType

P = ParamSpec("P")
R = TypeVar("R")

_CLIPPING = "clipping=, which needs no bound by default; for a fixed one clipping=clipless.abadi(threshold=1.0)"
_ALWAYS = "nothing: batches are always Poisson, so leave it out"
_ONE_ENGINE = "nothing: there is one engine, and it is exact, so leave it out"
_NOISE = "seed=, for noise that repeats; without it noise is secure"

FOREIGN_NAMES = {
    "module": "model=",
    "data_loader": "dataset=, a Dataset or a DataLoader; train on private.loader",
    "dataloader": "dataset=, a Dataset or a DataLoader; train on private.loader",
    "train_loader": "dataset=, a Dataset or a DataLoader; train on private.loader",
    "target_epsilon": "epsilon=",
    "target_delta": "delta=",
    "max_grad_norm": _CLIPPING,
    "l2_norm_clip": _CLIPPING,
    "clipping_fn": _CLIPPING,
    "noise_scale": "noise_multiplier=",
    "sigma": "noise_multiplier=",
    "max_epochs": "epochs=",
    "num_epochs": "epochs=",
    "max_steps": "steps=",
    "expected_batch_size": "batch_size=",
    "poisson_sampling": _ALWAYS,
    "batch_first": "nothing: the batch dimension is detected, so leave it out",
    "grad_sample_mode": _ONE_ENGINE,
    "ghost_clipping": _ONE_ENGINE,
    "criterion": "nothing: the loss stays in your loop, and loss_reduction= says what it does",
    "noise_generator": _NOISE,
    "secure_mode": "nothing: noise is secure unless a seed is given, so leave it out",
    "secure_rng": "nothing: noise is secure unless a seed is given, so leave it out",
}


def names_answered(function: Callable[P, R]) -> Callable[P, R]:
    """The function, refusing unknown arguments with the name of the right one."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def answered(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise _unknown(name, list(known))
        return function(*args, **kwargs)

    return answered


def _unknown(name: str, known: list[str]) -> InvalidType:
    if name in FOREIGN_NAMES:
        return InvalidType(f"make_private has no argument {name}=. What you mean is {FOREIGN_NAMES[name]}.")
    return InvalidType(str(unknown_name("argument", name, known)))

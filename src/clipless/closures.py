"""Closures given to `optimizer.step()`, and steps within steps."""

import sys
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from clipless.errors import InvalidType, Misuse

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_STEP = Optimizer.profile_hook_step(lambda: None).__code__


def call_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Call the closure of `step(closure)`, once, as torch would: with gradients enabled.

    Returns the arguments for the optimizer, with the closure replaced by one that returns the same loss; None if there is
    no closure.
    """
    given = [argument for argument in (*args[1:], *kwargs.values()) if argument is not None]
    if not given:
        return None
    if len(given) > 1 or not callable(given[0]):
        raise InvalidType(f"step() takes a closure or nothing, got {', '.join(map(repr, given))}.")
    with torch.enable_grad():
        called = _CalledClosure(optimizer, given[0]())
    rest = (called if argument is not None else None for argument in args[1:])
    return (args[0], *rest), {name: called if value is not None else None for name, value in kwargs.items()}


class _CalledClosure:
    """A closure that was called already. Raises if it is called after the weights have changed: its loss would be stale."""

    def __init__(self, optimizer: Optimizer, loss: Any) -> None:
        self._optimizer, self._loss = optimizer, loss
        self._versions = self._parameter_versions()

    def __call__(self) -> Any:
        if self._parameter_versions() != self._versions:
            raise Misuse(
                f"{type(self._optimizer).__name__} calls the closure again after it has moved the weights, and one batch "
                "gives one private gradient: take an optimizer of one gradient per step."
            )
        return self._loss

    def _parameter_versions(self) -> list[int]:
        return [p._version for group in self._optimizer.param_groups for p in group["params"]]


def within_own_step(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer is already running: that of a subclass which calls `super().step()`."""
    running, frame = 0, sys._getframe(1)
    current: FrameType | None = frame
    while current is not None:
        running += current.f_code is _STEP and current.f_locals.get("self") is optimizer
        current = current.f_back
    return running > 1

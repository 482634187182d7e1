"""What surrounds the release in `optimizer.step()`: closures, steps within steps, gradients that are not private, and habits
of plain training that have no effect here."""

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from clipless.errors import InvalidType, Misuse
from clipless.processes import refuse_other_processes

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_STEP = Optimizer.profile_hook_step(lambda: None).__code__
_AMP_MARK = "_step_supports_amp_scaling"
_CLIP_GRAD = {"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"}


def closure_called(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Call the closure of `step(closure)`, once, as torch would: with gradients enabled.

    Returns the arguments that the optimizer goes on with, in which the closure is replaced by one that returns the same
    loss; None if there is no closure.
    """
    given = [argument for argument in (*args[1:], *kwargs.values()) if argument is not None]
    if not given:
        return None
    if len(given) > 1 or not callable(given[0]):
        raise InvalidType(f"step() takes a closure or nothing, got {', '.join(map(repr, given))}.")
    with torch.enable_grad():
        known = _Known(optimizer, given[0]())
    rest = (known if argument is not None else None for argument in args[1:])
    return (args[0], *rest), {name: known if value is not None else None for name, value in kwargs.items()}


class _Known:
    """A closure that was called already. Refuses to be called after the weights have moved, when it would lie."""

    def __init__(self, optimizer: Optimizer, loss: Any) -> None:
        self._optimizer, self._loss = optimizer, loss
        self._versions = self._seen()

    def __call__(self) -> Any:
        if self._seen() != self._versions:
            raise Misuse(
                f"{type(self._optimizer).__name__} calls the closure again after it has moved the weights, and one batch "
                "gives one private gradient: take an optimizer of one gradient per step."
            )
        return self._loss

    def _seen(self) -> list[int]:
        return [p._version for group in self._optimizer.param_groups for p in group["params"]]


def within_own_step(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer is under way already: a subclass's, that calls `super().step()`."""
    wrappers = (frame for frame in _callers() if frame.f_code is _STEP)
    return sum(frame.f_locals.get("self") is optimizer for frame in wrappers) > 1


def clear_gradients(optimizer: Optimizer, but: Collection[nn.Parameter] = ()) -> None:
    """No gradient for any of the optimizer's parameters, except those: what lies there may be in clear."""
    kept = set(map(id, but))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in kept:
                parameter.grad = None


class Guard:
    """Stands before each batch and each step of one optimizer, in the process that it was made in."""

    def __init__(self, optimizer: Optimizer, group: bool | None) -> None:
        self._optimizer, self._group, self._owner = optimizer, group, os.getpid()
        self._habits = Habits()
        self._marked = False

    def attach(self, parameters: dict[str, nn.Parameter]) -> "Guard":
        """Refuse other optimizers for these parameters, and drop gradients of earlier training, which are in clear.

        The optimizer gets torch's own mark of one that sees to scaling itself, as fused ones have it, so that GradScaler
        calls `step()`, which refuses it; without the mark it fails before, for want of gradients.
        """
        everywhere = register_optimizer_step_pre_hook(refuse_other_optimizers(weakref.ref(self._optimizer), parameters))
        self._unhook = weakref.finalize(self, everywhere.remove)
        clear_gradients(self._optimizer)
        self._habits.look_for_earlier_steps(self._optimizer)
        self._marked = _AMP_MARK not in vars(self._optimizer)
        if self._marked:
            vars(self._optimizer)[_AMP_MARK] = True
        return self

    def remove(self) -> None:
        self._unhook()
        if self._marked:
            vars(self._optimizer).pop(_AMP_MARK, None)

    def before_batch(self, first: bool) -> None:
        """Refuses a batch in another process; `first` says that nothing has been recorded yet."""
        refuse_other_processes(self._group, self._owner)
        self._habits.look_for_clip_grad()
        if first:
            self._habits.look_for_earlier_steps(self._optimizer)

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Refuses a step in another process or under a gradient scaler, else calls its closure."""
        refuse_other_processes(self._group, self._owner)
        refuse_scaler(self._optimizer, kwargs)
        self._habits.look_for_clip_grad()
        return closure_called(self._optimizer, args, kwargs)


def refuse_scaler(optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
    """Refuses a step under a gradient scaler, and takes off what the scaler has put on the optimizer for it."""
    marks = [vars(optimizer).pop(name, None) for name in ("grad_scale", "found_inf")]
    if "grad_scaler" in kwargs or any(mark is not None for mark in marks):
        raise Misuse(
            "a gradient scaler would scale the gradients and not the noise: train without GradScaler, that is "
            "loss.backward() and optimizer.step() (bfloat16 needs no scaler)."
        )


def refuse_other_optimizers(
    own: "weakref.ref[Optimizer]", private: dict[str, nn.Parameter]
) -> Callable[[Optimizer, Any, Any], None]:
    """A hook on every optimizer: one that steps these parameters in place of the private one is refused."""

    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is own():
            return
        known = {id(p) for p in private.values()}
        if any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            raise Misuse(
                "another optimizer steps the parameters of a private model: step the optimizer given to make_private, or "
                "detach() and attach the new one."
            )

    return refuse


class Habits:
    """Warns, once each, of what a script does that means something else in private training."""

    def __init__(self) -> None:
        self._read: set[int] = set()
        self._told: set[str] = set()

    def look_for_clip_grad(self) -> None:
        """Gradients are clipped record by record, and before step() there are none to clip.

        Nothing of torch's tells that `clip_grad_norm_` was called, so the functions that ask for a batch or a step are
        looked through for its name: where it is called in a function of its own it is not found.
        """
        nearest = True
        for frame in _callers():
            code = frame.f_code
            if _ours(frame):
                continue
            if "clip_grad" in self._told or id(code) in self._read:
                return
            self._read.add(id(code))
            found = _CLIP_GRAD.intersection(code.co_names + code.co_varnames + code.co_freevars)
            if found and (nearest or code.co_name != "<module>"):  # a module further out names what it imports
                self._tell(
                    "clip_grad",
                    f"{min(found)} has no effect before step(): p.grad is None until step() has clipped each record's "
                    "gradient and added noise. Remove the call, and choose the bound by clipping=.",
                )
            nearest = False

    def look_for_earlier_steps(self, optimizer: Optimizer) -> None:
        """A new ledger begins at 0, whatever the weights have seen."""
        if any(map(_used, optimizer.state.values())):
            self._tell(
                "earlier",
                "the optimizer has a state from earlier steps, which this run's ledger does not count: if they saw these "
                "records, the true epsilon is larger. Go on with load_checkpoint() or load_state_dict() of that run, or "
                "begin with a fresh optimizer and weights that saw none of these records.",
            )

    def _tell(self, habit: str, message: str) -> None:
        if habit not in self._told:
            self._told.add(habit)
            level = next((k for k, frame in enumerate(_callers()) if not _ours(frame)), 0)
            warnings.warn(message, stacklevel=level)


def _used(state: dict[str, Any]) -> bool:
    """Whether a parameter's state is of steps taken: some optimizers make one before the first."""
    return bool(state) and not ("step" in state and float(state["step"]) == 0)


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _ours(frame: FrameType) -> bool:
    """Whether this is code of clipless or torch, not of who uses them."""
    return str(frame.f_globals.get("__name__")).split(".")[0] in ("torch", "clipless")

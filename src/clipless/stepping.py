"""What is checked before each batch and each step of a private run."""

import os
import sys
import warnings
import weakref
from collections.abc import Collection, Mapping
from functools import lru_cache, partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from clipless.closures import Arguments, call_closure
from clipless.errors import Misuse
from clipless.gradients.capture.watch import became_trainable
from clipless.processes import refuse_other_processes

_AMP_MARK = "_step_supports_amp_scaling"
_SCALER_MARKS = ("grad_scale", "found_inf")
_CLIP_GRAD = {"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"}


class Drawn(Protocol):
    """How a batch is drawn, or is planned to be drawn."""

    @property
    def sampling(self) -> str: ...

    @property
    def sample_rate(self) -> float: ...


class Guard:
    """The checks before each batch and each step of one optimizer, in the process that created it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, group: object) -> None:
        self._model, self._optimizer, self._group, self._owner = model, optimizer, group, os.getpid()
        self._habits = Habits()
        self._private: set[int] = set()
        self._frozen: dict[str, nn.Parameter] = {}
        self._marked = False

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> "Guard":
        """Refuse other optimizers for these parameters, and drop the gradients of earlier training, which are not private.

        The optimizer is marked, like torch's fused ones, as handling gradient scaling itself, so that GradScaler calls
        `step()`, which refuses it. Without the mark GradScaler would fail earlier, because there are no gradients.
        """
        _EVERYWHERE.watch(self)
        self._private = set(map(id, parameters.values()))
        self._frozen = {name: p for name, p in self._model.named_parameters() if id(p) not in self._private}
        clear_gradients(self._optimizer)
        self._habits.look_for_earlier_steps(self._optimizer)
        self._marked = _AMP_MARK not in vars(self._optimizer)
        if self._marked:
            vars(self._optimizer)[_AMP_MARK] = True
        return self

    def remove(self) -> None:
        _EVERYWHERE.forget(self)
        if self._marked:
            vars(self._optimizer).pop(_AMP_MARK, None)

    def refuse_other(self, optimizer: Optimizer) -> None:
        """Raise if another optimizer is to step the private parameters."""
        if optimizer is self._optimizer:
            return
        if any(id(p) in self._private for group in optimizer.param_groups for p in group["params"]):
            raise Misuse(
                "another optimizer steps the parameters of a private model: step the optimizer given to make_private, or "
                "detach() and attach the new one."
            )

    def before_batch(self, batch: Drawn, plan: Drawn, first: bool) -> None:
        """Refuse a batch in another process, or one that was not drawn as planned; `first` says that nothing has been
        recorded yet."""
        if os.getpid() != self._owner or "WORLD_SIZE" in os.environ or _initialized():
            refuse_other_processes(self._group, self._owner)
        if batch.sampling != plan.sampling or batch.sample_rate != plan.sample_rate:
            raise Misuse(
                f"a {batch.sampling} batch at rate {batch.sample_rate} does not fit the plan: {plan.sampling} at rate "
                f"{plan.sample_rate}."
            )
        self._habits.look_for_clip_grad()
        if first:
            self._habits.look_for_earlier_steps(self._optimizer)

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Refuse a step in another process or under a gradient scaler; otherwise call the closure, if there is one."""
        if os.getpid() != self._owner or _initialized():
            refuse_other_processes(self._group, self._owner)
        attributes = vars(self._optimizer)
        if kwargs or any(map(attributes.__contains__, _SCALER_MARKS)):
            refuse_scaler(self._optimizer, kwargs)
        self._habits.look_for_clip_grad()
        return call_closure(self._optimizer, args, kwargs) if kwargs or len(args) > 1 else None

    def refuse_step(self, seen: int, records: int | None) -> None:
        """Refuse a step without a batch (`records` is None), a step before all records have gone through backward() (only
        `seen` have), and trainable parameters that are not private."""
        if records is None:
            raise Misuse("step() without a batch: take one from private.loader, backward() its loss, then step() once.")
        if seen != records:
            raise Misuse(
                f"step() without its backward(): {'some' if seen else 'none'} of the batch's records went through "
                "backward(). Call loss.backward() on the model's output for the whole batch, or for every micro-batch, "
                "before step(). If you did, the model's hooks were removed or its output detached."
            )
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise became_trainable(name)
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._private:
                    raise Misuse("the optimizer got parameters that are not private: add them before make_private.")


def _initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def unstepped(seen: int) -> Misuse:
    """The error for a new batch before the last one was stepped; `seen` of its records have gone through backward()."""
    if seen:
        return Misuse(
            "a new batch was asked for before step(): gradients do not accumulate over logical batches. Call "
            "optimizer.step() after each batch; for small memory use private.loader.microbatches(n). After an exception "
            "private.loader.again() hands out the open batch from its beginning."
        )
    return Misuse(
        "the last batch from private.loader was not stepped, and none may be dropped: a choice of batches by what is in "
        "them is not what the ledger counts. Call backward() and optimizer.step() for every batch, empty ones like any "
        "other, and break only after step(). If the batch is lost, private.loader.again() hands it out once more. Use one "
        "iterator at a time: zip(loader, loader) takes two batches for one step."
    )


def clear_gradients(optimizer: Optimizer, but: Collection[nn.Parameter] = ()) -> None:
    """Set the gradients of all the optimizer's parameters but those in `but` to None: they may not be private."""
    kept = set(map(id, but))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in kept:
                parameter.grad = None


def refuse_scaler(optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
    """Refuse a step under a gradient scaler, and remove the attributes that the scaler has set on the optimizer."""
    marks = [vars(optimizer).pop(name, None) for name in _SCALER_MARKS]
    if "grad_scaler" in kwargs or any(mark is not None for mark in marks):
        raise Misuse(
            "a gradient scaler would scale the gradients and not the noise: train without GradScaler, that is "
            "loss.backward() and optimizer.step() (bfloat16 needs no scaler)."
        )


class AllOptimizers:
    """One hook on the steps of all optimizers, for the guards there are. It is never removed by the garbage collector, which
    may run while torch goes through its hooks."""

    def __init__(self) -> None:
        self._guards: dict[int, weakref.ref[Guard]] = {}
        self._handle: RemovableHandle | None = None

    def watch(self, guard: Guard) -> None:
        self._guards[id(guard)] = weakref.ref(guard, partial(self._drop, id(guard)))
        self._handle = self._handle or register_optimizer_step_pre_hook(self._before_step)

    def forget(self, guard: Guard) -> None:
        self._guards.pop(id(guard), None)
        if self._handle is not None and not self._guards:
            self._handle.remove()
            self._handle = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for reference in tuple(self._guards.values()):
            guard = reference()
            if guard is not None:
                guard.refuse_other(optimizer)

    def _drop(self, number: int, reference: object) -> None:
        """A guard was collected; another may have its number by now."""
        if self._guards.get(number) is reference:
            del self._guards[number]


_EVERYWHERE = AllOptimizers()


class Habits:
    """Warns, once each, of habits of plain training that have no effect or another meaning in private training."""

    def __init__(self) -> None:
        self._read: set[int] = set()
        self._told: set[str] = set()

    def look_for_clip_grad(self) -> None:
        """Warn of `clip_grad_norm_`: gradients are clipped per record, and before step() there are none to clip.

        A call cannot be observed, so the functions that request a batch or a step are searched for the name; a call in a
        helper function is not found.
        """
        nearest, frame = True, _first_outside(sys._getframe(1))
        while frame is not None:
            code = frame.f_code
            if "clip_grad" in self._told or id(code) in self._read:
                return
            self._read.add(id(code))
            found = _CLIP_GRAD.intersection(code.co_names + code.co_varnames + code.co_freevars)
            if found and (nearest or code.co_name != "<module>"):  # an outer module may only import it
                self._tell(
                    "clip_grad",
                    f"{min(found)} has no effect before step(): p.grad is None until step() has clipped each record's "
                    "gradient and added noise. Remove the call, and choose the bound by clipping=.",
                )
            nearest, frame = False, _first_outside(frame.f_back)

    def look_for_earlier_steps(self, optimizer: Optimizer) -> None:
        """Warn of an optimizer that has been used: a new ledger begins at 0."""
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
            outside, frame, level = _first_outside(sys._getframe(1)), sys._getframe(0), 1
            while frame is not outside and frame.f_back is not None:
                frame, level = frame.f_back, level + 1
            warnings.warn(message, stacklevel=level)


def _used(state: dict[str, Any]) -> bool:
    """Whether a parameter's state shows that a step was taken: some optimizers create it before the first."""
    return bool(state) and not ("step" in state and float(state["step"]) == 0)


def _first_outside(frame: FrameType | None) -> FrameType | None:
    """The nearest caller that is not code of clipless or torch."""
    while frame is not None and _is_ours(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return frame


@lru_cache(maxsize=1024)
def _is_ours(module: object) -> bool:
    return str(module).partition(".")[0] in ("torch", "clipless")

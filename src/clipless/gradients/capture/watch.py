"""Refuses what a batch writes into the model (parameters, buffers, tensors kept as attributes), since it has no noise."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn

from clipless.errors import Misuse, UnsupportedModule
from clipless.gradients.capture.counters import CallCounters
from clipless.gradients.capture.wrappers import QUALIFIED, WRAPPERS, paused_too_late, refuse_sharded_later, wrapped_by
from clipless.gradients.layers.rule import reweighted
from clipless.gradients.moving_buffers import power_iteration_buffers
from clipless.torch_internals import active_wrapper

_VERSION = attrgetter("_version")


def watched_buffers(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """All buffers but those of spectral norm, whose power iteration depends on the weights alone."""
    found = {}
    for path, module in modules:
        if module._buffers:
            moved = power_iteration_buffers(module)
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in moved:
                    found[f"{path}.{name}" if path else name] = buffer
    return found


class StateWatch:
    """Detects parameters and buffers that are written to, or replaced, while a batch is open.

    torch counts writes to a tensor, but not writes through its `data`. So from time to time (`closely`) contents are
    compared as well, including tensors kept as attributes, and changed contents are restored.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._parameters = dict(model.named_parameters())
        self._sharded = any(local_part(parameter) is not parameter for parameter in self._parameters.values())
        self._tensors: dict[str, Tensor] = {}
        self._versions: list[int] = []
        self._values: dict[str, Tensor] = {}
        self._attributes: dict[tuple[str, str], Tensor] = {}
        self.counters = CallCounters(self._modules)
        self.is_open = False

    def open(self, closely: bool) -> None:
        """Remember the present state; `closely` includes the contents of all tensors."""
        if closely and not self._sharded:
            for _, module in self._modules:
                refuse_sharded_later(module)
        parameters: dict[str, Tensor] = dict(self._parameters)
        if self._sharded:
            parameters = {name: local_part(parameter) for name, parameter in parameters.items()}
        self._tensors = {**parameters, **watched_buffers(self._modules)}
        self._versions = list(map(_VERSION, self._tensors.values()))
        self._values = {name: tensor.detach().clone() for name, tensor in self._tensors.items()} if closely else {}
        self._attributes = {where: tensor.detach().clone() for where, tensor in self._own()} if closely else {}
        self.counters.open()
        self.is_open = True

    def close(self) -> None:
        """The batch is over: writes are allowed again."""
        self._tensors, self._versions, self._values, self._attributes, self.is_open = {}, [], {}, {}, False
        self.counters.close()

    def refuse_pass(self, records: int, calls: Mapping[str, int] | None = None) -> None:
        """Raise if a forward pass has written into the model, except for counters of `calls`: how often each module was
        called in it, by name, where that is known."""
        self.counters.after_pass(calls)
        self.refuse_writes(records)

    def refuse_writes(self, records: int) -> None:
        """Raise if anything was written into the model that is not put back, counters included."""
        name = self._changed()
        if name is not None:
            self._put_back()
            raise UnsupportedModule(
                f"{self._kind(name)} {name!r} changes during a training forward pass, which would store the records without "
                "noise. Turn off what tracks statistics or sets weights from data there, or put that module in eval mode; "
                "a counter must add exactly one in every call of its module."
            )
        if self._attributes:
            self._refuse_attributes(records)

    def refuse_step(self) -> None:
        """Raise if anything in the model was written to since the batch was opened."""
        name = self._changed()
        if name is not None:
            raise Misuse(
                f"{self._kind(name)} {name!r} was written to between the batch and its step: what it holds of the records "
                "is not protected by noise. Change weights and averages after optimizer.step(), before the next batch, and "
                "run the model in eval mode on anything else."
            )

    def _changed(self) -> str | None:
        """The name of the first parameter or buffer that has changed, if any."""
        tensors = self._tensors
        written = [name for name, buffer in watched_buffers(self._modules).items() if tensors.get(name) is not buffer]
        if list(map(_VERSION, tensors.values())) != self._versions:
            pairs = zip(tensors.items(), self._versions, strict=True)
            written += [name for (name, tensor), version in pairs if tensor._version != version]
        for name in written:
            if not self.counters.accounts_for(name):
                return name
        for name, value in self._values.items():
            if not _equal(tensors[name].detach(), value) and not self.counters.accounts_for(name):
                return name
        return None

    def _kind(self, name: str) -> str:
        return "parameter" if name in self._parameters else "buffer"

    def _put_back(self) -> None:
        owners = dict(self._modules)
        for name, value in self._values.items():
            self._tensors[name].data.copy_(value)
            owner, _, own_name = name.rpartition(".")
            if name not in self._parameters:
                owners[owner]._buffers[own_name] = self._tensors[name]

    def _own(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        for path, module in self._modules:
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_floating_point() and not reweighted(module, name):
                    yield (path, name), value

    def _refuse_attributes(self, records: int) -> None:
        """Raise if a tensor kept as an attribute has been updated. One computed from scratch in the last pass is allowed."""
        now = dict(self._own())
        for (path, name), value in self._attributes.items():
            found = now.get((path, name))
            if found is None:
                continue
            last_pass = found.requires_grad or records in found.shape or found.shape != value.shape
            if not last_pass and not _equal(found, value):
                raise UnsupportedModule(
                    f"module {path or '(model)'!r} keeps a tensor in its attribute {name!r} that changes during a training "
                    "forward pass, such as a moving average: it would store the records without noise. Keep nothing of "
                    "the records in forward."
                )


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, unless it is sharded. Operations on the whole DTensor would need the
    other processes."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal; NaN equals NaN."""
    return torch.equal(one, other) or (one.shape == other.shape and bool(((one == other) | (one != one)).all()))


class StructureWatch:
    """Detects modules and parameters that are added to a model, parameters that become trainable, and wrappers that were put
    around it, after `open`."""

    def __init__(self, model: nn.Module, sharded: bool = False) -> None:
        self._model, self._sharded = model, sharded
        self._modules: dict[str, nn.Module] = {}
        self._contents: list[list[object]] = []
        self._frozen: dict[str, nn.Parameter] = {}

    def open(self) -> None:
        """Remember the model's modules, parameters and frozen parameters."""
        self._modules = {name or "(model)": module for name, module in self._model.named_modules()}
        self._contents = self._now()
        self._frozen = {name: p for name, p in self._model.named_parameters() if not p.requires_grad}

    def refuse_changes(self) -> None:
        """Raise if they have changed."""
        self._refuse_wrappers()
        now = self._now()
        if now != self._contents:
            pairs = zip(self._modules.items(), now, self._contents, strict=True)
            for (name, module), contents, before in pairs:
                if contents == before:
                    continue
                refuse_sharded_later(module)
                raise Misuse(
                    f"module {name!r} got another child or parameter after make_private, which clipless does not watch: "
                    "build the model first, then call make_private, or detach() and call it again."
                )
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise became_trainable(name)

    def _refuse_wrappers(self) -> None:
        """Raise if the model runs inside a wrapper; a DistributedDataParallel that was paused is none."""
        ddp, frame = active_wrapper(), sys._getframe(1).f_back
        if ddp is not None and ddp.require_backward_grad_sync:
            raise paused_too_late()
        while frame is not None:
            function = frame.f_code.co_qualname
            if function in QUALIFIED:
                found = WRAPPERS.get((str(frame.f_globals.get("__name__")), function))
                if found is not None:
                    raise wrapped_by(*found)
            frame = frame.f_back

    def _now(self) -> list[list[object]]:
        """Every module's children and parameters. FSDP2 replaces sharded parameters by other objects while they are
        gathered, so only their names are compared."""
        if self._sharded:
            return [[*map(id, module._modules.values()), *module._parameters] for module in self._modules.values()]
        return [
            [*map(id, module._modules.values()), *map(id, module._parameters.values())]
            for module in self._modules.values()
        ]


def became_trainable(name: str) -> Misuse:
    return Misuse(f"parameter {name!r} became trainable after make_private: freeze it, or attach anew.")

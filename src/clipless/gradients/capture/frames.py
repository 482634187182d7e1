"""Modules whose forward is running: what capture has changed for that time, and how it is put back."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from clipless.gradients.capture.layout import Place
from clipless.gradients.capture.model_map import Layer, ModelMap
from clipless.gradients.capture.traced import Operations, Traced, root
from clipless.gradients.randomness import RandomState
from clipless.gradients.recurrent.takeover import Takeover
from clipless.gradients.trees import Dims


@dataclass(slots=True)
class Frame:
    """A call of a module that has not returned.

    `armed` says that autograd records it, `inside` that it or a call around it is armed. `dims` and `out_dims` say where the
    records lie in its input and output; `unsure` that sizes alone told so; `has_rows` that its rows are not the
    records, and `rows` how many they are; `along` that both are one tensor with the records
    along this dimension. With a `stand_in` it is the outermost call, and
    the input of an empty batch was replaced.
    """

    layer: Layer
    place: Place
    armed: bool = False
    inside: bool = False
    stand_in: bool = False
    dims: Dims = ()
    out_dims: Dims = ()
    unsure: bool = False
    has_rows: bool = False
    rows: int = 0
    along: int | None = None
    turned_off: list[nn.Parameter] = field(default_factory=list)
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list)
    lent: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    takeover: Takeover | None = None
    random_state: RandomState | None = None

    def trace_parameters(self, operations: Operations) -> None:
        """Replace the parameters that the module uses itself by traced tensors while it runs."""
        for path, name in self.layer.own.items():
            self._replace(self.layer, path, name, operations)

    def _replace(self, layer: Layer, path: str, name: str, operations: Operations) -> None:
        prefix, _, local = path.rpartition(".")
        holder = layer.module.get_submodule(prefix)
        parameter = holder._parameters[local]
        if parameter is not None and parameter.requires_grad and not isinstance(parameter, Traced):
            holder._parameters[local] = root(name, layer.name, parameter, operations)  # type: ignore[assignment]
            self.replaced.append((holder, local, parameter))

    def trace_strays(self, model: ModelMap, strays: Collection[str], operations: Operations) -> None:
        """Replace these parameters by traced tensors wherever they are, while the whole model runs."""
        for layer in model.layers.values():
            for path, name in layer.own.items():
                if name in strays:
                    self._replace(layer, path, name, operations)

    def lend_strays(self, strays: Collection[str]) -> None:
        """Give the module its own parameters while it runs, where traced tensors stand for them in the rest of the model."""
        for path, name in self.layer.own.items():
            prefix, _, local = path.rpartition(".")
            holder = self.layer.module.get_submodule(prefix)
            traced: Tensor | None = holder._parameters[local]
            if name in strays and isinstance(traced, Traced):
                holder._parameters[local] = traced.parameter
                self.lent.append((holder, local, traced))

    def put_back(self) -> None:
        """Undo everything that was turned off or replaced."""
        if self.takeover is not None:
            self.takeover.end()
        for parameter in self.turned_off:
            parameter.requires_grad = True
        for holder, local, traced in self.lent:
            holder._parameters[local] = traced  # type: ignore[assignment]
        for holder, local, parameter in self.replaced:
            holder._parameters[local] = parameter


@dataclass
class OperationCounter:
    """Numbers the operations with traced tensors of one forward pass."""

    _counts: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def place(self, owner: str, inside: Place) -> Place:
        """The operands of the next operation with parameters of `owner` in that call."""
        key = (owner, inside.name, inside.call)
        self._counts[key] = self._counts.get(key, 0) + 1
        return Place(owner, inside.call, "operand", self._counts[key], inside.name)


def unseen_by_checkpoints() -> AbstractContextManager[Any]:
    """Inside, what autograd saves is not counted by a checkpoint around the model."""
    return saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)

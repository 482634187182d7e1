"""`replace_batchnorm`: BatchNorm mixes records and cannot be trained privately, GroupNorm can."""

import copy
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clipless.errors import InvalidArgument, InvalidType, UnsupportedModule
from clipless.torch_internals import AnyBatchNorm

MOST_GROUPS = 32
FEWEST_CHANNELS = 16
ACTIVATED = ("timm.layers.norm_act.BatchNormAct2d", "timm.layers.norm_act.SyncBatchNormAct")


@dataclass(frozen=True)
class Change:
    """One module that was replaced: its name in the model, what it was and what it is."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


class Replaced(NamedTuple):
    """The new model, and what was done to it; `print(replaced)` shows the list."""

    model: nn.Module
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "nothing to replace: the model has no BatchNorm."


def replace_batchnorm(model: nn.Module) -> Replaced:
    """A copy of the model with GroupNorm in place of BatchNorm (1d, 2d, 3d, Sync), and the list of changes.

    Shapes of inputs and outputs are the same, and so are the parameters: names, values, devices, types and
    `requires_grad`. The function is another: GroupNorm normalizes each record by itself, in training and in evaluation
    alike, and the running statistics are gone. Weights trained with BatchNorm must be trained again.

    Groups have at least 16 channels, so that a record without positions can still be normalized, and there are at most 32
    of them; channels that do not divide that way form one group. timm's BatchNorm with an activation becomes a GroupNorm
    named `norm` and that activation. A module used in several places stays one module. The
    given model is not changed; make the optimizer of the new one after the call.

    >>> model, changes = replace_batchnorm(nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()))
    >>> print(*changes, sep="\\n")
    1: BatchNorm2d(64) -> GroupNorm(4, 64)
    """
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        if isinstance(module, AnyBatchNorm):
            _refuse(module, name or "(model)")
    model = copy.deepcopy(model)
    places = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, AnyBatchNorm)]
    new = {module: _replacement(module) for _, module in places}
    for name, module in places:
        parent, _, own_name = name.rpartition(".")
        if name:
            model.get_submodule(parent).register_module(own_name, new[module])
    changes = tuple(Change(name or "(model)", _written(module), _written(new[module])) for name, module in places)
    return Replaced(new[model] if isinstance(model, AnyBatchNorm) else model, changes)


def groups_for(channels: int) -> int:
    """The largest number of equal groups, at most 32, that leaves each at least 16 channels; 1 if there is none.

    >>> [groups_for(channels) for channels in (8, 37, 64, 96, 512, 2048)]
    [1, 1, 4, 6, 32, 32]
    """
    most = max(1, min(MOST_GROUPS, channels // FEWEST_CHANNELS))
    return max(groups for groups in range(1, most + 1) if channels % groups == 0)


def _group_norm(module: AnyBatchNorm) -> nn.GroupNorm:
    """GroupNorm with the same parameter objects as the BatchNorm, so that ties and flags are kept."""
    norm = nn.GroupNorm(groups_for(module.num_features), module.num_features, module.eps, affine=False)
    norm.affine = module.affine
    norm.register_parameter("weight", module.weight)
    norm.register_parameter("bias", module.bias)
    return norm.train(module.training)


class NormAct(nn.Module):
    """GroupNorm, then what timm's BatchNormAct2d does after its normalization: `drop` and `act`."""

    def __init__(self, norm: nn.GroupNorm, drop: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.drop, self.act = norm, drop, act

    def forward(self, x: Tensor) -> Tensor:
        """act(drop(norm(x)))."""
        y: Tensor = self.act(self.drop(self.norm(x)))
        return y


def _activated(module: AnyBatchNorm) -> bool:
    """Whether it is a BatchNorm that applies an activation too, as timm has them."""
    return any(f"{kind.__module__}.{kind.__qualname__}" in ACTIVATED for kind in type(module).__mro__)


def _replacement(module: AnyBatchNorm) -> nn.Module:
    norm = _group_norm(module)
    if not _activated(module):
        return norm
    return NormAct(norm, module.get_submodule("drop"), module.get_submodule("act")).train(module.training)


def _refuse(module: AnyBatchNorm, name: str) -> None:
    kind = type(module)
    if _activated(module):
        return
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        raise InvalidArgument(f"{kind.__name__} {name!r} has no shape yet: run the model on one example first.")
    if kind.forward not in (AnyBatchNorm.forward, nn.SyncBatchNorm.forward):
        raise UnsupportedModule(
            f"{kind.__name__} {name!r} is a BatchNorm with a forward of its own, which GroupNorm would lose. Replace it "
            "by hand with a module that does the rest of its work."
        )


def _written(module: nn.Module) -> str:
    if isinstance(module, NormAct):
        return f"{_written(module.norm)} and {type(module.act).__name__}"
    sizes = [module.num_groups, module.num_channels] if isinstance(module, nn.GroupNorm) else [module.num_features]
    return f"{type(module).__name__}({', '.join(map(str, sizes))})"

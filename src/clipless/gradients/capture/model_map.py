"""The modules of a model, with the trainable parameters that each uses itself and their layer rule."""

from dataclasses import dataclass

import torch
from torch import nn

from clipless.gradients.capture.refusals import may_be_refused
from clipless.gradients.layers import LayerRule, generic, rule_of


@dataclass(frozen=True, eq=False)
class Layer:
    """A module of the model.

    `own` are the trainable parameters that it uses itself, by their path in the module, with their name in the model
    (the first one if they are shared). `rule` computes their per-sample gradients. `suspect`: the module is refused in some
    modes. `is_generic`: there is no rule for its kind. `is_recurrent`: its kernel is taken over. `sharded`: its parameters
    are divided over processes.
    """

    module: nn.Module
    name: str
    own: dict[str, str]
    parameters: tuple[nn.Parameter, ...]
    rule: LayerRule
    suspect: bool
    is_generic: bool
    is_recurrent: bool
    sharded: bool = False

    @property
    def live(self) -> tuple[nn.Parameter, ...]:
        """The objects that the module holds for `parameters` now: FSDP2 replaces sharded ones while they are gathered."""
        if not self.sharded:
            return self.parameters
        found = [parameter for path in self.own if (parameter := self.held(path)) is not None]
        assert len(found) == len(self.own)
        return tuple(found)

    def held(self, path: str) -> nn.Parameter | None:
        """What is now in the place of a parameter, by its path in the module."""
        holder, _, local = path.rpartition(".")
        return self.module.get_submodule(holder)._parameters[local]


class ModelMap:
    """All modules of a model, and its trainable parameters by name."""

    def __init__(self, model: nn.Module, sharded: bool = False) -> None:
        self.sharded = sharded
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.layers: dict[nn.Module, Layer] = {}
        for name, module in model.named_modules():
            own = {path: names[id(p)] for path, p in own_parameters(module).items() if id(p) in names}
            parameters = tuple(self.parameters[name] for name in own.values())
            rule = rule_of(module) or generic
            self.layers[module] = Layer(
                module,
                name or "(model)",
                own,
                parameters,
                rule,
                suspect=may_be_refused(module),
                is_generic=rule is generic,
                is_recurrent=isinstance(module, nn.RNNBase) and rule is not generic,
                sharded=sharded,
            )

    @property
    def modules(self) -> list[nn.Module]:
        """All modules."""
        return list(self.layers)

    def trains(self, module: nn.Module) -> bool:
        """Whether the module or any inside it has trainable parameters."""
        return any(self.layers[inner].own for inner in module.modules() if inner in self.layers)

    @property
    def live(self) -> dict[str, nn.Parameter]:
        """The objects that the model holds for `parameters` now."""
        if not self.sharded:
            return self.parameters
        found = {
            name: p for layer in self.layers.values() for name, p in zip(layer.own.values(), layer.live, strict=True)
        }
        return {name: found[name] for name in self.parameters}

    @property
    def rules(self) -> dict[str, LayerRule]:
        """The rule of every module with parameters of its own."""
        return {layer.name: layer.rule for layer in self.layers.values() if layer.own}

    @property
    def dtype(self) -> torch.dtype:
        """The widest type of the parameters, at least float32."""
        dtype = torch.float32
        for parameter in self.parameters.values():
            dtype = torch.promote_types(dtype, parameter.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(iter(self.parameters.values())).device


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module uses itself, by their path in it: its own, those in its lists and dictionaries of
    parameters, and attention's output projection, which is never called as a module."""
    own = dict(module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict) or isinstance(module, nn.MultiheadAttention):
            own |= {f"{name}.{path}": parameter for path, parameter in own_parameters(child).items()}
    return own


def is_idle(module: nn.Module) -> bool:
    """Whether it is one of torch's own modules without parameters, buffers and children, such as an activation."""
    own = (module._parameters, module._buffers, module._modules)
    return type(module).__module__.startswith("torch.nn.modules.") and not any(own)

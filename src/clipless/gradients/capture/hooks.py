"""Where torch calls clipless: hooks on every module of a model, and the tap on a module's output, which hands the output's
gradient to the receiver."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.hooks import RemovableHandle

from clipless.errors import Misuse
from clipless.gradients.capture.messages import stray_parameter
from clipless.gradients.capture.model_map import Layer, ModelMap, is_idle
from clipless.gradients.capture.refusals import compiled_pass, refuse_compiled, refuse_module
from clipless.gradients.layers.rule import reweighted


class Listener(Protocol):
    """Who is told of every call of a module."""

    def approach(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the call of a sharded model, and before its parameters are put together. Returns as `enter` does."""

    def enter(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the call. Returns the arguments to take instead, or None."""

    def leave(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After the call, with `output` None if it failed. Returns the output to take instead, or None."""


class Hooks:
    """Forward hooks on the modules of a model, and hooks on its parameters that refuse gradients which bypass the taps.

    Without a `listener` modules run as if there were no hooks. In a pass on an `empty` batch no parameter has a gradient but
    zero, whichever way it takes.
    """

    def __init__(self, model: ModelMap, root: nn.Module | None = None) -> None:
        self.listener: Listener | None = None
        self.empty = False
        self._model, self._root = model, root
        self._watched: set[int] = set()
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Put the hooks on the model, or raise and put none."""
        for layer in self._model.layers.values():
            refuse_compiled(layer.module, layer.name)
            refuse_module(layer.module, layer.name)
        for module, layer in self._model.layers.items():
            if is_idle(module):
                continue
            self._handles += [
                module.register_forward_pre_hook(EnterHook(self, layer), prepend=reweighted(module), with_kwargs=True),
                module.register_forward_hook(LeaveHook(self, layer), prepend=True, with_kwargs=True, always_call=True),
            ]
        if self._root is not None:
            hook = ApproachHook(self, self._model.layers[self._root])
            self._handles.append(self._root.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        self.watch(self._model.parameters)

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Refuse gradients that arrive at these parameters themselves."""
        for name, parameter in parameters.items():
            if id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                self._handles.append(parameter.register_hook(_refuse_stray(weakref.ref(self), name)))

    def detach(self) -> None:
        """Take all hooks off."""
        self._watched.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def intact(self) -> bool:
        """Whether every hook is still in its place."""
        for handle in self._handles:
            if handle.id not in (handle.hooks_dict_ref() or ()):
                return False
        return bool(self._handles)

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Let modules run plainly inside."""
        listener, self.listener = self.listener, None
        try:
            yield
        finally:
            self.listener = listener


class Unscriptable(Misuse, AttributeError):
    """A hook has no name that TorchScript could call it by."""


class Hook:
    """A hook that stays behind when its model is copied or pickled: the copy is a plain model."""

    def __init__(self, hooks: Hooks, layer: Layer) -> None:
        self._hooks, self._layer = hooks, layer

    @property
    def __name__(self) -> str:
        raise Unscriptable(
            "torch.jit.script of a private model: its hooks cannot be compiled. Script a copy (copy.deepcopy(model))."
        )

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _left_behind, ()


class ApproachHook(Hook):
    """Before all other hooks of a sharded model."""

    def __call__(self, module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        listener = self._hooks.listener
        return None if listener is None else listener.approach(self._layer, args, kwargs)


class EnterHook(Hook):
    """Before a module's forward. Where torch.compile only looks at the code, raising makes it leave the module alone."""

    def __call__(self, module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            raise compiled_pass()
        listener = self._hooks.listener
        return None if listener is None else listener.enter(self._layer, args, kwargs)


class LeaveHook(Hook):
    """After a module's forward."""

    def __call__(self, module: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            raise compiled_pass()
        listener = self._hooks.listener
        return None if listener is None else listener.leave(self._layer, args, kwargs, output)


def _refuse_stray(hooks: "weakref.ref[Hooks]", name: str) -> Callable[[Tensor], None]:
    """Autograd holds this hook where the garbage collector cannot see it: a strong reference would never be freed."""

    def refuse(grad: Tensor) -> None:
        found = hooks()
        if found is not None and found.listener is not None and not (found.empty and not bool(grad.any())):
            raise stray_parameter(name)

    return refuse


def _left_behind() -> Callable[..., None]:
    return _no_hook


def _no_hook(*args: Any) -> None:
    """What is left of a hook in a copy of the model."""


class Tap(torch.autograd.Function):
    """Identity on outputs. `detach` shares storage and version, and is not a view: in-place use works."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*call.tensors)
        call.tensors = ()
        return tuple(map(Tensor.detach, outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.call.receive(ctx.call, ctx.saved_tensors, grads)
        return (None, None, *grads)

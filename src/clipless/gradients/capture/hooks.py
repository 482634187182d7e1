"""Where torch calls clipless: hooks on every module of a model, and the tap on a module's output, which passes the output's
gradient to the receiver."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clipless.errors import Misuse
from clipless.gradients.capture.messages import stray_parameter
from clipless.gradients.capture.model_map import Layer, ModelMap, is_idle
from clipless.gradients.capture.refusals import compiled_pass, refuse_compiled, refuse_module
from clipless.gradients.layers.rule import positional, reweighted
from clipless.gradients.trees import differentiable
from clipless.torch_internals import applied, get_eval_frame_callback, pytree


class Listener(Protocol):
    """Is notified of every call of a module."""

    def approach(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the call of a sharded model, and before its parameters are gathered. Returns what `enter` returns."""

    def enter(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the call. Returns replacement arguments, or None."""

    def leave(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After the call; `output` is None if it failed. Returns a replacement output, or None."""


class Hooks:
    """Forward hooks on the modules of a model, and hooks on its parameters that refuse gradients which bypass the taps.

    `stray(name)` is what to raise for such a gradient. `root` is the model if it is sharded. Without a `listener` modules
    run as if there were no hooks. In a pass on an `empty` batch, gradients of zero may bypass the taps.
    """

    def __init__(
        self, model: ModelMap, stray: Callable[[str], Exception] = stray_parameter, root: nn.Module | None = None
    ) -> None:
        self.listener: Listener | None = None
        self.empty = False
        self._model, self._stray, self._root = model, stray, root
        self._watched: set[int] = set()
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Register the hooks on the model, or raise and register none."""
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
                self._handles.append(parameter.register_hook(_refuse_stray(weakref.ref(self), name, self._stray)))

    def detach(self) -> None:
        """Remove all hooks."""
        self._watched.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def intact(self) -> bool:
        """Whether every hook is still registered."""
        for handle in self._handles:
            if handle.id not in (handle.hooks_dict_ref() or ()):
                return False
        return bool(self._handles)

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside, modules run as if there were no hooks."""
        listener, self.listener = self.listener, None
        try:
            yield
        finally:
            self.listener = listener


class Unscriptable(Misuse, AttributeError):
    """torch.jit.script was called on a model with hooks."""


class Hook:
    """A hook that is not copied or pickled with its model: the copy is a plain model."""

    def __init__(self, hooks: Hooks, layer: Layer) -> None:
        self._hooks, self._layer = hooks, layer

    def _ordered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in the order in which a layer's rule reads them."""
        if not kwargs or self._layer.is_generic:
            return args, kwargs
        return positional(self._layer.module, args, kwargs)

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
    """Before a module's forward. Raises while torch.compile traces or runs the model."""

    def __call__(self, module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            raise compiled_pass()
        listener = self._hooks.listener
        return None if listener is None else listener.enter(self._layer, *self._ordered(args, kwargs))


class LeaveHook(Hook):
    """After a module's forward."""

    def __call__(self, module: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            raise compiled_pass()
        listener = self._hooks.listener
        return None if listener is None else listener.leave(self._layer, *self._ordered(args, kwargs), output)


def _refuse_stray(
    hooks: "weakref.ref[Hooks]", name: str, stray: Callable[[str], Exception]
) -> Callable[[Tensor], None]:
    """A hook that raises if the parameter's gradient bypasses the taps. The reference is weak because the garbage collector
    does not see hooks that autograd holds: a strong one would never be freed."""

    def refuse(grad: Tensor) -> None:
        found = hooks()
        if found is not None and found.listener is not None and not (found.empty and not bool(grad.any())):
            raise stray(name)

    return refuse


def _left_behind() -> Callable[..., None]:
    return _no_hook


def _no_hook(*args: Any) -> None:
    """Replaces a hook in a copy of the model."""


class Tap(torch.autograd.Function):
    """Identity on outputs. `detach` shares storage and version counter without making a view, so outputs may be changed in
    place."""

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


# Without a look for functorch's tensors, which the recorder refuses.
tap = applied(Tap)


def tap_leaves(anchor: Tensor, call: Any, output: Any) -> Any:
    """The output with a tap on its floating-point tensors, wherever they are in it."""
    leaves, spec = pytree.tree_flatten(output)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    tapped = tap(anchor, call, *differentiable(output))
    for k, value in zip(places, tapped, strict=True):
        leaves[k] = value
    return pytree.tree_unflatten(leaves, spec)

"""Parameters and modules that are used inside torch.vmap, torch.func.grad and the like, where no tap can be put."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipless.gradients.capture.traced import Traced
from clipless.torch_internals import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    pytree,
)


def transformed() -> bool:
    """Whether a transform of torch.func is running."""
    return maybe_current_level() is not None


class TransformsSeen(TorchFunctionMode):
    """Calls `found` with every traced tensor that a transform was given as an argument: inside, it is not one any more."""

    def __init__(self, found: Callable[[Traced], None]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if transformed():
            for leaf in pytree.tree_leaves((args, kwargs)):
                inner = unwrapped(leaf) if isinstance(leaf, Tensor) else None
                if isinstance(inner, Traced):
                    self._found(inner)
        return func(*args, **(kwargs or {}))


def unwrapped(tensor: Tensor) -> Tensor:
    with DisableTorchFunctionSubclass(), DisableTorchFunction():
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
    return tensor

"""Random numbers of torch replaced by constants, so that a function can be run on fewer rows, or on rows in another order.

Random numbers are drawn for the batch as a whole: with fewer rows every record meets other ones. With constants it does not,
and what still differs depends on the other records, or on how many there are.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from clipless.torch_internals import TorchDispatchMode

# How far a constant is from the least number that could be drawn, or from the mean: no threshold that is usual.
SHARE = 0.47

GivenArguments = Mapping[str, Any]


class ConstantDraws(TorchDispatchMode):
    """Inside, torch draws constants, and its generators stay as they are. Operations that are not known to draw independent
    numbers, and other libraries, draw as ever."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::").rstrip("_").removesuffix("_like")
        constant = _CONSTANTS.get(name) if torch.Tag.nondeterministic_seeded in func.tags else None
        if constant is None:
            return func(*args, **kwargs)
        named = _by_name(func._schema.arguments, args) | kwargs
        given = {key: value.clone() if isinstance(value, Tensor) else value for key, value in named.items()}
        generator = named.get("generator") or _default_generator(named)
        before = generator.get_state()
        result = func(*args, **kwargs)
        generator.set_state(before)
        first = result[0] if isinstance(result, tuple) else result
        first.copy_(torch.as_tensor(constant(given), device=first.device).to(first.dtype).expand(first.shape))
        for mask in result[1:] if isinstance(result, tuple) else ():
            mask.fill_(True)
        return result


def constant_draws() -> AbstractContextManager[object]:
    """Inside, torch draws constants."""
    return ConstantDraws()  # type: ignore[no-untyped-call]


def _by_name(arguments: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments and defaults by their names."""
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return defaults | dict(zip((argument.name for argument in arguments), args, strict=False))


def _default_generator(named: GivenArguments) -> torch.Generator:
    """The generator that an operation draws from, unless it is given one."""
    devices = [value.device for value in named.values() if isinstance(value, Tensor)]
    device = torch.device(devices[0] if devices else named.get("device") or "cpu")
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _uniform(given: GivenArguments) -> Any:
    return given["from"] + SHARE * (given["to"] - given["from"])


def _normal(given: GivenArguments) -> Any:
    return given["mean"] + SHARE * given["std"]


def _whole(given: GivenArguments) -> Any:
    low, high = given.get("low", given.get("from") or 0), given.get("high", given.get("to")) or 2
    return low + ((high - low) * SHARE).long() if isinstance(high, Tensor) else low + int((high - low) * SHARE)


def _chance(given: GivenArguments) -> Any:
    p = given.get("p", given["self"])
    return p >= 0.5 if isinstance(p, Tensor) else float(p >= 0.5)


def _likeliest(given: GivenArguments) -> Tensor:
    if given["replacement"]:
        return given["self"].argmax(-1, keepdim=True)
    return given["self"].topk(given["num_samples"], -1).indices


_CONSTANTS: Mapping[str, Callable[[GivenArguments], Any]] = {
    "rand": lambda given: SHARE,
    "uniform": _uniform,
    "randn": lambda given: SHARE,
    "normal": _normal,
    "normal_functional": _normal,
    "randint": _whole,
    "random": _whole,
    "randperm": lambda given: torch.arange(given["n"]),
    "bernoulli": _chance,
    "native_dropout": lambda given: given["input"],
    "exponential": lambda given: SHARE / given["lambd"],
    "multinomial": _likeliest,
    "poisson": lambda given: given["self"].round(),
}

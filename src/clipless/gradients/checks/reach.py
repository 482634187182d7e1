"""What a function can reach: the objects behind its free variables, globals, defaults and attributes, each with the name
under which the function's own source knows it."""

import functools
import inspect
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn

from clipless.random_state import Generator, own_generators

# Objects that are looked at, at most; entries of each container; and how far they may be away.
MOST, ENTRIES, FARTHEST = 3000, 200, 6
_OPAQUE = (str, bytes, int, float, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType, Tensor)

Named = tuple[str, Any]


def reachable(function: Any) -> Iterator[Named]:
    """Everything that the function reaches, or what it wraps, the nearest first, with its name. Modules of torch are not
    looked into."""
    waiting: deque[tuple[str, Any, int]] = deque([("", inspect.unwrap(function), 0), ("", function, 0)])
    seen: set[int] = set()
    while waiting and len(seen) < MOST:
        name, value, away = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value
        if away < FARTHEST:
            waiting.extend((inner, item, away + 1) for inner, item in islice(_inside(name, value), ENTRIES))


def parameter_name(parameter: Tensor, function: Callable[..., Any]) -> str | None:
    """The name of a tensor that the function reaches; None if it is not found."""
    for name, value in reachable(function):
        if value is parameter:
            return name
        for inner, held in value.named_parameters() if isinstance(value, nn.Module) else ():
            if held is parameter:
                return f"{name}.{inner}" if name else inner
    return None


def generators_of(function: Any) -> list[Generator]:
    """The random generators that a function or an object reaches, other than the global ones."""
    found: list[Generator] = []
    for _, value in reachable(function):
        if isinstance(value, nn.Module):
            found += own_generators(value.modules())
        elif isinstance(value, Generator) and not isinstance(value, random.SystemRandom):
            found.append(value)
    return found


def _inside(name: str, value: Any) -> Iterator[Named]:
    """What a function, a container or an object holds."""
    if isinstance(value, _OPAQUE) or (isinstance(value, nn.Module) and name):
        return
    if isinstance(value, types.MethodType):
        yield name or "self", value.__self__
        yield "", value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _names_of(value)
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f"args[{k}]", item) for k, item in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"{name}[{k}]", item) for k, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif hasattr(value, "__dict__"):
        yield from ((f"{name or 'self'}.{key}", item) for key, item in vars(value).items())
        yield "", _call_of(value)


def _names_of(function: types.FunctionType) -> Iterator[Named]:
    """What the function's source can name: free variables, defaults, and the globals that it mentions."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from (
        (name, function.__globals__[name]) for name in _mentioned(function.__code__) & function.__globals__.keys()
    )


def _mentioned(code: types.CodeType) -> set[str]:
    """The names that code and the functions inside of it mention."""
    inner = (_mentioned(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def code_of(function: Callable[..., Any]) -> types.CodeType | None:
    """The code that runs when the function is called, or the function that it wraps; None if it is not Python's."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return code_of(function.func)
    found = getattr(function, "__func__", function)
    return getattr(found if isinstance(found, types.FunctionType) else _call_of(found), "__code__", None)


def _call_of(value: Any) -> Any:
    """The function that runs when an object is called."""
    return _attributes(type(value)).get("forward" if isinstance(value, nn.Module) else "__call__")


def _attributes(kind: type) -> dict[str, Any]:
    """The attributes of a class, those of its bases included."""
    return {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}

"""Checks of single arguments. Each returns the value as a plain Python value, or raises with the remedy."""

import difflib
import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TypeVar

from clipless.errors import InvalidArgument, InvalidType

Value = TypeVar("Value")

# Beyond these, squares and products leave the range of floats. No run comes near them.
SMALLEST, LARGEST = 1e-100, 1e100
LEAST_DELTA = 1e-300
MOST_STEPS = 10**15


def real(name: str, value: object) -> float:
    """A number other than NaN, as a float.

    >>> real("epsilon", 3)
    3.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidType(f"{name} must be a number, got {value!r} of type {type(value).__name__}; pass a float.")
    try:
        number = float(value)
    except OverflowError:
        raise InvalidArgument(f"{name} does not fit into a float; give at most {LARGEST:g}.") from None
    if math.isnan(number):
        raise InvalidArgument(
            f"{name} must be a number and is NaN; look for the division or the logarithm that made it."
        )
    return number


def positive(name: str, value: object) -> float:
    """A finite number above 0.

    >>> positive("gamma", 0.01)
    0.01
    """
    number = real(name, value)
    if not (math.isfinite(number) and number > 0):
        raise InvalidArgument(f"{name} must be positive and finite, got {value!r}.")
    return number


def fraction(name: str, value: object) -> float:
    """A number strictly between 0 and 1."""
    number = real(name, value)
    if not 0 < number < 1:
        raise InvalidArgument(f"{name} must lie between 0 and 1, got {value!r}.")
    return number


def whole(name: str, value: object) -> int:
    """A whole number of at least 1, Python's or NumPy's, as an int.

    >>> whole("steps", 3)
    3
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidType(f"{name} must be a whole number, an int, got {value!r}; round it first.") from None
    if number < 1:
        raise InvalidArgument(f"{name} must be at least 1, got {number}.")
    return number


def named(kind: str, name: object, registry: Mapping[str, Value]) -> Value:
    """The entry of that name in a registry; an unknown name raises with the nearest known one."""
    if not isinstance(name, str) or name not in registry:
        raise unknown_name(kind, name, registry)
    return registry[name]


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> InvalidArgument:
    """The error for a name that is not in a registry, with the nearest one that is; of equally near ones the first.

    >>> str(unknown_name("accountant", "pdl", ["pld", "rdp", "gdp"]))
    "unknown accountant 'pdl': did you mean 'pld'? Valid: 'pld', 'rdp', 'gdp'."
    """
    names = list(valid)
    close = difflib.get_close_matches(str(name).lower(), names, n=len(names) or 1, cutoff=0.4)
    near = sorted(close, key=lambda one: (-_likeness(one, str(name).lower()), names.index(one)))
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InvalidArgument(f"unknown {kind} {name!r}: {hint}Valid: {', '.join(map(repr, names))}.")


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def target_epsilon(value: object) -> float:
    """A finite epsilon above 0."""
    epsilon = real("epsilon", value)
    if not 0 < epsilon < math.inf:
        raise InvalidArgument(
            f"epsilon must be finite and above 0, got {epsilon}; usual targets lie between 0.1 and 10."
        )
    if not SMALLEST <= epsilon <= LARGEST:
        raise InvalidArgument(
            f"epsilon is {epsilon}, too small or too large to compute with; usual targets lie between 0.1 and 10."
        )
    return epsilon


def failure_probability(value: object) -> float:
    """A delta strictly between 0 and 1."""
    delta = real("delta", value)
    if not 0 < delta < 1:
        raise InvalidArgument(f"delta must lie in (0, 1), got {delta}; choose at most 1 / (10 * number of records).")
    if delta < LEAST_DELTA:
        raise InvalidArgument(
            f"delta is {delta}, too small to compute with: choose at least {LEAST_DELTA:g}; 1e-10 is small."
        )
    return delta


def large_delta_note(delta: float, records: int) -> str | None:
    """A warning if delta is above 1/(10 N); None otherwise. Publishing each record as it is with probability delta
    satisfies (0, delta)-differential privacy.

    >>> large_delta_note(1e-6, 60_000), large_delta_note(1e-5, 60_000)[:48]
    (None, 'delta=1e-05 is above 1/(10 N) for N=60000: a run')
    """
    if not (isinstance(delta, float) and 1 / (10 * records) < delta < 1):
        return None
    return (
        f"delta={delta:g} is above 1/(10 N) for N={records}: a run that publishes each record with that probability, "
        f"{delta * records:.2g} of them on average, would keep the promise. Choose delta up to 1/{10 * records}."
    )


def rate(value: object) -> float:
    """A sampling probability in (0, 1]."""
    sample_rate = real("sample_rate", value)
    if not 0 < sample_rate <= 1:
        raise InvalidArgument(
            f"sample_rate must lie in (0, 1], got {sample_rate}; it is expected batch / number of records."
        )
    if sample_rate < SMALLEST:
        raise InvalidArgument(
            f"sample_rate is {sample_rate}, too small to compute with; it is expected batch / number of records."
        )
    return sample_rate


def step_count(value: object) -> int:
    """A whole number of steps, at least 1."""
    steps = whole("steps", value)
    if steps > MOST_STEPS:
        raise InvalidArgument(f"steps must be at most {MOST_STEPS:.0e}: more cannot be computed with, nor trained.")
    return steps


def multiplier(name: str, value: object) -> float:
    """A ratio of noise to sensitivity, 0 and infinity included."""
    ratio = real(name, value)
    if ratio < 0:
        raise InvalidArgument(f"{name} must not be negative, got {ratio}; it is standard deviation / sensitivity.")
    return ratio


def positive_multiplier(name: str, value: object) -> float:
    """A ratio of noise to sensitivity above 0."""
    ratio = multiplier(name, value)
    if ratio == 0:
        raise InvalidArgument(f"{name} must be above 0, got 0: without noise no finite epsilon exists.")
    return ratio


def usable_multiplier(name: str, value: object) -> float:
    """A ratio of noise to sensitivity above 0 with which epsilon can be computed; infinity means nothing released."""
    ratio = positive_multiplier(name, value)
    if LARGEST < ratio < math.inf:
        raise InvalidArgument(f"{name} is {ratio}: give at most {LARGEST:g}, or infinity for nothing released.")
    return ratio

"""Who is a neighbour: the pairs of data sets that a private run makes hard to tell apart."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from clipless import arguments, defaults
from clipless.errors import InvalidArgument

ZERO_OUT, ADD_REMOVE = "zero-out", "add-remove"
RELATIONS = {
    ZERO_OUT: "zero-out: one record is replaced by an empty one, and the number of records is public",
    ADD_REMOVE: "add-remove: one record is added or removed, and the number of records is secret",
}
OLD_NOTE = (
    'The plan was stored by an earlier version and says "add or remove one record". Its rate was computed from the number '
    "of records, so what is accounted is zero-out: one record is replaced by an empty one."
)
_SECRET = "neighbours='add-remove' keeps the number of records secret, so nothing may be computed from it"


class Draws(NamedTuple):
    """How often records are drawn, and at which delta: all that a plan takes from the number of records, which
    `dataset_size` has where it is public."""

    dataset_size: int | None
    expected_batch: int
    sample_rate: float
    steps: int
    steps_per_pass: int
    delta: float


def draws(
    neighbours: str,
    dataset_size: int,
    *,
    batch_size: int | None,
    epochs: int | None,
    steps: int | None,
    delta: float | None,
    sample_rate: float | None,
) -> Draws:
    """Check these numbers and fill in what is missing from the number of records, if it is public. If it is secret, nothing
    depends on it: neither the result nor what is refused."""
    refuse_unclear_rate(neighbours, sample_rate, delta)
    if batch_size is None:
        raise InvalidArgument("give batch_size=, the expected number of records in a batch.")
    batch = arguments.whole("batch_size", batch_size)
    if neighbours == ADD_REMOVE:
        assert sample_rate is not None
        assert delta is not None
        total = _steps_alone(epochs, steps)
        return Draws(None, batch, arguments.rate(sample_rate), total, total, delta)
    if batch > dataset_size:
        raise InvalidArgument(
            f"batch_size={batch} is larger than the data set of {dataset_size} records: use at most {dataset_size}."
        )
    per_pass = defaults.steps_per_pass(dataset_size, batch)
    total = _total_steps(epochs, steps, per_pass)
    chosen = defaults.delta(dataset_size) if delta is None else delta
    return Draws(dataset_size, batch, batch / dataset_size, total, per_pass if steps is None else total, chosen)


def refuse_unclear_rate(neighbours: str, sample_rate: float | None, delta: float | None) -> None:
    """Raises for an unknown relation, and unless the rate and delta are given where they cannot be computed."""
    arguments.named("neighbours", neighbours, RELATIONS)
    if sample_rate is not None:
        arguments.rate(sample_rate)
        if neighbours == ZERO_OUT:
            raise InvalidArgument(
                "sample_rate= is for neighbours='add-remove', where the number of records is secret. By default it is "
                "public, and the rate is batch_size / (number of records): leave sample_rate= out."
            )
    if neighbours == ADD_REMOVE and (sample_rate is None or delta is None):
        missing = " and ".join(
            name for name, value in (("sample_rate=", sample_rate), ("delta=", delta)) if value is None
        )
        raise InvalidArgument(f"{_SECRET}: give {missing} too, from public numbers, and the run's length as steps=.")


def pass_length(neighbours: str, records: int, expected_batch: int, steps: int) -> int:
    """The steps of an epoch, for trainers that count in epochs: all of them where the number of records is secret, and then
    there must be `steps`."""
    if neighbours == ZERO_OUT:
        return defaults.steps_per_pass(records, expected_batch)
    if steps < 1:
        raise InvalidArgument(f"{_SECRET}: give max_steps= in place of epochs.")
    return steps


def _steps_alone(epochs: int | None, steps: int | None) -> int:
    if epochs is not None:
        raise InvalidArgument(f"{_SECRET}, as the length of an epoch would be: give steps= in place of epochs=.")
    if steps is None:
        raise InvalidArgument(f"{_SECRET}: give steps=, the length of the run.")
    return arguments.whole("steps", steps)


def _total_steps(epochs: int | None, steps: int | None, per_pass: int) -> int:
    if epochs is not None and steps is not None:
        raise InvalidArgument("epochs= and steps= contradict each other: give one of them.")
    if epochs is not None:
        return arguments.whole("epochs", epochs) * per_pass
    if steps is not None:
        return arguments.whole("steps", steps)
    raise InvalidArgument("give epochs= or steps=: the budget is divided over all steps of the run.")


def with_relation(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A stored plan with the relation that was accounted. One without a name for it was stored before there were several,
    and took its rate from the number of records: zero-out.

    >>> with_relation({"neighbouring": "add or remove one record"})["neighbours"]
    'zero-out'
    """
    return {**plan, "neighbours": ZERO_OUT, "neighbouring": RELATIONS[ZERO_OUT]} if is_old(plan) else dict(plan)


def is_old(plan: Mapping[str, Any]) -> bool:
    """Whether a stored plan has no name for its relation."""
    return "neighbours" not in plan

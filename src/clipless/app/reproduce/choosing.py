"""Rows whose setting is itself chosen privately: what each candidate's run may spend, and what the choice scores."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clipless import defaults
from clipless.accounting.selection import GridSearch, LiuTalwar, SelectionMethod, SingleRun, method_named, price
from clipless.app.training import TrainingSettings
from clipless.app.tuning.candidates import shape_of
from clipless.arguments import named
from clipless.errors import InvalidArgument


@dataclass(frozen=True)
class Choosing:
    """A choice among settings, paid for by `method`. `values` lists what is tried for each setting: the price is for every
    combination, and each of them is trained.
    """

    method: str
    values: Mapping[str, tuple[Any, ...]]

    def __post_init__(self) -> None:
        named("method", self.method, EXPECTED)

    @property
    def count(self) -> int:
        """The number of candidates."""
        return math.prod(map(len, self.values.values()))

    def candidates(self) -> Iterator[dict[str, Any]]:
        """Every combination of the values."""
        for chosen in itertools.product(*self.values.values()):
            yield dict(zip(self.values, chosen, strict=True))

    def price(self, settings: TrainingSettings, records: int) -> SingleRun:
        """What one run may spend, so that the choice keeps within the settings' epsilon and delta."""
        delta = defaults.delta(records) if settings.delta is None else settings.delta
        shapes = [shape_of(settings, records)] * self.count
        return price(self.method, settings.epsilon, delta, shapes, settings.accountant)

    def priced(self, settings: TrainingSettings, records: int) -> TrainingSettings:
        """The settings of one candidate's run with the noise that pays for the choice."""
        return replace(settings, noise_multiplier=self.price(settings, records).noise_multiplier)

    def expected_score(self, scores: Sequence[float]) -> float:
        """The mean score of what the method releases, given the scores of the candidates."""
        method = method_named(self.method, self.count)
        return EXPECTED[method.name](method, sorted(scores))


def read(table: Mapping[str, Any] | None) -> Choosing | None:
    """The choice that a row's table describes: `method`, and the values of each setting.

    Raises InvalidArgument for anything else in the table.
    """
    if table is None:
        return None
    rest = {key: value for key, value in table.items() if key not in ("method", "try")}
    if rest:
        raise InvalidArgument(f"choose has {', '.join(rest)}: it takes method and try alone.")
    return Choosing(table["method"], {key: tuple(listed) for key, listed in table["try"].items()})


def _best_of_all(_: SelectionMethod, ordered: Sequence[float]) -> float:
    return ordered[-1]


def _best_of_some(method: SelectionMethod, ordered: Sequence[float]) -> float:
    """The best of a geometric number of candidates, drawn uniformly: P(best is among the k worst of m) is, with q = k/m and
    stop probability g, the sum over j of g (1-g)^(j-1) q^j, which is g q / (1 - (1-g) q).

    >>> round(_best_of_some(LiuTalwar(2, 0.25), [0.0, 1.0]), 4)  # 1 - 0.25 * 0.5 / (1 - 0.75 * 0.5)
    0.8
    """
    assert isinstance(method, LiuTalwar)
    stop, shares = method.stop_probability, [k / len(ordered) for k in range(len(ordered) + 1)]
    below = [stop * share / (1 - (1 - stop) * share) for share in shares]
    return sum(score * (high - low) for score, low, high in zip(ordered, below, below[1:], strict=False))


EXPECTED: dict[str, Callable[[SelectionMethod, Sequence[float]], float]] = {
    GridSearch.name: _best_of_all,
    LiuTalwar.name: _best_of_some,
}

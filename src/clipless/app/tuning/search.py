"""A search before it runs: its candidates, and the price of choosing among them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from clipless import defaults
from clipless.accounting import SelectionEvent
from clipless.accounting.selection import AUTO, Run, SelectionMethod, SingleRun, price
from clipless.app.data import Data
from clipless.app.training import TrainingSettings, train
from clipless.app.training.settings import optimizer_for
from clipless.app.tuning.candidates import shape_of, varied
from clipless.errors import Interrupted, InvalidArgument, Misuse
from clipless.neighbours import RELATIONS, ZERO_OUT

SCORE = (
    "accuracy on the test records. They decide which run is released and the guarantee does not cover them: it is for "
    "the training records."
)


@dataclass(frozen=True)
class Search:
    """The candidates of a search and its price, before anything is run."""

    data: Data
    candidates: tuple[TrainingSettings, ...]
    price: SingleRun

    @property
    def runs(self) -> tuple[Run, ...]:
        """What the run of each candidate releases."""
        pairs = zip(self.candidates, self.price.noise_multipliers, strict=True)
        return tuple(shape_of(one, len(self.data.train)).run(noise) for one, noise in pairs)

    def event(self) -> SelectionEvent:
        """The whole search as an entry of the ledger."""
        return SelectionEvent.of(self.price.method, self.runs)

    def plan(self) -> dict[str, Any]:
        """The promise, as plain data for files, with the fields that every run's plan has."""
        return {
            "epsilon": self.price.epsilon,
            "delta": self.price.delta,
            "accountant": self.price.accountant,
            "neighbours": ZERO_OUT,
            "neighbouring": RELATIONS[ZERO_OUT],
            "dataset_size": len(self.data.train),
            "steps": max(sum(count for _, count in run) for run in self.runs),
            "tuning": self.describe(),
        }

    def describe(self) -> dict[str, Any]:
        """Plain data for files. Nothing in it was computed from the records."""
        names = varied(self.candidates)
        return {
            "method": self.price.method.name,
            "parameters": self.price.method.to_dict(),
            "epsilon": self.price.epsilon,
            "delta": self.price.delta,
            "accountant": self.price.accountant,
            "run_epsilon": self.price.run_epsilon,
            "run_delta": self.price.run_delta,
            "explanation": self.price.explanation,
            "score": SCORE,
            "candidates": [
                {name: getattr(one, name) for name in names} | {"noise_multiplier": noise}
                for one, noise in zip(self.candidates, self.price.noise_multipliers, strict=True)
            ],
        }


def plan_search(
    data: Data,
    candidates: Sequence[TrainingSettings],
    *,
    epsilon: float,
    delta: float | None = None,
    method: str | SelectionMethod = AUTO,
    coverage: float | None = None,
    accountant: str = defaults.ACCOUNTANT,
) -> Search:
    """Price a search and check that every candidate can be trained; spends nothing.

    Every candidate gets the noise at which choosing among all of them stays within the total (`epsilon`, `delta`); its own
    epsilon and delta are not used. `delta=None` means min(1e-5, 1/(10 N)).
    """
    if not candidates:
        raise InvalidArgument("there is no candidate: give at least one value to try.")
    records = len(data.train)
    failure = defaults.delta(records) if delta is None else delta
    for one in candidates:
        optimizer_for(one, data)  # or raises
    shapes = [shape_of(one, records) for one in candidates]
    priced = price(method, epsilon, failure, shapes, accountant, coverage)
    ready = tuple(
        replace(one, noise_multiplier=noise, epsilon=priced.epsilon, delta=failure, accountant=accountant, seed=None)
        for one, noise in zip(candidates, priced.noise_multipliers, strict=True)
    )
    for one in ready:
        _rehearse(data, one)
    return Search(data, ready, priced)


def _rehearse(data: Data, settings: TrainingSettings) -> None:
    """Do everything up to the first step, so that refusals come before anything is spent."""
    try:
        train(data, settings, stop=lambda: True)
    except Interrupted:
        return
    raise Misuse("training continued although it was told to stop before its first step.")

"""Tuning with one guarantee for the whole search: price, record, run, release the best."""

import io
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clipless import models
from clipless.accounting import Ledger, SelectionEvent
from clipless.accounting.journal import Journal
from clipless.accounting.release import releases
from clipless.accounting.selection import AUTO, Run, SelectionMethod, SingleRun, price
from clipless.data import Data
from clipless.errors import CliplessError, Interrupted, InvalidArgument, Misuse
from clipless.runs import RunFolder
from clipless.training import Result, Settings, save_run, train
from clipless.tuning.candidates import shape_of, varied
from clipless.tuning.pools import InProcess, Pool
from clipless.tuning.searching import best, outcomes
from clipless.tuning.worker import Outcome, Task

SCORE = (
    "accuracy on the test records. They decide which run is released and the guarantee does not cover them: it is for "
    "the training records."
)


class NothingToRelease(CliplessError, RuntimeError):
    """The search is over and paid for, and there is no model: no run was drawn, or none came to its end."""


@dataclass(frozen=True)
class Search:
    """What will be done, with its price, before any of it is done."""

    data: Data
    candidates: tuple[Settings, ...]
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
        """What is promised, for files, beside the fields that every run's plan has."""
        return {
            "epsilon": self.price.epsilon,
            "delta": self.price.delta,
            "accountant": self.price.accountant,
            "neighbouring": "add or remove one record",
            "dataset_size": len(self.data.train),
            "steps": max(sum(count for _, count in run) for run in self.runs),
            "tuning": self.describe(),
        }

    def describe(self) -> dict[str, Any]:
        """Plain values, for files: nothing in it was computed from the records."""
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


@dataclass(frozen=True)
class Tuned:
    """The released run, with the guarantee of the whole search in its ledger.

    `run_plan` is what the released run by itself promised. `scores` has the score of every candidate where the method
    pays for showing them, else None; a run that failed has minus infinity.
    """

    search: Search
    chosen: int
    result: Result
    run_plan: dict[str, Any]
    scores: tuple[float, ...] | None

    @property
    def settings(self) -> Settings:
        """Those of the candidate that was chosen."""
        return self.search.candidates[self.chosen]

    def record(self) -> dict[str, Any]:
        """What may be stored and published of the search."""
        shown = {} if self.scores is None else {"scores": [s if math.isfinite(s) else None for s in self.scores]}
        return self.search.describe() | {"chosen": self.chosen, "run": self.run_plan} | shown


def plan_search(
    data: Data,
    candidates: Sequence[Settings],
    *,
    epsilon: float,
    delta: float | None = None,
    method: str | SelectionMethod = AUTO,
    coverage: float | None = None,
    accountant: str = "pld",
) -> Search:
    """Price a search and see that every candidate can be trained; spends nothing.

    Every candidate gets the noise with which the choice among all keeps to the total (`epsilon`, `delta`); its own
    epsilon and delta are not used. `delta=None` stands for N ** -1.1.
    """
    if not candidates:
        raise InvalidArgument("there is no candidate: give at least one value to try.")
    records = len(data.train)
    failure = records**-1.1 if delta is None else delta
    for one in candidates:
        if not 1 <= one.batch_size <= records:
            raise InvalidArgument(f"batch_size is {one.batch_size}: choose one from 1 to the {records} records.")
    shapes = [shape_of(one, records) for one in candidates]
    priced = price(method, epsilon, failure, shapes, accountant, coverage)
    ready = tuple(
        replace(one, noise_multiplier=noise, epsilon=priced.epsilon, delta=failure, accountant=accountant, seed=None)
        for one, noise in zip(candidates, priced.noise_multipliers, strict=True)
    )
    for one in ready:
        _rehearse(data, one)
    return Search(data, ready, priced)


def tune(
    search: Search,
    pool: Pool | None = None,
    *,
    source: str | None = None,
    out: Path | None = None,
    seed: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Tuned:
    """Run a search and release the best run.

    The price of the whole search is in the ledger before the first run begins, with `out` on disk: whatever happens
    then, it is counted. Only the chosen run is kept. With `source`, the name or path of the data set, workers load it
    themselves. `seed` repeats a search, for tests: whoever knows it can subtract the noise. `on_progress` is told the
    share of all steps that is done; it says how many runs were drawn, so show it to nobody who is shown the result.
    The pool is closed at the end, an executor of the caller's (`Borrowed`) is not.
    """
    workplace = InProcess() if pool is None else pool
    folder = None if out is None else RunFolder(out)
    ledger = Ledger()
    ledger.record(search.event())
    try:
        _refuse_seed(search, seed)
        place = None if folder is None else _recorded(folder, search, ledger)
        tasks = _drawn(search, seed, search.data if source is None else source)
        if not tasks:
            raise NothingToRelease("the number of runs that was drawn is 0: nothing is released, and it is counted.")
        winner, scores = _searched(search, tasks, workplace, on_progress or (lambda _: None))
    finally:
        workplace.close()
    result = _released(search, winner, ledger, place, seed)
    tuned = Tuned(search, winner.candidate, result, winner.details["plan"], scores)
    if folder is not None:
        save_run(tuned.result, folder.path)
        folder.write_record((folder.read_record() or {}) | {"tuning": tuned.record()})
    return tuned


def _rehearse(data: Data, settings: Settings) -> None:
    """Everything up to the first step, so that what is refused is refused before anything is spent."""
    try:
        train(data, settings, stop=lambda: True)
    except Interrupted:
        return
    raise Misuse("training went on although it was told to stop before its first step.")


def _refuse_seed(search: Search, seed: int | None) -> None:
    if seed is not None and any(one.noise == "secure" for one in search.candidates):
        raise InvalidArgument("noise='secure' takes no seed: leave it unset, or use noise='torch' for a test.")


def _recorded(folder: RunFolder, search: Search, ledger: Ledger) -> dict[str, Any]:
    """Put the search's event on disk; returns which ledger that is and how far it has come."""
    folder.check_writable()
    if folder.unfinished:
        raise InvalidArgument(
            f"{folder.path} holds an interrupted run, and what it spent stays spent: choose another folder (--out)."
        )
    folder.keep_earlier()
    delta, accountant = search.price.delta, search.price.accountant
    journal = Journal.create(folder.ledger, delta, accountant, planned=ledger, plan=search.plan(), past=ledger)
    journal.close()
    return journal.place()


def _drawn(search: Search, seed: int | None, data: Data | str) -> list[Task]:
    """The runs to take, each with a seed of its own; drawn from the operating system unless a seed is given."""
    rng = random.SystemRandom() if seed is None else random.Random(seed)
    tasks = []
    for place, candidate in enumerate(search.price.method.draw(rng)):
        settings = search.candidates[candidate]
        if settings.noise != "secure":
            settings = replace(settings, seed=rng.getrandbits(128) | 1 << 128)
        steps = sum(count for _, count in search.runs[candidate])
        tasks.append(Task(place, candidate, settings, data, len(search.data.train), steps))
    return tasks


def _searched(
    search: Search, tasks: list[Task], pool: Pool, on_progress: Callable[[float], None]
) -> tuple[Outcome, tuple[float, ...] | None]:
    total, taken = sum(task.steps for task in tasks), 0

    def on_steps(steps: int) -> None:
        nonlocal taken
        taken += steps
        on_progress(min(1.0, taken / total))

    scores: dict[int, float] = {}
    runs = search.runs

    def checked() -> Any:
        for outcome in outcomes(tasks, pool, on_steps):
            if not outcome.failed:
                _refuse_dearer(outcome, runs[outcome.candidate])
            if search.price.method.releases_all:
                scores[outcome.candidate] = outcome.score
            yield outcome

    winner = best(checked())
    if winner.failed:
        raise NothingToRelease(
            "no run came to its end, so nothing is released, and the search is counted. To see why, train one candidate "
            "by itself (clipless train); with workers, see that they can import clipless and stay alive."
        )
    return winner, tuple(scores[k] for k in range(len(scores))) if scores else None


def _refuse_dearer(outcome: Outcome, promised: Run) -> None:
    """A run must have released no more than was priced and recorded."""
    found = releases(Ledger.from_dict(outcome.details["ledger"]).events)  # type: ignore[arg-type]
    expected = releases(promised)
    if len(found) != len(expected) or any(
        one.sample_rate != two.sample_rate or one.steps != two.steps or one.noise_multiplier < two.noise_multiplier
        for one, two in zip(found, expected, strict=False)
    ):
        raise Misuse(
            "a run released more than was recorded for it, so the search's price does not hold and nothing is released: "
            "give all workers the same version of clipless."
        )


def _released(
    search: Search, winner: Outcome, ledger: Ledger, place: dict[str, Any] | None, seed: int | None
) -> Result:
    settings = replace(search.candidates[winner.candidate], seed=seed)
    with torch.random.fork_rng(devices=[]):
        model = models.build(settings.model, search.data.shape, search.data.classes)
    model.load_state_dict(torch.load(io.BytesIO(winner.weights), weights_only=True))
    spent = ledger.spent(search.price.delta, search.price.accountant)
    details = {name: winner.details[name] for name in ("accuracies", "steps", "seconds", "history", "data")}
    return Result(
        settings=settings,
        epsilon=spent.epsilon,
        delta=spent.delta,
        plan=search.plan(),
        ledger=ledger.to_dict(),
        model=model,
        ledger_file=place,
        **details,
    )

"""Running a search and releasing its best run, under one guarantee for the whole search."""

import io
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clipless.accounting import Ledger
from clipless.accounting.release import releases
from clipless.accounting.selection import Run
from clipless.app import models
from clipless.app.data import Data
from clipless.app.training import Result, TrainingSettings, save_run
from clipless.app.tuning.execution import best, outcomes
from clipless.app.tuning.pools import InProcess, Pool
from clipless.app.tuning.search import Search
from clipless.app.tuning.worker import Outcome, Task
from clipless.errors import CliplessError, Misuse
from clipless.noise import chosen_noise
from clipless.runs.journal import Journal
from clipless.runs.run_folder import RunFolder


class NothingToRelease(CliplessError, RuntimeError):
    """The search is over and paid for, and there is no model: no run was drawn, or none finished."""


@dataclass(frozen=True)
class Tuned:
    """The released run, with the guarantee of the whole search in its ledger.

    `run_plan` is the plan of the released run alone. `scores` has the score of every candidate if the method pays for
    showing them, else None; a failed run has minus infinity.
    """

    search: Search
    chosen: int
    result: Result
    run_plan: dict[str, Any]
    scores: tuple[float, ...] | None

    @property
    def settings(self) -> TrainingSettings:
        """The settings of the chosen candidate."""
        return self.search.candidates[self.chosen]

    def record(self) -> dict[str, Any]:
        """What may be stored and published about the search."""
        shown = {} if self.scores is None else {"scores": [s if math.isfinite(s) else None for s in self.scores]}
        return self.search.describe() | {"chosen": self.chosen, "run": self.run_plan} | shown


def tune(
    search: Search,
    pool: Pool | None = None,
    *,
    source: str | None = None,
    out: Path | None = None,
    seed: int | None = None,
    on_progress: Callable[[float], None] | None = None,
    config: str | None = None,
) -> Tuned:
    """Run a search and release the best run.

    The price of the whole search is in the ledger before the first run begins, and with `out` on disk, so it is counted in
    any case. Only the chosen run is kept. With `source`, the name or path of the data set, workers load it themselves.
    `seed` repeats a search, for tests: whoever knows it can subtract the noise. `on_progress` is called with the fraction of
    all steps that is done. It reveals how many runs were drawn: do not show it to anyone who sees the result. The pool is
    closed at the end; the caller's own executor (`Borrowed`) is not. `config` is stored as config.toml.
    """
    workplace = InProcess() if pool is None else pool
    folder = None if out is None else RunFolder(out)
    ledger = Ledger()
    ledger.record(search.event())
    try:
        _refuse_seed(search, seed)
        place = None if folder is None else _record_search(folder, search, ledger)
        tasks = _draw_tasks(search, seed, search.data if source is None else source)
        if not tasks:
            raise NothingToRelease("the number of runs drawn is 0: nothing is released, and the search is counted.")
        winner, scores = _run_all(search, tasks, workplace, on_progress or (lambda _: None))
    finally:
        workplace.close()
    result = _result_of(search, winner, ledger, place, seed)
    tuned = Tuned(search, winner.candidate, result, winner.details["plan"], scores)
    if folder is not None:
        save_run(tuned.result, folder.path, config)
        folder.write_record((folder.read_record() or {}) | {"tuning": tuned.record()})
    return tuned


def _refuse_seed(search: Search, seed: int | None) -> None:
    for one in search.candidates:
        chosen_noise(one.noise, seed)


def _record_search(folder: RunFolder, search: Search, ledger: Ledger) -> dict[str, Any]:
    """Put the search's event on disk; returns the ledger's run, position and head."""
    folder.check_writable()
    folder.keep_earlier()
    delta, accountant = search.price.delta, search.price.accountant
    journal = Journal.create(folder.ledger, delta, accountant, planned=ledger, plan=search.plan(), past=ledger)
    journal.close()
    return journal.place()


def _draw_tasks(search: Search, seed: int | None, data: Data | str) -> list[Task]:
    """The runs to execute, drawn with the operating system's randomness; with a seed, drawn from it, each with its own."""
    rng = random.SystemRandom() if seed is None else random.Random(seed)
    tasks = []
    for place, candidate in enumerate(search.price.method.draw(rng)):
        settings = search.candidates[candidate]
        if seed is not None:
            settings = replace(settings, seed=rng.getrandbits(128) | 1 << 128)
        steps = sum(count for _, count in search.runs[candidate])
        tasks.append(Task(place, candidate, settings, data, len(search.data.train), steps))
    return tasks


def _run_all(
    search: Search, tasks: list[Task], pool: Pool, on_progress: Callable[[float], None]
) -> tuple[Outcome, tuple[float, ...] | None]:
    total, taken = sum(task.steps for task in tasks), 0

    def on_steps(steps: int) -> None:
        nonlocal taken
        taken += steps
        on_progress(min(1.0, taken / total))

    scores: dict[int, float] = {}
    runs = search.runs

    def checked() -> Iterator[Outcome]:
        for outcome in outcomes(tasks, pool, on_steps):
            if not outcome.failed:
                _refuse_dearer(outcome, runs[outcome.candidate])
            if search.price.method.releases_all:
                scores[outcome.candidate] = outcome.score
            yield outcome

    winner = best(checked())
    if winner.failed:
        raise NothingToRelease(
            "no run finished, so nothing is released, and the search is counted. To see why, train one candidate "
            "by itself (clipless train); with workers, check that they can import clipless and stay alive."
        )
    return winner, tuple(scores[k] for k in range(len(scores))) if scores else None


def _refuse_dearer(outcome: Outcome, promised: Run) -> None:
    """Raises if a run released more than was priced and recorded."""
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


def _result_of(
    search: Search, winner: Outcome, ledger: Ledger, place: dict[str, Any] | None, seed: int | None
) -> Result:
    settings = replace(search.candidates[winner.candidate], seed=seed)
    with torch.random.fork_rng(devices=[]):
        model = models.build(settings.model, search.data.shape, search.data.classes, search.data.vocabulary)
    model.load_state_dict(torch.load(io.BytesIO(winner.weights), weights_only=True))
    spent = ledger.spent(search.price.delta, search.price.accountant)
    details = {name: winner.details[name] for name in ("scores", "metric", "steps", "seconds", "history", "data")}
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

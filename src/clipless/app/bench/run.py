"""One benchmark run from top to bottom: times of every model, memory, scaling curves."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from clipless.app.bench import machine, memory, opacus_ways, scaling
from clipless.app.bench.problems import LEARNING_RATE, PROBLEMS, TINY_PROBLEMS, Problem
from clipless.app.bench.results import FAILED, UNSUPPORTED, BenchResult, ModelResult, WayResult
from clipless.app.bench.timing import Series, interleave
from clipless.app.bench.ways import NOISE_MULTIPLIER, OPACUS, PLAIN, WAYS, Runner
from clipless.app.bench.work import SCALING_MS, Pilot, ProgressCounter, pilot
from clipless.app.progress import OnProgress
from clipless.app.threads import torch_threads
from clipless.arguments import unknown_name, whole
from clipless.errors import InvalidArgument

HELD_PARAMETERS = 100_000_000
HELD_AT_LEAST = 4
DIGITS = 4
# Rounds are added until plain training has taken this many milliseconds in total, up to this many rounds.
PLAIN_MS = 2000.0
MOST_ROUNDS = 400


@dataclass(frozen=True)
class BenchSettings:
    """What to measure and how long. `budget` is the seconds of timed steps after which a slow way stops early."""

    models: tuple[str, ...]
    ways: tuple[str, ...]
    rounds: int = 30
    warm_up: int = 3
    threads: int = 2
    budget: float = 120.0
    memory: bool = True
    axes: tuple[str, ...] = ()
    scaling_rounds: int = 10
    tiny: bool = False

    def checked(self) -> "BenchSettings":
        """These settings. Raises InvalidArgument for unknown names and for numbers that make no sense."""
        if not self.models:
            raise InvalidArgument(f"no model to measure: name some of {', '.join(PROBLEMS)}.")
        for model in self.models:
            if model not in PROBLEMS:
                raise unknown_name("model", model, [*PROBLEMS, "all"])
        for axis in self.axes:
            if axis not in scaling.AXES:
                raise unknown_name("scaling axis", axis, [*scaling.AXES, "all", "none"])
        for name in ("rounds", "warm_up", "threads", "scaling_rounds"):
            whole(name, getattr(self, name))
        if not self.budget > 0:
            raise InvalidArgument(f"the seconds for each way are {self.budget}: give a positive number.")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the constants of every run."""
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        steps = {
            "optimizer": f"SGD, or as the model says, lr={LEARNING_RATE:g}",
            "noise_multiplier": NOISE_MULTIPLIER,
            "dtype": "float32",
        }
        return fields | steps

    def problem(self, model: str) -> Problem:
        return (TINY_PROBLEMS if self.tiny else PROBLEMS)[model]


def run(settings: BenchSettings, report: OnProgress, keep: Callable[[BenchResult], None]) -> BenchResult:
    """Measure everything. `report` is told what is being done and how much is done of how much; `keep` is given the
    results so far after each model and each curve."""
    settings.checked()
    with torch_threads(settings.threads), opacus_ways.quiet():
        result = BenchResult(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=machine.facts() | {"load_average_before": machine.load_average()},
            settings=settings.to_dict(),
        )
        pilots = {name: pilot(settings.problem(name)) for name in settings.models}
        work = ProgressCounter(_total(settings, pilots), report)
        for name in settings.models:
            measured = measure(settings, name, pilots[name], work)
            result = replace(result, models={**result.models, name: measured})
            keep(result)
        for name in settings.axes:
            tick = work.ticker(f"scaling {name}", SCALING_MS)
            curve = scaling.curve(scaling.AXES[name], settings.scaling_rounds, tiny=settings.tiny, tick=tick)
            result = replace(result, scaling={**result.scaling, name: curve})
            keep(result)
        result = replace(result, complete=True)
        keep(result)
    return result


def _total(settings: BenchSettings, pilots: Mapping[str, Pilot]) -> float:
    """The total amount of work, in milliseconds of plain training."""
    ways = len(settings.ways)
    steps = sum(
        each.step_ms * rounds_of(settings, each) * (ways + len(groups(settings.ways, each.parameters)))
        for each in pilots.values()
    )
    processes = sum(each.process_ms(memory.STEPS) * (ways + 1) for each in pilots.values())
    curves = SCALING_MS * scaling.steps(settings.axes, settings.scaling_rounds, settings.tiny)
    return steps + curves + (processes if settings.memory else 0.0)


def measure(settings: BenchSettings, name: str, size: Pilot, work: ProgressCounter) -> ModelResult:
    """All ways of one model. Only a few are in memory at a time, always together with plain training."""
    problem, load = settings.problem(name), machine.load_average()
    found: dict[str, WayResult] = {PLAIN: WayResult()}
    for group in groups(settings.ways, size.parameters):
        timed_ways = _time(problem, group, settings, rounds_of(settings, size), work.ticker(name, size.step_ms))
        plain = timed_ways.pop(PLAIN)
        every = found[PLAIN].ms + plain.ms
        found |= {PLAIN: replace(plain, ms=every, plain_ms=every)} | timed_ways
    if settings.memory:
        for way, result in found.items():
            found[way] = _with_memory(name, way, result, settings)
            work.add(f"{name} {way} memory", size.process_ms(memory.STEPS))
    return ModelResult(problem.title, problem.batch, size.parameters, size.trainable, load, found)


def groups(ways: Sequence[str], parameters: int) -> list[tuple[str, ...]]:
    """The ways in groups that are measured together, as many as memory should hold models.

    >>> groups(["a", "b", "c", "d", "e"], parameters=22_000_000)
    [('a', 'b', 'c', 'd'), ('e',)]
    """
    held = max(HELD_AT_LEAST, HELD_PARAMETERS // parameters)
    return [tuple(ways[start : start + held]) for start in range(0, len(ways), held)] or [()]


def rounds_of(settings: BenchSettings, size: Pilot) -> int:
    """The rounds of a model: as many as asked for, more if its steps are short and few of them are undisturbed."""
    more = min(MOST_ROUNDS, math.ceil(PLAIN_MS / size.step_ms))
    return settings.rounds if settings.tiny else max(settings.rounds, more)


def _time(
    problem: Problem, group: Sequence[str], settings: BenchSettings, rounds: int, tick: Callable[[str], None]
) -> dict[str, WayResult]:
    results: dict[str, WayResult] = {}
    runners: dict[str, Runner] = {}
    try:
        for way in (PLAIN, *group):
            started = start(way, problem)
            if isinstance(started, WayResult):
                results[way] = started
                for _ in range(rounds):
                    tick(way)
            else:
                runners[way] = started
        interleave(runners, settings.warm_up - 1, settings.budget)
        series = interleave(runners, rounds, settings.budget, tick)
        measured = {way: _result(runners[way], series[way], series[PLAIN], rounds) for way in runners}
    finally:
        for runner in runners.values():
            runner.close()
        runners.clear()
        gc.collect()
    return {way: measured.get(way) or results[way] for way in (PLAIN, *group)}


def start(way: str, problem: Problem) -> Runner | WayResult:
    """A way that has taken its first step, or the reason why it could not."""
    try:
        runner = WAYS[way](problem)
        runner.step(*runner.draw())
    except Exception as error:
        if way == PLAIN:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return WayResult(UNSUPPORTED if way.startswith(OPACUS) else FAILED, reason)
    return runner


def _result(runner: Runner, own: Series, plain: Series, rounds: int) -> WayResult:
    return WayResult(
        note=runner.note,
        ms=tuple(round(value, DIGITS) for value in own.step_ms.values()),
        plain_ms=tuple(round(plain.step_ms[number], DIGITS) for number in own.step_ms),
        draw_ms=round(min(own.draw_ms.values()), DIGITS),
        capped=len(own.step_ms) < rounds,
    )


def _with_memory(name: str, way: str, result: WayResult, settings: BenchSettings) -> WayResult:
    if not result.ms:
        return result
    found = memory.measure(name, way, tiny=settings.tiny, threads=settings.threads)
    return replace(result, memory_reason=found) if isinstance(found, str) else replace(result, memory=found)

"""The results of a benchmark: raw times and sizes, from which every figure shown is computed.

The file holds the figures too, for reading it without clipless; `load` uses the raw values alone.
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clipless.app.bench.arithmetic import geometric_mean, median_of_ratios, ratio_of_minima, spread
from clipless.app.bench.memory import Memory
from clipless.app.bench.scaling import Curve
from clipless.app.bench.ways import PLAIN
from clipless.errors import InvalidArgument
from clipless.runs.durable_files import replace_file

KIND = "clipless bench"
BUSY = 1.25
MEASURED, UNSUPPORTED, FAILED = "measured", "unsupported", "failed"


@dataclass(frozen=True)
class WayResult:
    """One way on one model: its times by round, those of plain training in the same rounds, and its memory.

    `status` is "measured", or "unsupported" (another library refuses the model) or "failed", with the `reason`.
    `capped` means that the way used up its time before the last round.
    """

    status: str = MEASURED
    reason: str | None = None
    note: str | None = None
    ms: tuple[float, ...] = ()
    plain_ms: tuple[float, ...] = ()
    draw_ms: float | None = None
    capped: bool = False
    memory: Memory | None = None
    memory_reason: str | None = None

    @property
    def ratio(self) -> float:
        return ratio_of_minima(self.ms, self.plain_ms)

    @property
    def median_ratio(self) -> float:
        return median_of_ratios(self.ms, self.plain_ms)

    def figures(self, plain: "WayResult") -> dict[str, float]:
        """All figures of this way. Memory is compared with that of plain training in its own process."""
        figures: dict[str, float] = {}
        if self.ms:
            figures |= {
                "min_ms": min(self.ms),
                "median_ms": statistics.median(self.ms),
                "ratio_of_minima": self.ratio,
                "median_of_ratios": self.median_ratio,
                "median_over_minimum": spread(self.ms),
            }
        if self.memory:
            figures |= {"peak_mb": self.memory.peak_mb, "peak_above_import_mb": self.memory.above_import_mb}
        if self.memory and plain.memory:
            figures["peak_over_plain"] = self.memory.peak_mb / plain.memory.peak_mb
            figures["peak_above_import_over_plain"] = self.memory.above_import_mb / plain.memory.above_import_mb
        return figures


@dataclass(frozen=True)
class ModelResult:
    """All ways of one model, plain training among them."""

    title: str
    batch: int
    parameters: int
    trainable: int
    load_average: float | None
    ways: Mapping[str, WayResult]

    @property
    def plain(self) -> WayResult:
        return self.ways[PLAIN]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "ways": {
                name: {"figures": _rounded(way.figures(self.plain))} | asdict(way) for name, way in self.ways.items()
            }
        }


@dataclass(frozen=True)
class BenchResult:
    """A whole run: where, when and how it was measured, and what came out. Not `complete` when it was interrupted."""

    date: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    models: Mapping[str, ModelResult] = field(default_factory=dict)
    scaling: Mapping[str, Curve] = field(default_factory=dict)
    complete: bool = False

    def ways(self) -> list[str]:
        """All ways but plain training, in the order of the table."""
        names = dict.fromkeys(name for model in self.models.values() for name in model.ways)
        return [name for name in names if name != PLAIN]

    def ratios(self, way: str) -> dict[str, WayResult]:
        """The results of a way by model, where it was measured."""
        found = {name: model.ways[way] for name, model in self.models.items() if way in model.ways}
        return {name: result for name, result in found.items() if result.ms}

    def geometric_means(self) -> dict[str, dict[str, float]]:
        """For each way the mean ratio over the models it was measured on, and their number."""
        return {
            way: {
                "ratio_of_minima": geometric_mean([each.ratio for each in found.values()]),
                "median_of_ratios": geometric_mean([each.median_ratio for each in found.values()]),
                "models": len(found),
            }
            for way in self.ways()
            if (found := self.ratios(way))
        }

    def warnings(self) -> list[str]:
        """Reasons not to trust the numbers."""
        load, cores = self.machine["load_average_before"], self.machine["usable_cores"]
        notes = []
        if load is not None and load > cores:
            notes.append(
                f"the load average was {load:g} on {cores} cores before the run: measure again on a quiet machine."
            )
        for name, model in self.models.items():
            if model.plain.ms and spread(model.plain.ms) > BUSY:
                notes.append(
                    f"{name}: the median of plain training is {spread(model.plain.ms):.2f} times its minimum, so the "
                    "machine was busy: measure again on a quiet one."
                )
            notes += [
                f"{name}: {way}: {result.reason}" for way, result in model.ways.items() if result.status == FAILED
            ]
        return notes if self.complete else [*notes, "the run was not finished: some of it is missing."]

    def failures(self) -> int:
        """Ways of clipless that failed, in time or in memory."""
        every = [way for model in self.models.values() for way in model.ways.values()]
        return sum(way.status == FAILED or (way.status == MEASURED and way.memory_reason is not None) for way in every)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "date": self.date,
            "complete": self.complete,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "warnings": self.warnings(),
            "geometric_means": {way: _rounded(means) for way, means in self.geometric_means().items()},
            "models": {name: model.to_dict() for name, model in self.models.items()},
            "scaling": {name: _curve_to_dict(curve) for name, curve in self.scaling.items()},
        }


def save(result: BenchResult, path: Path) -> None:
    """The file appears whole or not at all, so an interrupted run keeps what it had."""
    text = json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()))


def load(path: Path) -> BenchResult:
    """Raises InvalidArgument for a file that is not there or was not written by `clipless bench`."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["kind"] != KIND:
            raise ValueError(f"its kind is {record['kind']!r}")
        return from_dict(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{path} is not a result of clipless bench ({type(error).__name__}: {error}). Give a file that it wrote."
        ) from error


def from_dict(record: Mapping[str, Any]) -> BenchResult:
    models = {
        name: ModelResult(**model | {"ways": {way: _way_from_dict(each) for way, each in model["ways"].items()}})
        for name, model in record["models"].items()
    }
    curves = {
        name: Curve(each["title"], *(tuple(each[key]) for key in ("sizes", "plain_ms", "private_ms")))
        for name, each in record["scaling"].items()
    }
    return BenchResult(
        record["date"], record["machine"], record["settings"], models, curves, complete=record["complete"]
    )


def _way_from_dict(record: Mapping[str, Any]) -> WayResult:
    raw = {name: value for name, value in record.items() if name != "figures"}
    memory = Memory(**raw["memory"]) if raw["memory"] else None
    return WayResult(**raw | {"ms": tuple(raw["ms"]), "plain_ms": tuple(raw["plain_ms"]), "memory": memory})


def _curve_to_dict(curve: Curve) -> dict[str, Any]:
    ratio = curve.slope_ratio
    slopes = _rounded({"plain_slope": curve.plain_slope, "private_slope": curve.private_slope})
    return asdict(curve) | slopes | {"slope_ratio": None if ratio is None else round(ratio, 4)}


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}

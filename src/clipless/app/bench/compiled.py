"""What each compiled function gains: the time of a step with it switched off over the time with it.

Both take their steps in turn, on the same model with the same weights. A function that gains less than `WORTH` on every
model is not worth keeping.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from clipless.app.bench.machine import described
from clipless.app.bench.made_up import MadeUp, private_steps
from clipless.app.bench.problems import PROBLEMS, TINY_PROBLEMS, Problem
from clipless.app.bench.timing import Series, interleave
from clipless.app.bench.ways import WAYS, InputsAndLabels, Runner
from clipless.clipping import auto_s
from clipless.errors import InvalidArgument
from clipless.gradients.layers import conv_rows, norm_sums
from clipless.gradients.recurrent import compiled_lstm, matrix_products
from clipless.native import gram, rows
from clipless.noise import keys, source
from clipless.processor import processor

WORTH = 1.02
WARM_UP = 3
# Steps of small models take longer by chance in more ways than others: they are repeated for so long.
SECONDS = 8.0
MOST_ROUNDS = 1500
START, END = "<!-- compiled -->", "<!-- end of compiled -->"
KIND = "clipless compiled"
# Poisson batches from a large data set, whose drawing needs the keystream, instead of one batch over and over.
POISSON = "tabular, Poisson"
_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class Switch:
    """A compiled function or another choice, the models that it can help most, and a block in which torch or numpy does its
    work. Some are `used` on some processors only."""

    title: str
    models: tuple[str, ...]
    off: Callable[[], AbstractContextManager[Any]]
    used: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Gain:
    """Milliseconds of a step on one model, by round: with the function and without it."""

    function: str
    model: str
    with_ms: tuple[float, ...]
    without_ms: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Without over with, by minima.

        >>> Gain("f", "mlp", (2.0, 9.0), (8.0, 3.0)).gain
        1.5
        """
        return min(self.without_ms) / min(self.with_ms)


def _nothing(module: object) -> Callable[[], AbstractContextManager[Any]]:
    """As if nothing had been compiled, for one module that uses the library."""

    def compiled() -> None:
        return None

    return lambda: mock.patch.object(module, "compiled", compiled)


@contextmanager
def _without(module: Any, **changes: Callable[..., Any]) -> Iterator[None]:
    """One of the compiled functions of a module is switched off; the others stay on."""
    fast = module.compiled()
    fewer = fast._replace(**changes) if fast else None

    def compiled() -> Any:
        return fewer

    with mock.patch.object(module, "compiled", compiled):
        yield


def _takes_onednn() -> bool:
    return matrix_products.prefers_onednn(processor())


SWITCHES: Mapping[str, Switch] = {
    "release": Switch("noise and its sum, `noise.c`", ("mlp", "encoder", "tabular"), _nothing(source)),
    "keystream": Switch("keys and Poisson batches, `noise.c`", (POISSON, "tabular"), _nothing(keys)),
    "squares": Switch(
        "squared norms of written-out gradients, `rows.c`",
        ("tabular", "cnn", "resnet18", "encoder", "decoder"),
        lambda: _without(rows, squares=lambda rows, terms, groups: None),
    ),
    "norms": Switch(
        "norms from their squares, `rows.c`",
        ("tabular", "cnn"),
        lambda: _without(rows, norms=lambda squared, dtype, scale, least: None),
    ),
    "add_rows": Switch(
        "weighted sums, `rows.c`",
        ("tabular", "cnn", "resnet18", "encoder", "decoder"),
        lambda: _without(rows, add_rows=lambda sums, scale: False),
    ),
    "norm_sums": Switch("scale and shift of layer norms, `layer_norm.c`", ("encoder", "decoder"), _nothing(norm_sums)),
    "conv_rows": Switch("gradients of convolutions, `conv.c`", ("cnn", "resnet18"), _nothing(conv_rows)),
    "add_products": Switch(
        "sums of outer products, `rows.c`",
        ("tabular", "mlp", "lstm", "encoder", "decoder"),
        lambda: _without(rows, add_products=lambda sums, scale: False),
    ),
    "write_products": Switch(
        "the same for each record, `rows.c`",
        ("encoder", "decoder"),
        lambda: _without(rows, write_products=lambda left, right: None),
    ),
    "ghost_norms": Switch("norms from Gram matrices, `gram.c`", ("encoder", "decoder"), _nothing(gram)),
    "lstm": Switch("LSTMs through time, `lstm.c`", ("lstm",), _nothing(compiled_lstm)),
    "onednn": Switch(
        "matrix products by oneDNN instead of MKL",
        ("lstm",),
        lambda: mock.patch.object(matrix_products, "by_onednn", return_value=None),
        _takes_onednn,
    ),
}


def measure_gain(name: str, model: str, rounds: int, tiny: bool = False) -> Gain:
    """The gain of a function on a model, drawing included."""
    runner, switched = _runner(model, TINY_PROBLEMS if tiny else PROBLEMS), ExitStack()

    def way(*off: Callable[[], AbstractContextManager[Any]]) -> Runner:
        """Switches outside the time that is measured, and draws inside."""

        def switch() -> InputsAndLabels:
            switched.close()
            for each in off:
                switched.enter_context(each())
            return _NOTHING, _NOTHING

        return Runner(switch, lambda x, y: runner.step(*runner.draw()), runner.close)

    ways = {"with": way(), "without": way(SWITCHES[name].off)}
    try:
        first = interleave(ways, WARM_UP)
        series = interleave(ways, rounds if tiny else max(rounds, _rounds_that_fill(SECONDS, first.values())))
    finally:
        switched.close()
        runner.close()
    times = (tuple(round(ms, 4) for ms in series[way].step_ms.values()) for way in ways)
    return Gain(name, model, *times)


def _rounds_that_fill(seconds: float, first: Iterable[Series]) -> int:
    """How many rounds take so long, by the fastest steps of the first ones; at most `MOST_ROUNDS`."""
    return min(MOST_ROUNDS, int(1e3 * seconds / sum(min(each.step_ms.values()) for each in first)))


def _runner(model: str, problems: Mapping[str, Problem]) -> Runner:
    if model != POISSON:
        return WAYS["auto-s"](problems[model])
    problem = problems["tabular"]
    features = problem.make()[1].shape[1]
    return private_steps(problem, MadeUp(10**6, features), auto_s())


def to_json(machine: Mapping[str, Any], gains: Sequence[Gain]) -> str:
    record = [asdict(each) | {"gain": round(each.gain, 4)} for each in gains]
    return json.dumps({"kind": KIND, "machine": dict(machine), "gains": record}, indent=1) + "\n"


def from_json(text: str) -> tuple[dict[str, Any], list[Gain]]:
    """The machine and its gains, from the raw times. Raises InvalidArgument for another text."""
    try:
        record = json.loads(text)
        if record["kind"] != KIND:
            raise ValueError(f"its kind is {record['kind']!r}")
        gains = [
            Gain(each["function"], each["model"], tuple(each["with_ms"]), tuple(each["without_ms"]))
            for each in record["gains"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"not written by benchmarks/compiled.py ({type(error).__name__}: {error}).") from error
    return record["machine"], gains


def table(found: Sequence[tuple[Mapping[str, Any], Sequence[Gain]]]) -> str:
    """A row for each function: for every machine the model where it helps most, and how much longer a step is without it."""
    head = ["function", "what it does", *(described(machine) for machine, _ in found)]
    lines = [head, ["---"] * len(head)]
    for name, switch in SWITCHES.items():
        lines.append([f"`{name}`", switch.title, *(_cell(name, gains) for _, gains in found)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(name: str, gains: Sequence[Gain]) -> str:
    best = max((each for each in gains if each.function == name), key=lambda each: each.gain, default=None)
    if best is None:
        return ""
    times = f"{min(best.with_ms):.3g} ms, without {min(best.without_ms):.3g}"
    return f"{best.model}: x{best.gain:.3f} ({times}){'' if best.gain >= WORTH else ', not worth it'}"


def stored(folder: Path) -> list[tuple[dict[str, Any], list[Gain]]]:
    """What all machines of a folder have measured."""
    return [from_json(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/compiled.json"))]

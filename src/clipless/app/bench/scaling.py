"""How the time of a step grows with the batch, the width, the length, the depth, the size of a micro-batch and the number of
records.

Plain training and clipless (auto-s, flat) on the same small models; with micro-batches plain training accumulates
gradients over the same parts. What is compared is the slope on logarithmic axes: the exponent of the growth. Against the
number of records it is 0 for plain training, drawing included, and so it should be for clipless.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from clipless.app.bench.arithmetic import slope
from clipless.app.bench.made_up import MadeUp, plain_steps, private_steps
from clipless.app.bench.problems import PROBLEMS, Problem, encoder, mlp, sgd
from clipless.app.bench.timing import Series, interleave
from clipless.app.bench.ways import PLAIN, SEED, WAYS, InputsAndLabels, Runner, attach
from clipless.clipping import auto_s

PRIVATE = "auto-s"
WARM_UP = 2
LOGICAL_BATCH = 512
DIGITS = 4
# Below this exponent time does not grow: over four powers of ten by less than a third.
FLAT = 0.03


@dataclass(frozen=True)
class Axis:
    """A quantity that grows, its sizes, and both ways at one size."""

    title: str
    sizes: tuple[int, ...]
    tiny_sizes: tuple[int, ...]
    runners: Callable[[int], Mapping[str, Runner]]


@dataclass(frozen=True)
class Curve:
    """Best times in milliseconds of plain and private steps along an axis, and the slopes of both."""

    title: str
    sizes: tuple[int, ...]
    plain_ms: tuple[float, ...]
    private_ms: tuple[float, ...]

    @property
    def plain_slope(self) -> float:
        return slope(self.sizes, self.plain_ms)

    @property
    def private_slope(self) -> float:
        return slope(self.sizes, self.private_ms)

    @property
    def slope_ratio(self) -> float | None:
        """Private over plain: 1 if privacy costs the same factor at every size, above 1 if the factor grows. None if plain
        training does not grow."""
        return None if abs(self.plain_slope) < FLAT else self.private_slope / self.plain_slope


def curve(axis: Axis, rounds: int, *, tiny: bool = False, tick: Callable[[str], None] | None = None) -> Curve:
    """Measure one axis, plain and private in turn at every size."""
    sizes = axis.tiny_sizes if tiny else axis.sizes
    best = [_best(axis.runners(size), rounds, tick) for size in sizes]
    return Curve(axis.title, sizes, tuple(pair[0] for pair in best), tuple(pair[1] for pair in best))


def _best(runners: Mapping[str, Runner], rounds: int, tick: Callable[[str], None] | None) -> tuple[float, float]:
    try:
        interleave(runners, WARM_UP)
        series: Mapping[str, Series] = interleave(runners, rounds, tick=tick)
    finally:
        for runner in runners.values():
            runner.close()
    plain, private = (round(min(series[way].step_ms.values()), DIGITS) for way in (PLAIN, PRIVATE))
    return plain, private


def _both(problem: Problem) -> Mapping[str, Runner]:
    return {way: WAYS[way](problem) for way in (PLAIN, PRIVATE)}


def _mlp(batch: int, width: int, depth: int) -> Problem:
    return replace(PROBLEMS["mlp"], batch=batch, build=partial(mlp, width, depth))


def _encoder(length: int) -> Problem:
    def words(size: int, generator: torch.Generator) -> Tensor:
        return torch.randint(1000, (size, length), generator=generator)

    return replace(PROBLEMS["encoder"], batch=8, build=partial(encoder, 96, 2, length, 1000), inputs=words)


def _of_records(size: int) -> Mapping[str, Runner]:
    problem = PROBLEMS["tabular"]
    data = MadeUp(size, features=32)
    return {PLAIN: plain_steps(problem, data), PRIVATE: private_steps(problem, data, auto_s())}


def accumulated(problem: Problem, part: int) -> Mapping[str, Runner]:
    """Both ways on a logical batch in parts of `part` records. Both draw the parts during the step."""
    return {PLAIN: _plain_parts(problem, part), PRIVATE: _private_parts(problem, part)}


def _plain_parts(problem: Problem, part: int) -> Runner:
    model, x, y = problem.make(SEED)
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> None:
        pieces = zip(x.split(part), y.split(part), strict=True)
        accumulate(problem, model, optimizer, ((a, b, len(a) / len(x)) for a, b in pieces))

    return Runner(lambda: (x, y), step, lambda: None)


def _private_parts(problem: Problem, part: int) -> Runner:
    model, x, y = problem.make(SEED)
    optimizer = sgd(model)
    private = attach(model, optimizer, x, y, auto_s())
    batches = iter(private.loader.microbatches(part))

    def step(x: Tensor, y: Tensor) -> None:
        accumulate(problem, model, optimizer, ((a, b, 1.0) for a, b in next(batches)))

    def whole() -> InputsAndLabels:
        return x, y

    return Runner(whole, step, private.detach)


def accumulate(
    problem: Problem,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Iterator[tuple[Tensor, Tensor, float]],
) -> None:
    """One step on inputs, targets and weights of the parts of a batch."""
    optimizer.zero_grad()
    for x, y, weight in parts:
        loss = problem.loss(model(x), y)
        (loss if weight == 1.0 else loss * weight).backward()
    optimizer.step()


def _doubling(first: int, last: int) -> tuple[int, ...]:
    return tuple(first << power for power in range((last // first).bit_length()))


AXES: Mapping[str, Axis] = {
    "batch": Axis(
        "batch (MLP, 2x256)", _doubling(8, 1024), (4, 8, 16), lambda size: _both(_mlp(batch=size, width=256, depth=2))
    ),
    "width": Axis(
        "width (MLP, 2 layers, B=128)",
        _doubling(64, 2048),
        (8, 16, 32),
        lambda size: _both(_mlp(batch=128, width=size, depth=2)),
    ),
    "length": Axis(
        "sequence length (encoder, 2 layers, d=96, B=8)",
        _doubling(16, 512),
        (4, 8, 16),
        lambda size: _both(_encoder(size)),
    ),
    "layers": Axis(
        "layers (MLP, width 256, B=128)",
        _doubling(1, 32),
        (1, 2, 4),
        lambda size: _both(_mlp(batch=128, width=256, depth=size)),
    ),
    "microbatch": Axis(
        f"micro-batch (MLP, 2x256, {LOGICAL_BATCH} records per step)",
        _doubling(8, LOGICAL_BATCH),
        (128, 256, 512),
        lambda size: accumulated(_mlp(batch=LOGICAL_BATCH, width=256, depth=2), size),
    ),
    "records": Axis(
        "records in the data set (tabular MLP, B=256, drawing included)",
        (10**4, 10**5, 10**6, 10**7, 10**8),
        (10**4, 10**6, 10**8),
        _of_records,
    ),
}


def steps(axes: Sequence[str], rounds: int, tiny: bool) -> int:
    """How many timed steps the axes take, for telling the time left."""
    return sum(2 * rounds * len(AXES[name].tiny_sizes if tiny else AXES[name].sizes) for name in axes)

"""Repeat and select (Papernot and Steinke, 2022), by dp-accounting's event, in Rényi DP."""

import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from clipless import arguments
from clipless.accounting.accountants import NO_NOISE, accountant_named
from clipless.accounting.moments import divergence
from clipless.accounting.rdp import ROUNDING, SMALL_ORDERS
from clipless.accounting.release import Release, coarser
from clipless.accounting.selection.liu_talwar import LiuTalwar
from clipless.accounting.selection.method import Run, distinct, fields_of, guarantee
from clipless.accounting.selection.repetitions import Repetitions, covering
from clipless.arguments import whole

ORDERS = SMALL_ORDERS + tuple(float(round(16 * 2 ** (k / 4))) for k in range(1, 37))
# The highest order is raised until the best one lies well below it.
TOPS = (64.0, 512.0, ORDERS[-1])
MAX_RELEASES = 32
# The bound uses two orders, the lower one a few times below the higher: how finely both are searched.
WINDOW = (1 / 4, 1.2)
# The divergence of sampled Gaussians jumps at some order, and the best order often lies just below.
FINER = (2 ** (1 / 4), 2 ** (1 / 16))


@dataclass(frozen=True)
class PapernotSteinke:
    """Draw a number of runs, run a random candidate each time, release the best run and nothing else.

    The number is geometric by default, with mean 2 · candidates: the same as Liu-Talwar's, at a lower price. The bound
    is in Rényi DP, whichever accountant is given, and holds at every order for the worst candidate.
    """

    candidates: int
    mean: float
    shape: float = 1.0
    name: ClassVar[str] = "papernot-steinke"
    releases_all: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", whole("candidates", self.candidates))
        object.__setattr__(self, "mean", self.repetitions.mean)
        object.__setattr__(self, "shape", self.repetitions.shape)

    @classmethod
    def covering(cls, candidates: int, coverage: float | None = None, shape: float = 1.0) -> "PapernotSteinke":
        """By default as likely to try the best candidate as Liu-Talwar's default."""
        usual = LiuTalwar.covering(candidates, coverage)
        if shape == 1 or usual.candidates == 1:
            return cls(usual.candidates, usual.expected_runs, shape)
        chance = usual.coverage if coverage is None else arguments.fraction("coverage", coverage)
        return cls(usual.candidates, covering(usual.candidates, chance, shape).mean, shape)

    @property
    def repetitions(self) -> Repetitions:
        return Repetitions(self.mean, self.shape)

    @property
    def expected_runs(self) -> float:
        return self.mean

    @property
    def most_runs(self) -> None:
        return None

    @property
    def coverage(self) -> float:
        return 1 - self.repetitions.missing(1 / self.candidates)

    def epsilon(self, runs: Sequence[Run], delta: float, accountant: str = "pld") -> float:
        """By Rényi DP. Different runs are bounded by one of them, with a surcharge that makes it the worst."""
        guarantee(accountant)
        kinds = [coarser(kind, MAX_RELEASES) for kind in distinct(runs)]
        if any(release.noise_multiplier < NO_NOISE for kind in kinds for release in kind):
            return math.inf
        with _quiet():
            if len(kinds) == 1:
                return self._best(kinds[0], delta)[0]
            return min(self._dominating(kind, kinds, delta) for kind in kinds)

    def _best(self, kind: tuple[Release, ...], delta: float) -> tuple[float, float]:
        """The least epsilon over all orders, and its order."""
        best = math.inf, 0.0
        for top in TOPS:
            best = min(best, self._at(kind, [order for order in ORDERS if order <= top], delta))
            if best[1] < top / 2:
                break
        for ratio in FINER:
            best = min(best, self._at(kind, _near(best[1], ratio), delta))
        return best

    def _dominating(self, kind: tuple[Release, ...], kinds: list[tuple[Release, ...]], delta: float) -> float:
        """Bounded by this run, with the surcharge that makes it the worst up to some order; the best such order is taken."""
        near = _near(self._best(kind, delta)[1])
        curves = np.array([divergences(kind, near), *(divergences(other, near) for other in kinds)])
        known = np.isfinite(curves).all(axis=0)
        orders = [order for order, usable in zip(near, known, strict=True) if usable]
        lacking = np.maximum.accumulate(curves[:, known].max(axis=0) - curves[0, known])
        prices = [self._at(kind, orders[: k + 1], delta, float(extra))[0] for k, extra in enumerate(lacking)]
        return min(prices, default=math.inf)

    def _at(
        self, kind: tuple[Release, ...], orders: Sequence[float], delta: float, surcharge: float = 0.0
    ) -> tuple[float, float]:
        converging = np.isfinite(divergences(kind, orders))
        if not converging.any():
            return math.inf, orders[0]
        # dp-accounting, which it uses, is slow to import.
        from clipless.accounting.selection.repeat_and_select import epsilon_and_order

        return epsilon_and_order(kind, surcharge, self.repetitions, np.compress(converging, orders), delta)

    def run_budget(self, run: Run, delta: float, accountant: str = "pld") -> tuple[float, float]:
        return accountant_named(guarantee(accountant)).epsilon(run, delta), delta

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        """0 runs are possible with shape infinity."""
        return tuple(rng.randrange(self.candidates) for _ in range(self.repetitions.draw(rng)))

    def to_dict(self) -> dict[str, object]:
        return {"candidates": self.candidates, "mean": self.mean, "shape": self.shape}

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> "PapernotSteinke":
        candidates, mean, shape = fields_of(record, "candidates", "mean", "shape")
        return cls(whole("candidates", candidates), arguments.real("mean", mean), arguments.real("shape", shape))


def _near(order: float, ratio: float = 1.0) -> list[float]:
    """This order, those of the coarse list around it, and finer ones up to `ratio` below and above it."""
    low, high = (1 + (order - 1) * factor for factor in WINDOW)
    finer = (1 + (order - 1) * ratio ** (k / 4) for k in range(-4, 5))
    exact = {near if near < SMALL_ORDERS[-1] else float(round(near)) for near in finer if near > SMALL_ORDERS[0]}
    return sorted(exact | {order} | {near for near in ORDERS if low <= near <= high})


def divergences(kind: tuple[Release, ...], orders: Sequence[float]) -> NDArray[np.float64]:
    """The Rényi divergence of one run at each order; infinite where its series does not converge."""
    if any(release.projections for release in kind):  # the sensitivity has no bound
        return np.full(len(orders), math.inf)
    totals = [sum(n * (divergence(q, z, order) + ROUNDING) for q, z, n, *_ in kind) for order in orders]
    return np.nan_to_num(np.array(totals, dtype=np.float64), nan=math.inf)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings of dp-accounting's accountant about orders that it leaves out."""

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.removeFilter(keep)

"""Every released number of small private runs, computed by hand: each step's gradient is the sum of the clipped per-record
gradients, plus the source's normal numbers times a standard deviation from the formulas, at the thresholds before the step,
over the expected batch; each statistic, which is not divided, and the thresholds that follow from it, likewise.

Nothing here comes from the engine, the plan or the policies but what they release.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from reference import dc_e_step, dc_p_step, histogram, quantile_step
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import clipless
from clipless.clipping import CLIPPINGS, Clipping
from clipless.gradients import kernels
from noising import assert_on_grid, seeded_normals

SIGMA, RECORDS, BATCH, STEPS, SEED = 1.2, 120, 30, 8, 3
# The groups of the model below, and how many numbers are in each.
GROUPS = {
    "flat": [["0.weight", "0.bias", "2.weight", "2.bias"]],
    "per-layer": [["0.weight", "0.bias"], ["2.weight", "2.bias"]],
}
SIZES = {"0.weight": 40, "0.bias": 8, "2.weight": 24, "2.bias": 3}

Rule = Callable[[float, float], float]


def abadi(norm: float, bound: float) -> float:
    return min(1.0, bound / norm)


def auto_v(norm: float, bound: float) -> float:
    return bound / norm


def auto_s(gamma: float = 0.01) -> Rule:
    return lambda norm, bound: bound / (norm + gamma)


def global_(ratio: float = 1.0) -> Rule:
    return lambda norm, bound: 1 / ratio if norm <= ratio * bound else 0.0


def float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


@dataclass
class ByHand:
    """Thresholds that stay: one is shared out over the groups."""

    start: float | list[float] = 1.0
    groups: int = 1
    dimensions: list[int] = field(default_factory=list)
    sigma: float = SIGMA
    step: int = 0

    def begin(self, groups: int, dimensions: list[int]) -> None:
        """`dimensions`: the numbers whose noise each group's threshold adds to."""
        self.groups, self.dimensions = groups, dimensions
        shared = [self.start / math.sqrt(groups)] * groups if isinstance(self.start, float) else self.start
        self.thresholds = [float32(bound) for bound in shared]

    def statistic_multiplier(self) -> float | None:
        return None

    def step_multiplier(self) -> float:
        """Of the step now, gradient and statistic together."""
        return self.sigma

    def gradient_multiplier(self) -> float:
        statistic = self.statistic_multiplier()
        return (self.step_multiplier() ** -2 - (0 if statistic is None else statistic**-2)) ** -0.5

    def truth(self, norms: list[list[float]]) -> list[list[float]]:
        """The statistic before noise, scaled such that one record moves its length by 1."""
        raise AssertionError

    def update(self, noised: list[list[float]]) -> None:
        self.step += 1

    def statistic_name(self) -> str:
        return "statistic"


@dataclass
class Decay(ByHand):
    rho: float = 0.5
    noise_rho: float = 1.0
    steps: int = STEPS

    def begin(self, groups: int, dimensions: list[int]) -> None:
        super().begin(groups, dimensions)
        self.first = list(self.thresholds)

    def step_multiplier(self) -> float:
        """32 stairs at most, each with the multiplier of its middle step."""
        stairs = min(self.steps, 32)
        edges = [self.steps * stair // stairs for stair in range(stairs + 1)]
        stair = max(k for k in range(stairs) if edges[k] <= self.step)
        middle = (edges[stair] + edges[stair + 1] - 1) / 2
        return self.sigma * self.noise_rho ** (middle / self.steps)

    def update(self, noised: list[list[float]]) -> None:
        super().update(noised)
        self.thresholds = [float32(first * self.rho ** (self.step / self.steps)) for first in self.first]


@dataclass
class Quantile(ByHand):
    percentile: float = 0.5
    rate: float = 0.2
    count_stddev: float | None = None

    def statistic_multiplier(self) -> float:
        sensitivity = math.sqrt(self.groups) / 2
        if self.count_stddev is not None:
            return self.count_stddev / sensitivity
        return max(BATCH / 20 / sensitivity, 2 * self.sigma)

    def truth(self, norms: list[list[float]]) -> list[list[float]]:
        counts = [sum(0.5 if n <= c else -0.5 for n in row) for row, c in zip(norms, self.thresholds, strict=True)]
        return [[count / (math.sqrt(self.groups) / 2)] for count in counts]

    def update(self, noised: list[list[float]]) -> None:
        super().update(noised)
        counts = [row[0] * math.sqrt(self.groups) / 2 for row in noised]
        self.thresholds = [
            float32(quantile_step(c, count, BATCH, self.percentile, self.rate))
            for c, count in zip(self.thresholds, counts, strict=True)
        ]


@dataclass
class Binned(ByHand):
    bins: int = 20
    histogram_multiplier: float = 5.0
    first_range: float = 1.0

    def begin(self, groups: int, dimensions: list[int]) -> None:
        super().begin(groups, dimensions)
        self.widths = [c * self.first_range for c in self.thresholds]

    def statistic_multiplier(self) -> float:
        return self.histogram_multiplier

    def truth(self, norms: list[list[float]]) -> list[list[float]]:
        rows = [histogram(row, self.bins, width) for row, width in zip(norms, self.widths, strict=True)]
        return [[count / math.sqrt(self.groups) for count in row] for row in rows]

    def update(self, noised: list[list[float]]) -> None:
        super().update(noised)
        for g, row in enumerate(noised):
            counts = [count * math.sqrt(self.groups) for count in row]
            threshold, self.widths[g] = self.next(self.thresholds[g], self.widths[g], counts, self.dimensions[g])
            self.thresholds[g] = float32(threshold)

    def next(self, threshold: float, width: float, counts: list[float], dimension: int) -> tuple[float, float]:
        raise AssertionError


@dataclass
class DCP(Binned):
    percentile: float = 0.5

    def next(self, threshold: float, width: float, counts: list[float], dimension: int) -> tuple[float, float]:
        return dc_p_step(threshold, width, counts, self.percentile)


@dataclass
class DCE(Binned):
    first_range: float = 20.0

    def next(self, threshold: float, width: float, counts: list[float], dimension: int) -> tuple[float, float]:
        return dc_e_step(threshold, width, counts, self.gradient_multiplier(), dimension, BATCH)


@dataclass
class ByGroup(ByHand):
    """Keep or drop, with a ratio of cutoff to threshold for each group."""

    ratios: list[float] = field(default_factory=list)


@dataclass
class Phases(ByHand):
    """One policy after the other, each with a rule and a number of steps. A policy of None goes on with the one before."""

    parts: list[tuple[int, Rule, ByHand | None]] = field(default_factory=list)

    def begin(self, groups: int, dimensions: list[int]) -> None:
        self.groups, self.dimensions = groups, dimensions
        self.ends = [sum(count for count, _, _ in self.parts[: k + 1]) for k in range(len(self.parts))]
        self.phase, self.current = 0, self._policy(0)
        self.current.begin(groups, dimensions)
        self.thresholds = self.current.thresholds

    def _policy(self, phase: int) -> ByHand:
        return next(policy for _, _, policy in reversed(self.parts[: phase + 1]) if policy is not None)

    def rule(self, norm: float, bound: float) -> float:
        return self.parts[self.phase][1](norm, bound)

    def statistic_multiplier(self) -> float | None:
        return self.current.statistic_multiplier()

    def step_multiplier(self) -> float:
        return self.current.step_multiplier()

    def truth(self, norms: list[list[float]]) -> list[list[float]]:
        return self.current.truth(norms)

    def update(self, noised: list[list[float]]) -> None:
        super().update(noised)
        self.current.update(noised)
        if self.step in self.ends[:-1]:
            self.phase += 1
            if self.parts[self.phase][2] is not None:
                self.current = self._policy(self.phase)
                self.current.begin(self.groups, self.dimensions)
        self.thresholds = self.current.thresholds

    def statistic_name(self) -> str:
        return f"statistic (phase {self.phase + 1})"


@dataclass(frozen=True)
class Case:
    """A clipping for given groups and allocation, and the same by hand."""

    make: Callable[..., Clipping]
    rule: Rule
    policy: Callable[[], ByHand]
    steps: int = STEPS


CASES = {
    "auto-s": Case(CLIPPINGS["auto-s"], auto_s(), ByHand),
    "auto-v": Case(CLIPPINGS["auto-v"], auto_v, ByHand),
    "abadi": Case(CLIPPINGS["abadi"], abadi, ByHand),
    "global": Case(CLIPPINGS["global"], global_(), ByHand),
    "dc-p": Case(CLIPPINGS["dc-p"], abadi, DCP),
    "dc-e": Case(CLIPPINGS["dc-e"], abadi, DCE),
    "quantile": Case(CLIPPINGS["quantile"], abadi, Quantile),
    "decay": Case(CLIPPINGS["decay"], abadi, Decay),
    "auto-s-wide": Case(
        lambda **how: clipless.auto_s(gamma=0.5, threshold=2.0, **how), auto_s(0.5), lambda: ByHand(2.0)
    ),
    "global-scaled": Case(
        lambda **how: clipless.global_(cutoff=6.0, threshold=1.5, **how), global_(4.0), lambda: ByHand(1.5)
    ),
    "decay-noise": Case(
        lambda **how: clipless.decay(2.0, 0.3, 0.25, **how), abadi, lambda: Decay(2.0, rho=0.3, noise_rho=0.25)
    ),
    "decay-stairs": Case(
        lambda **how: clipless.decay(1.0, 0.5, 0.1, rule="auto-v", **how),
        auto_v,
        lambda: Decay(noise_rho=0.1, steps=40),
        steps=40,
    ),
    "dc-p-auto-s": Case(
        lambda **how: clipless.dc_p(0.3, 7, 2.0, 3.0, rule="auto-s", **how),
        auto_s(),
        lambda: DCP(2.0, bins=7, histogram_multiplier=3.0, percentile=0.3),
    ),
    "dc-e-auto-v": Case(
        lambda **how: clipless.dc_e(12, 0.5, 2.5, rule="auto-v", **how),
        auto_v,
        lambda: DCE(0.5, bins=12, histogram_multiplier=2.5, first_range=12.0),
    ),
    "quantile-global": Case(
        lambda **how: clipless.quantile(0.7, 0.5, 3.0, 4.0, rule="global", **how),
        global_(),
        lambda: Quantile(3.0, percentile=0.7, rate=0.5, count_stddev=4.0),
    ),
}
CASES |= {
    "schedule": Case(
        lambda **how: clipless.schedule(
            [(0.625, clipless.abadi(**how)), (0.375, clipless.global_(cutoff=6.0, threshold=1.5, **how))]
        ),
        abadi,
        lambda: Phases(parts=[(5, abadi, ByHand()), (3, global_(4.0), ByHand(1.5))]),
    ),
    "schedule-of-policies": Case(
        lambda **how: clipless.schedule(
            [
                (0.25, clipless.dc_e(12, 0.5, 2.5, **how)),
                (0.25, clipless.dc_e(12, 0.5, 2.5, rule="auto-v", **how)),
                (0.25, clipless.decay(2.0, 0.3, 0.25, **how)),
                (0.25, clipless.dc_p(0.3, 7, 2.0, 3.0, rule="auto-s", **how)),
            ]
        ),
        abadi,
        lambda: Phases(
            parts=[
                (2, abadi, DCE(0.5, bins=12, histogram_multiplier=2.5, first_range=12.0)),
                (2, auto_v, None),
                (2, abadi, Decay(2.0, rho=0.3, noise_rho=0.25, steps=2)),
                (2, auto_s(), DCP(2.0, bins=7, histogram_multiplier=3.0, percentile=0.3)),
            ]
        ),
    ),
}
DIVIDED = {
    "global-cutoffs": Case(
        lambda **how: clipless.global_(cutoff=[6.0, 1.0], threshold=[1.5, 2.0], **how),
        abadi,
        lambda: ByGroup([1.5, 2.0], ratios=[4.0, 0.5]),
    ),
    "global-cutoffs-alone": Case(
        lambda **how: clipless.global_(cutoff=[6.0, 1.0], **how), abadi, lambda: ByGroup([6.0, 1.0], ratios=[1.0, 1.0])
    ),
    "abadi-unequal": Case(lambda **how: clipless.abadi(threshold=[0.5, 2.0], **how), abadi, lambda: ByHand([0.5, 2.0])),
    "auto-s-unequal": Case(
        lambda **how: clipless.auto_s(threshold=[3.0, 0.2], **how), auto_s(), lambda: ByHand([3.0, 0.2])
    ),
}


def test_every_clipping_has_a_case() -> None:
    assert CASES.keys() >= CLIPPINGS.keys()


@pytest.mark.parametrize(("allocation", "part"), [("uniform", None), ("equal-budget", 11)])
@pytest.mark.parametrize("name", CASES)
def test_each_release_of_a_flat_run(name: str, allocation: str, part: int | None) -> None:
    compare(CASES[name], "flat", allocation, part)


@pytest.mark.parametrize(("allocation", "part"), [("uniform", None), ("equal-budget", 11)])
@pytest.mark.parametrize("name", [*CASES, *DIVIDED])
def test_each_release_of_a_run_per_layer(name: str, allocation: str, part: int | None) -> None:
    compare({**CASES, **DIVIDED}[name], "per-layer", allocation, part)


@pytest.mark.parametrize("name", DIVIDED)
def test_each_release_where_groups_are_clipped_one_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model whose layers do not fit into the cache together: each has its own threshold all the same."""
    monkeypatch.setattr(kernels, "CHUNK_BYTES", -1)
    compare(DIVIDED[name], "per-layer", "uniform", None)


def compare(case: Case, groups: str, allocation: str, part: int | None) -> None:
    """Train, and compare each step."""
    members, hand = GROUPS[groups], case.policy()
    sizes, everything = [sum(SIZES[name] for name in names) for names in members], sum(SIZES.values())
    uniform = allocation == "uniform"
    hand.begin(len(members), [everything if uniform else len(members) * size for size in sizes])
    model, private, optimizer = private_run(case.make(groups=groups, allocation=allocation), case.steps)
    for step, parts in enumerate(private.loader.microbatches(part or RECORDS)):
        torch.testing.assert_close(private.thresholds.flatten(), torch.tensor(hand.thresholds), rtol=1e-5, atol=0)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        records = []
        for x, y in parts:
            records.append((x, y))
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        x, y = (torch.cat(column) for column in zip(*records, strict=True))
        rule = hand.rule if isinstance(hand, Phases) else case.rule
        rules = [global_(ratio) for ratio in hand.ratios] if isinstance(hand, ByGroup) else [rule] * len(members)
        norms, sums = clipped(weights, x, y, members, rules, hand.thresholds)
        stddevs = by_hand(hand.gradient_multiplier(), hand.thresholds, uniform)
        normals = dict(zip(weights, seeded_normals(SEED, "gradient", step, weights.values()), strict=True))
        for names, stddev in zip(members, stddevs, strict=True):
            for name in names:
                expected = sums[name] + stddev * normals[name]
                released = dict(model.named_parameters())[name].grad
                assert released is not None
                error = 2e-5 * (stddev + float(expected.abs().max()))
                assert_on_grid(released, expected, stddev, error, divisor=BATCH)
        multiplier, noised = hand.statistic_multiplier(), []
        if multiplier is not None:
            truth = torch.tensor(hand.truth(norms), dtype=torch.float64)
            (noise,) = seeded_normals(SEED, "statistic", step, [truth])
            released = private.history[hand.statistic_name()][step]
            assert_on_grid(released, truth + multiplier * noise, multiplier, 1e-5 + 1e-5 * float(truth.abs().max()))
            noised = released.tolist()
        hand.update(noised)
        optimizer.zero_grad()
    assert hand.step == private.ledger.steps == case.steps
    torch.testing.assert_close(private.thresholds.flatten(), torch.tensor(hand.thresholds), rtol=1e-5, atol=0)
    private.detach()


def private_run(clipping: Clipping, steps: int) -> tuple[nn.Module, clipless.Private, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(RECORDS, 5) * 4, torch.randint(3, (RECORDS,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = clipless.make_private(
        model,
        optimizer,
        data,
        batch_size=BATCH,
        steps=steps,
        clipping=clipping,
        seed=SEED,
        delta=1e-5,
        noise_multiplier=SIGMA,
        accountant="rdp",
        loss_reduction="mean",
    )
    return model, private, optimizer


def by_hand(multiplier: float, thresholds: Sequence[float], uniform: bool) -> list[float]:
    """The noise of each group: z·‖(R_1..R_G)‖ on all, or z·√G·R_g."""
    length = math.sqrt(sum(bound**2 for bound in thresholds))
    multiplier *= 1 + 2.0**-9  # the reserve for rounding
    return [multiplier * (length if uniform else math.sqrt(len(thresholds)) * bound) for bound in thresholds]


def clipped(
    weights: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    members: list[list[str]],
    rules: list[Rule],
    thresholds: list[float],
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Each group's norms, and the sum of the clipped gradients, from per-record gradients in float64."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (x.unsqueeze(0),)), y.unsqueeze(0))

    wide = {name: value.double() for name, value in weights.items()}
    grads = vmap(grad(loss), (None, 0, 0))(wide, x.double(), y) if len(x) else {}
    sums = {name: torch.zeros_like(value) for name, value in wide.items()}
    norms: list[list[float]] = [[] for _ in members]
    for g, names in enumerate(members if grads else []):
        norms[g] = torch.stack([grads[name].flatten(1).square().sum(1) for name in names]).sum(0).sqrt().tolist()
        factors = torch.tensor([rules[g](norm, thresholds[g]) for norm in norms[g]], dtype=torch.float64)
        sums |= {name: torch.tensordot(factors, grads[name], 1) for name in names}
    return norms, sums

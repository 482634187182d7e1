"""Clipping rules: how much of each record's gradient enters the sum, from its norm and a threshold.

A rule maps norms [G,B] and thresholds [G,1] to factors [G,B] and keeps one promise: `factor * norm <= threshold`, and a
norm that is not finite gets factor 0. So every rule has the same sensitivity and the same privacy cost.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipless import defaults
from clipless.arguments import named, positive, unknown_name
from clipless.errors import InvalidArgument, InvalidType
from clipless.thresholds import DCE, DCP, Constant, Decay, Quantile, Setting, ThresholdPolicy

Rule = Callable[[Tensor, Tensor], Tensor]
Groups = str | Sequence[Sequence[str]]


@dataclass(frozen=True)
class Abadi:
    """Scale down to the threshold, leave smaller gradients alone. Guarantee: factor * norm <= threshold."""

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        norms, usable = _usable(norms)
        return torch.where(usable, (thresholds / norms).clamp(max=1.0), 0.0)


@dataclass(frozen=True)
class AutoV:
    """Scale every gradient to the threshold; a zero gradient stays zero. Guarantee: factor * norm <= threshold."""

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        norms, usable = _usable(norms)
        factors = thresholds / norms
        return torch.where(usable & factors.isfinite(), factors, 0.0)


@dataclass(frozen=True)
class AutoS:
    """Scale by threshold / (norm + gamma), which keeps the order of norms. Guarantee: factor * norm < threshold."""

    gamma: float = defaults.GAMMA

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        factors = thresholds / (_at_least_float32(norms) + self.gamma)  # 0 for an infinite norm
        return factors.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Global:
    """Keep or drop: factor 1/ratio up to the cutoff `ratio * threshold`, else 0. Guarantee: factor * norm <= threshold."""

    ratio: float = 1.0

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        norms = _at_least_float32(norms)
        factors = torch.full_like(norms, 1.0 / self.ratio)
        return torch.where((norms <= self.ratio * thresholds) & factors.isfinite(), factors, 0.0)


@dataclass(frozen=True)
class ByGroup:
    """A rule for each group. Guarantee: that of the rules."""

    rules: tuple[Rule, ...]

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        return self.of(range(len(norms)), norms, thresholds)

    def of(self, groups: Sequence[int], norms: Tensor, thresholds: Tensor) -> Tensor:
        """Factors for some of the groups, whose norms and thresholds these are."""
        rows = [self.rules[g](norms[k : k + 1], thresholds[k : k + 1]) for k, g in enumerate(groups)]
        return torch.cat(rows)


def _at_least_float32(norms: Tensor) -> Tensor:
    """The norms in a type in which a factor is not rounded up to more than the threshold allows, as it is in bfloat16."""
    return norms if norms.dtype is torch.float32 else norms.to(torch.promote_types(norms.dtype, torch.float32))


def _usable(norms: Tensor) -> tuple[Tensor, Tensor]:
    """The norms in at least float32, and a mask of those to divide by."""
    norms = _at_least_float32(norms)
    return norms, norms.isfinite() & (norms > 0)


@functools.cache
def least_norm(dtype: torch.dtype) -> float:
    """The least norm that counts; a record with a smaller one adds nothing, whatever the rule. Squares of smaller norms lose
    digits to underflow, and an underestimated norm would give too large a factor."""
    return 1e4 * torch.finfo(dtype).tiny ** 0.5


@dataclass(frozen=True)
class Clipping:
    """How each record's gradient is bounded: a rule, a policy that sets its thresholds, and a partition of the parameters.

    `allocation` says how the noise is divided over the groups: "uniform", the same standard deviation for every
    coordinate, or "equal-budget", in proportion to each group's threshold.
    """

    name: str
    rule: Rule
    policy: ThresholdPolicy
    groups: Groups = "flat"
    allocation: str = "uniform"

    def factors(self, norms: Tensor, thresholds: Tensor, groups: Sequence[int]) -> Tensor:
        """How much of each record enters the sums of these groups, [g,b], from their norms [g,b] and thresholds [g,1]."""
        if isinstance(self.rule, ByGroup):
            return self.rule.of(groups, norms, thresholds)
        return self.rule(norms, thresholds)

    def start(self, groups: int) -> Tensor:
        """The thresholds of the first step, [G,1]. Raises if the rule or the policy is made for another number of groups."""
        if isinstance(self.rule, ByGroup) and len(self.rule.rules) != groups:
            raise InvalidArgument(
                f"{len(self.rule.rules)} cutoffs for {groups} groups: give one for each group, or a single number, which is "
                "shared out over the groups."
            )
        return self.policy.thresholds(self.policy.init(Setting(groups)))


def abadi(
    threshold: float | Sequence[float] = defaults.THRESHOLD, groups: Groups = "flat", allocation: str = "uniform"
) -> Clipping:
    """Classic DP-SGD clipping, min(1, R/norm). A single threshold is divided as R/√G over G groups.

    >>> abadi().rule(torch.tensor([[0.5, 4.0]]), torch.tensor([[2.0]]))
    tensor([[1.0000, 0.5000]])
    """
    return Clipping("abadi", Abadi(), Constant(threshold), groups, allocation)


def auto_v(
    threshold: float | Sequence[float] = defaults.THRESHOLD, groups: Groups = "flat", allocation: str = "uniform"
) -> Clipping:
    """Automatic clipping without a stability constant, R/norm."""
    return Clipping("auto-v", AutoV(), Constant(threshold), groups, allocation)


def auto_s(
    gamma: float = defaults.GAMMA,
    threshold: float | Sequence[float] = defaults.THRESHOLD,
    groups: Groups = "flat",
    allocation: str = "uniform",
) -> Clipping:
    """Automatic clipping, R/(norm + gamma): the default of the library, nothing to tune.

    >>> auto_s().rule(torch.tensor([[0.0, 0.99]]), torch.tensor([[1.0]]))
    tensor([[100.,   1.]])
    """
    return Clipping("auto-s", AutoS(positive("gamma", gamma)), Constant(threshold), groups, allocation)


def global_(
    cutoff: float | Sequence[float] = defaults.THRESHOLD,
    threshold: float | Sequence[float] | None = None,
    groups: Groups = "flat",
    allocation: str = "uniform",
) -> Clipping:
    """Keep a gradient whose norm is at most the cutoff Z, scaled by R/Z, and drop the rest. Without a threshold R = Z.

    Cutoff and threshold are each one number, divided over the groups, or a list of one number for each group.

    >>> global_(cutoff=[6.0, 2.0], threshold=[1.5, 2.0]).rule
    ByGroup(rules=(Global(ratio=4.0), Global(ratio=1.0)))
    """
    bound = cutoff if threshold is None else threshold
    counts = {len(given) for given in (cutoff, bound) if isinstance(given, (list, tuple))}
    if len(counts) > 1:
        raise InvalidArgument(
            f"{len(cutoff)} cutoffs and {len(bound)} thresholds: give one of each for every group, or a single number, "  # type: ignore[arg-type]
            "which is shared out over the groups."
        )
    if not counts:
        ratio = positive("cutoff", cutoff) / positive("threshold", bound)
        return Clipping("global", Global(ratio), Constant(bound), groups, allocation)
    cutoffs = _each("cutoff", cutoff, *counts)
    bounds = cutoffs if threshold is None else _each("threshold", threshold, *counts)
    rule = ByGroup(tuple(Global(z / r) for z, r in zip(cutoffs, bounds, strict=True)))
    return Clipping("global", rule, Constant(bounds), groups, allocation)


def _each(name: str, given: float | Sequence[float], groups: int) -> tuple[float, ...]:
    """One number for each group; a single one is divided by √G."""
    if isinstance(given, (list, tuple)):
        return tuple(positive(name, value) for value in given)
    return (positive(name, given) / groups**0.5,) * groups


def dc_p(
    percentile: float = defaults.PERCENTILE,
    bins: int = defaults.BINS,
    start: float = defaults.THRESHOLD,
    histogram_multiplier: float | None = None,
    rule: str | Rule | Clipping = "abadi",
    groups: Groups = "flat",
    allocation: str = "uniform",
) -> Clipping:
    """DC-SGD-P: the threshold is a percentile of the norms, from a private histogram that is paid for in each step.

    The percentile matters: at the default of 0.5 the threshold follows the median down once the model knows most records,
    which cost 4 points on MNIST and 8 on Adult (docs/clipping.md). "dc-e" has nothing to choose.

    The histogram has `bins` bins and noise of `histogram_multiplier`; None chooses it by the step's (docs/clipping.md).
    `start` is the first threshold: too low costs little, far too high ruins the model."""
    policy = DCP(bins, start, histogram_multiplier, percentile)
    return Clipping("dc-p", as_rule(rule), policy, groups, allocation)


def dc_e(
    bins: int = defaults.BINS,
    start: float = defaults.THRESHOLD,
    histogram_multiplier: float | None = None,
    rule: str | Rule | Clipping = "abadi",
    groups: Groups = "flat",
    allocation: str = "uniform",
) -> Clipping:
    """DC-SGD-E: the threshold of least expected error, from a private histogram. Nothing to set; the arguments are those of
    `dc_p`."""
    return Clipping("dc-e", as_rule(rule), DCE(bins, start, histogram_multiplier), groups, allocation)


def quantile(
    percentile: float = defaults.PERCENTILE,
    rate: float = defaults.QUANTILE_RATE,
    start: float = defaults.THRESHOLD,
    count_stddev: float | None = None,
    rule: str | Rule | Clipping = "abadi",
    groups: Groups = "flat",
    allocation: str = "uniform",
) -> Clipping:
    """Andrew et al.: the threshold follows a quantile of the norms in small steps, larger ones with a larger `rate`. Each
    step releases how many are below it, with noise of `count_stddev`; None is a twentieth of the expected batch or more."""
    return Clipping("quantile", as_rule(rule), Quantile(percentile, rate, start, count_stddev), groups, allocation)


def decay(
    start: float = defaults.THRESHOLD,
    rho: float = defaults.DECAY_RHO,
    noise_rho: float = defaults.NOISE_RHO,
    rule: str | Rule | Clipping = "abadi",
    groups: Groups = "flat",
    allocation: str = "uniform",
) -> Clipping:
    """Du et al.: by the end of the run the threshold shrinks to `rho` times `start`, and the noise multiplier to `noise_rho`
    times that of the first step. Nothing is released for it."""
    return Clipping("decay", as_rule(rule), Decay(start, rho, noise_rho), groups, allocation)


CLIPPINGS: Mapping[str, Callable[[], Clipping]] = {
    "auto-s": auto_s,
    "auto-v": auto_v,
    "abadi": abadi,
    "global": global_,
    "dc-p": dc_p,
    "dc-e": dc_e,
    "quantile": quantile,
    "decay": decay,
}

RULES: Mapping[str, Rule] = {"abadi": Abadi(), "auto-v": AutoV(), "auto-s": AutoS(), "global": Global()}


def as_rule(rule: "str | Rule | Clipping") -> Rule:
    """The rule that a name stands for, that of another clipping, or the rule itself.

    >>> as_rule("auto-s") == as_rule(auto_s()) == AutoS()
    True
    """
    if isinstance(rule, Clipping):
        return rule.rule
    if callable(rule):
        return rule
    return named("rule", rule, RULES)


def as_clipping(clipping: str | Clipping) -> Clipping:
    """The clipping that a name stands for, or the object itself.

    >>> as_clipping("abadi").rule
    Abadi()
    """
    if isinstance(clipping, Clipping):
        if clipping.allocation not in ("uniform", "equal-budget"):
            raise unknown_name("allocation", clipping.allocation, ["uniform", "equal-budget"])
        return clipping
    if not isinstance(clipping, str):
        raise InvalidType(
            f"clipping must be a name such as 'auto-s' or an object such as clipless.auto_s(), got {clipping!r}. Of "
            "a schedule give one phase."
        )
    return named("clipping", clipping, CLIPPINGS)()

"""Clipping rules: how much of each record's gradient enters the sum, from its norm and a threshold.

A rule maps norms [G,B] and thresholds [G,1] to factors [G,B] and keeps one promise: `factor * norm <= threshold`, and a
norm that is not finite gets factor 0. So every rule has the same sensitivity and the same privacy cost.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipless.errors import InvalidType, named, unknown_name
from clipless.thresholds import DCE, DCP, Constant, Decay, Quantile, Setting, ThresholdPolicy, positive

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

    gamma: float = 0.01

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        norms, _ = _usable(norms)
        factors = thresholds / (norms + self.gamma)
        return torch.where(norms.isfinite() & factors.isfinite(), factors, 0.0)


@dataclass(frozen=True)
class Global:
    """Keep or drop: factor 1/ratio up to the cutoff `ratio * threshold`, else 0. Guarantee: factor * norm <= threshold."""

    ratio: float = 1.0

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        norms, _ = _usable(norms)
        factors = torch.full_like(norms, 1.0 / self.ratio)
        return torch.where((norms <= self.ratio * thresholds) & factors.isfinite(), factors, 0.0)


def _usable(norms: Tensor) -> tuple[Tensor, Tensor]:
    """The norms in at least float32, so that a factor is not rounded up in bfloat16, and which can be divided by."""
    norms = norms.to(torch.promote_types(norms.dtype, torch.float32))
    return norms, norms.isfinite() & (norms > 0)


def least_norm(dtype: torch.dtype) -> float:
    """The least norm that counts. The squares of smaller ones lose digits to underflow, and a norm taken for too small would
    give too large a factor: such a record adds nothing, whatever the rule."""
    return 1e4 * torch.finfo(dtype).tiny ** 0.5


@dataclass(frozen=True)
class Clipping:
    """A way to bound each record's share: a rule, a policy that sets its thresholds, and a partition of the parameters.

    `allocation` says how the noise is divided over the groups: "uniform", the same standard deviation for every
    coordinate, or "equal-budget", in proportion to each group's threshold.
    """

    name: str
    rule: Rule
    policy: ThresholdPolicy
    groups: Groups = "flat"
    allocation: str = "uniform"

    def start(self, groups: int) -> Tensor:
        """The thresholds of the first step, [G,1]."""
        return self.policy.thresholds(self.policy.init(Setting(groups)))


def abadi(threshold: float | Sequence[float] = 1.0, groups: Groups = "flat", allocation: str = "uniform") -> Clipping:
    """Classic DP-SGD clipping, min(1, R/norm). A single threshold is shared out as R/√G over G groups."""
    return Clipping("abadi", Abadi(), Constant(threshold), groups, allocation)


def auto_v(threshold: float | Sequence[float] = 1.0, groups: Groups = "flat", allocation: str = "uniform") -> Clipping:
    """Automatic clipping without stability constant, R/norm."""
    return Clipping("auto-v", AutoV(), Constant(threshold), groups, allocation)


def auto_s(
    gamma: float = 0.01,
    threshold: float | Sequence[float] = 1.0,
    groups: Groups = "flat",
    allocation: str = "uniform",
) -> Clipping:
    """Automatic clipping, R/(norm + gamma): the default of the library, nothing to tune.

    >>> auto_s().rule(torch.tensor([[0.0, 0.99]]), torch.tensor([[1.0]]))
    tensor([[100.,   1.]])
    """
    return Clipping("auto-s", AutoS(positive("gamma", gamma)), Constant(threshold), groups, allocation)


def global_(
    cutoff: float = 1.0, threshold: float | None = None, groups: Groups = "flat", allocation: str = "uniform"
) -> Clipping:
    """Keep a gradient whose norm is at most the cutoff Z, scaled by R/Z, and drop the rest. Without a threshold R = Z."""
    bound = positive("cutoff", cutoff) if threshold is None else positive("threshold", threshold)
    return Clipping("global", Global(positive("cutoff", cutoff) / bound), Constant(bound), groups, allocation)


def dc_p(
    percentile: float = 0.5,
    bins: int = 20,
    start: float = 1.0,
    histogram_multiplier: float | None = None,
    rule: str | Rule | Clipping = "abadi",
    groups: Groups = "flat",
    allocation: str = "uniform",
) -> Clipping:
    """DC-SGD-P: the threshold is a percentile of the norms, from a private histogram that is paid for in each step."""
    policy = DCP(bins, start, histogram_multiplier, percentile)
    return Clipping("dc-p", as_rule(rule), policy, groups, allocation)


def dc_e(
    bins: int = 20,
    start: float = 1.0,
    histogram_multiplier: float | None = None,
    rule: str | Rule | Clipping = "abadi",
    groups: Groups = "flat",
    allocation: str = "uniform",
) -> Clipping:
    """DC-SGD-E: the threshold of least expected error, from a private histogram. Nothing to set."""
    return Clipping("dc-e", as_rule(rule), DCE(bins, start, histogram_multiplier), groups, allocation)


def quantile(
    percentile: float = 0.5,
    rate: float = 0.2,
    start: float = 1.0,
    count_stddev: float | None = None,
    rule: str | Rule | Clipping = "abadi",
    groups: Groups = "flat",
    allocation: str = "uniform",
) -> Clipping:
    """Andrew et al.: the threshold follows a quantile of the norms by small steps."""
    return Clipping("quantile", as_rule(rule), Quantile(percentile, rate, start, count_stddev), groups, allocation)


def decay(
    start: float = 1.0,
    rho: float = 0.5,
    noise_rho: float = 1.0,
    rule: str | Rule | Clipping = "abadi",
    groups: Groups = "flat",
    allocation: str = "uniform",
) -> Clipping:
    """Du et al.: threshold and, with `noise_rho` below 1, noise multiplier shrink by a fixed schedule."""
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
            f"clipping must be a name such as 'auto-s' or an object such as clipless.auto_s(), got {clipping!r}."
        )
    return named("clipping", clipping, CLIPPINGS)()

"""Clipping rules: how much of each record's gradient enters the sum, from its norm and a threshold.

A rule maps norms [G,B] and thresholds [G,1] to factors [G,B] and keeps one promise: `factor * norm <= threshold`, and a
norm that is not finite gets factor 0. So every rule has the same sensitivity and the same privacy cost. The rules below keep
it as exact products of floating-point numbers, and any other rule is held to it in every step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from clipless import defaults
from clipless.arguments import named, positive, unknown_name
from clipless.errors import InvalidArgument, InvalidType
from clipless.thresholds import DCE, DCP, Constant, Decay, Quantile, Setting, ThresholdPolicy

Rule = Callable[[Tensor, Tensor], Tensor]
Groups = str | Sequence[Sequence[str]]

# Every factor is lowered by four units of float32's rounding error, 2^-24. A threshold, a quotient, a factor and its product
# with a gradient are rounded once each, perhaps upwards: together they stay below the threshold.
LOWERED = 1 - 2.0**-22
# A factor of another rule may be too large by so much, relative to the largest one allowed, which is then taken: rounding.
TOLERATED = 1e-5


@dataclass(frozen=True)
class Abadi:
    """Scale down to the threshold, leave smaller gradients alone. Guarantee: factor * norm <= threshold."""

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        norms, usable = _usable(norms)
        return torch.where(usable, _lowered(thresholds / norms).masked_fill_(norms <= thresholds, 1.0), 0.0)


@dataclass(frozen=True)
class AutoV:
    """Scale every gradient to the threshold; a zero gradient stays zero. Guarantee: factor * norm <= threshold."""

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        norms, usable = _usable(norms)
        factors = _lowered(thresholds / norms)
        return torch.where(usable & factors.isfinite(), factors, 0.0)


@dataclass(frozen=True)
class AutoS:
    """Scale by threshold / (norm + gamma), which keeps the order of norms. Guarantee: factor * norm < threshold."""

    gamma: float = defaults.GAMMA

    def __post_init__(self) -> None:
        positive("gamma", self.gamma)

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        factors = _lowered(thresholds / (_at_least_float32(norms) + self.gamma))  # 0 for an infinite norm
        return factors.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Global:
    """Keep or drop: factor 1/ratio up to the cutoff `ratio * threshold`, else 0. Guarantee: factor * norm <= threshold."""

    ratio: float = 1.0

    def __post_init__(self) -> None:
        positive("ratio", self.ratio)

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        norms = _at_least_float32(norms)
        factors = _lowered(torch.full_like(norms, 1.0 / self.ratio))
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


def _lowered(factors: Tensor) -> Tensor:
    """The factors, lowered in place so that no rounding takes a product above the threshold. For those that are too small to
    have all digits that would not be enough: they are 0."""
    return torch.threshold_(factors.mul_(LOWERED), torch.finfo(factors.dtype).tiny, 0.0)


def _usable(norms: Tensor) -> tuple[Tensor, Tensor]:
    """The norms in at least float32, and a mask of those to divide by."""
    norms = _at_least_float32(norms)
    return norms, norms.isfinite() & (norms > 0)


@cache
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
        """How much of each record enters the sums of these groups, [g,b], from their norms [g,b] and thresholds [g,1].

        A rule that is none of ours is held to its promise: raises if it lets more through, or looks at other records.
        """
        of = partial(self.rule.of, groups) if isinstance(self.rule, ByGroup) else self.rule
        return of(norms, thresholds) if self._other is None else bounded(self._other, of, norms, thresholds)

    @cached_property
    def _other(self) -> Rule | None:
        """The first rule that is none of ours."""
        rules = self.rule.rules if type(self.rule) is ByGroup else (self.rule,)
        return next((rule for rule in rules if type(rule) not in OURS), None)

    def start(self, groups: int) -> Tensor:
        """The thresholds of the first step, [G,1]. Raises if the rule or the policy is made for another number of groups."""
        if isinstance(self.rule, ByGroup) and len(self.rule.rules) != groups:
            raise InvalidArgument(
                f"{len(self.rule.rules)} cutoffs for {groups} groups: give one for each group, or a single number, which is "
                "shared out over the groups."
            )
        thresholds = self.policy.thresholds(self.policy.init(Setting(groups)))
        if self._other is not None:
            self.factors(torch.logspace(-6, 6, 49, device="cpu").expand(groups, -1), thresholds, range(groups))
        return thresholds


def bounded(name: object, rule: Rule, norms: Tensor, thresholds: Tensor) -> Tensor:
    """The factors of a rule that promises nothing, [g,b], none of which exceeds threshold / norm. Raises if one would, other
    than by rounding, or if a factor is not that of its record alone. A norm of zero or infinity gets 0."""
    found = _given(name, rule, norms, thresholds)
    counts = norms.isfinite() & (norms > 0)
    most = torch.where(counts, _lowered(thresholds / norms), 0.0)
    right = (found >= 0) & (found <= most * (1 + TOLERATED))  # false for NaN
    if not bool((right | ~counts).all()):
        raise InvalidArgument(
            f"the clipping rule {name!r} returned a factor that is negative, not a number, or larger than threshold / norm: "
            "one record would move the sum by more than the noise covers, and nothing was released. A rule must keep "
            "factor * norm <= threshold for every norm; clamping its factors to (thresholds / norms) does."
        )
    half = norms.shape[1] // 2
    if half:
        apart = [_given(name, rule, some, thresholds) for some in norms.tensor_split([half], 1)]
        if not bool((torch.isclose(torch.cat(apart, 1), found, rtol=TOLERATED, atol=0.0) | ~counts).all()):
            raise InvalidArgument(
                f"the clipping rule {name!r} gives a record another factor if other records are left out: then one record "
                "changes the contributions of all others, which no threshold bounds. Compute each factor from the norm and "
                "the threshold in its own place. Thresholds that follow the norms are set by a policy, such as "
                "clipless.quantile()."
            )
    return torch.where(counts, found.minimum(most), 0.0)


def _given(name: object, rule: Rule, norms: Tensor, thresholds: Tensor) -> Tensor:
    """What a rule returns for copies of these, in the norms' type. Raises for anything but one factor for each norm."""
    found = rule(norms.clone(), thresholds.clone())
    if not isinstance(found, Tensor) or found.shape != norms.shape or not found.is_floating_point():
        got = f"{found.dtype} in {found.dim()} dimensions" if isinstance(found, Tensor) else type(found).__name__
        raise InvalidType(
            f"the clipping rule {name!r} must return one floating-point factor for each norm, shaped like the norms [G,B], "
            f"got {got}."
        )
    return found.detach().to(norms)


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
    tensor([[100.0000,   1.0000]])
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

OURS = frozenset({Abadi, AutoV, AutoS, Global})
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
        if type(clipping) is not Clipping:
            raise InvalidType(
                f"{type(clipping).__name__} derives from Clipping, whose promise it could break: write a rule, a function "
                "of norms and thresholds, and give clipless.Clipping(name, rule, policy)."
            )
        return clipping
    if not isinstance(clipping, str):
        raise InvalidType(
            f"clipping must be a name such as 'auto-s' or an object such as clipless.auto_s(), got {clipping!r}. Of "
            "a schedule give one phase."
        )
    return named("clipping", clipping, CLIPPINGS)()

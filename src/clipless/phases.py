"""A clipping that changes within a run: phases, each with a rule, a policy and a share of the steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from clipless.accounting import gradient_multiplier
from clipless.arguments import positive
from clipless.clipping import Clipping, Groups, as_clipping
from clipless.errors import InvalidArgument, InvalidType
from clipless.noise_schedule import NoiseSchedule
from clipless.thresholds import Setting

# Shares of 1/3 or 0.1 do not add up to 1 exactly.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Schedule:
    """Clippings one after the other, each for its share of a run's steps. All have the same groups."""

    parts: tuple[tuple[float, Clipping], ...]

    @property
    def name(self) -> str:
        """That of a single clipping, or "schedule"."""
        return self.parts[0][1].name if len(self.parts) == 1 else "schedule"

    @property
    def groups(self) -> Groups:
        """The partition, which is the same in all phases."""
        return self.parts[0][1].groups

    def edges(self, steps: int) -> list[int]:
        """The first step of each phase, and the number of all steps. Raises if a phase has no step."""
        found, share = [0], 0.0
        for number, (part, clipping) in enumerate(self.parts, start=1):
            share += part
            found.append(steps if number == len(self.parts) else min(round(share * steps), steps))
            if found[-1] <= found[-2]:
                raise InvalidArgument(
                    f"phase {number} of the schedule, {clipping.name} for {part:g} of {steps} steps, would have no step: "
                    "raise its share, or train for more steps."
                )
        return found

    def spans(self) -> list[int]:
        """For each phase the number of its policy. Phases in a row with equal policies share one, which continues."""
        numbers = [0]
        for (_, before), (_, now) in zip(self.parts, self.parts[1:], strict=False):
            same = (before.policy, before.allocation) == (now.policy, now.allocation)
            numbers.append(numbers[-1] + (not same))
        return numbers

    def span_steps(self, steps: int) -> list[int]:
        """How many steps each policy has."""
        edges, spans = self.edges(steps), self.spans()
        lengths = [0] * (spans[-1] + 1)
        for k, span in enumerate(spans):
            lengths[span] += edges[k + 1] - edges[k]
        return lengths

    def noise_schedule(self, steps: int) -> NoiseSchedule:
        """The noise multipliers of all steps, relative to the planned one: those of the policies, one after the other."""
        spans = self.spans()
        policies = [self.parts[spans.index(span)][1].policy for span in range(spans[-1] + 1)]
        lengths = self.span_steps(steps)
        return [
            stair for policy, count in zip(policies, lengths, strict=True) for stair in policy.noise_schedule(count)
        ]


@dataclass(frozen=True)
class Phase:
    """Some steps of a run in a row that are clipped alike, from step `first`, counted from 0, to before `end`.

    `number` counts phases and `span` policies, both from 0. `setting` is what the policy knows about the run, which for it
    has as many steps as its span. The multipliers are those of the gradient and of the statistic where the policy has no
    noise schedule.
    """

    number: int
    span: int
    first: int
    end: int
    clipping: Clipping
    setting: Setting
    gradient_multiplier: float
    statistic_multiplier: float | None


def schedule(phases: Sequence[tuple[float, str | Clipping]]) -> Schedule:
    """A clipping that changes within a run: pairs of a share of the steps and a clipping, in order.

    Each phase begins with the starting thresholds of its clipping, unless the phase before has the same policy: then it
    continues with that phase's thresholds. Every step is accounted by what it releases.

    >>> last_steps_global = schedule([(0.95, "abadi"), (0.05, "global")])
    >>> last_steps_global.edges(200)
    [0, 190, 200]
    """
    if isinstance(phases, (str, Clipping, Schedule)) or not isinstance(phases, Sequence) or not phases:
        raise InvalidType(f"schedule takes pairs such as [(0.95, 'abadi'), (0.05, 'global')], got {phases!r}.")
    parts = tuple(map(_part, phases))
    total = sum(share for share, _ in parts)
    if abs(total - 1) > ROUNDING:
        raise InvalidArgument(f"the shares of a schedule add up to {total:g}: make them add up to 1.")
    _refuse_unfit([clipping for _, clipping in parts])
    return Schedule(parts)


def _part(phase: object) -> tuple[float, Clipping]:
    if not isinstance(phase, (tuple, list)) or len(phase) != 2:
        raise InvalidType(f"a phase of a schedule is a pair (share of the steps, clipping), got {phase!r}.")
    share, clipping = phase
    if isinstance(clipping, Schedule):
        raise InvalidType("a schedule within a schedule: list all phases in one.")
    return positive("the share of a phase", share), as_clipping(clipping)


def _refuse_unfit(clippings: list[Clipping]) -> None:
    """Raise for clippings that cannot be phases of one run."""
    first = clippings[0]
    for clipping in clippings[1:]:
        if clipping.groups != first.groups:
            raise InvalidArgument(
                f"the phases of a schedule have different groups, {first.groups!r} and {clipping.groups!r}: give all of "
                "them the same groups=, since parameters are divided once for the whole run."
            )


def as_schedule(clipping: "str | Clipping | Schedule") -> Schedule:
    """The schedule itself, or one of a single phase: a clipping or the one that a name stands for."""
    if isinstance(clipping, Schedule):
        _refuse_unfit([as_clipping(part) for _, part in clipping.parts])
        return clipping
    return Schedule(((1.0, as_clipping(clipping)),))


def phases_of(
    schedule: Schedule, dimensions: tuple[int, ...], expected_batch: int, steps: int, multiplier: float
) -> tuple[Phase, ...]:
    """The phases of a run of so many steps, whose step has the noise multiplier `multiplier` where there is no noise
    schedule. Raises if a statistic would take more than the whole step, or if a rule does not fit the groups."""
    edges, spans, lengths = schedule.edges(steps), schedule.spans(), schedule.span_steps(steps)
    found = []
    for number, (_, clipping) in enumerate(schedule.parts):
        clipping.start(len(dimensions))
        count = lengths[spans[number]]
        statistic = clipping.policy.statistic_multiplier(
            multiplier, policy_setting(clipping, dimensions, expected_batch, count, multiplier)
        )
        gradient = multiplier if statistic is None else gradient_multiplier(multiplier, statistic)
        setting = policy_setting(clipping, dimensions, expected_batch, count, gradient)
        where = (number, spans[number], edges[number], edges[number + 1])
        found.append(Phase(*where, clipping, setting, gradient, statistic))
    return tuple(found)


def policy_setting(
    clipping: Clipping, dimensions: tuple[int, ...], expected_batch: int, steps: int, multiplier: float
) -> Setting:
    """What a threshold policy knows about a run. If every coordinate gets the same noise, a group's threshold adds to the
    noise on all coordinates; if the budget is divided equally, to the noise on G times its own."""
    groups, everything = len(dimensions), sum(dimensions)
    uniform = clipping.allocation == "uniform"
    noise_dimensions = tuple(everything if uniform else groups * own for own in dimensions)
    return Setting(groups, expected_batch, steps, multiplier, noise_dimensions)

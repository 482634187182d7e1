"""The plan: what is promised, to whom, and what each step releases. Frozen; everything else follows from it."""

import math
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from clipless.accounting import ACCOUNTANTS, Ledger, StepEvent
from clipless.clipping import Clipping
from clipless.neighbours import RELATIONS, ZERO_OUT
from clipless.noise_schedule import NoiseSchedule, relative_noise
from clipless.partition import Partition
from clipless.phases import Phase, Schedule, phases_of
from clipless.thresholds import Constant, Setting

# Noise is larger by this share than the multiplier says, because rounding may take one record that much further than the
# sensitivity: see `clipless.gradients.sums.RunningSum` and docs/noise.md.
RESERVE = 2.0**-9


@dataclass(frozen=True)
class PrivacyPlan:
    """(ε, δ)-differential privacy for one record, over all planned steps.

    `neighbours` says which data sets may not be told apart: "zero-out", where one record is replaced by an empty one and
    `dataset_size` is public, or "add-remove", where that is secret and None.
    `noise_multiplier` is the ratio of noise to sensitivity of one whole step, gradient and statistic together, which is
    what the accountant is told; with a noise schedule it is the first step's. `dimensions` has the number of trainable
    parameters of each group. `schedule` says how steps are clipped: in one phase, unless the rule changes within the run.
    With `projections`, that many estimate each norm, and a record may move the sum by more than the sensitivity; the
    accountant knows the distribution. With `unit_gradients` the optimizer gets gradients in units of the step's threshold.
    """

    epsilon: float
    delta: float
    accountant: str
    noise_multiplier: float
    dataset_size: int | None
    expected_batch: int
    sample_rate: float
    steps: int
    steps_per_pass: int
    schedule: Schedule
    groups: Partition
    dimensions: tuple[int, ...]
    projections: int | None = None
    loss_reduction: str | None = None
    noise: str = "secure"
    sampling: str = "poisson"
    unit_gradients: bool = False
    neighbours: str = ZERO_OUT

    @property
    def population(self) -> int:
        """The number of records, or, where it is secret, the one that expected batch and rate suggest."""
        nominal = max(1, round(self.expected_batch / self.sample_rate))
        return nominal if self.dataset_size is None else self.dataset_size

    @property
    def approximation(self) -> bool:
        """Whether the true ε can be larger than the one stated."""
        return ACCOUNTANTS[self.accountant].approximation

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The run's steps by how they are clipped: one phase, or those of a schedule."""
        return phases_of(self.schedule, self.dimensions, self.expected_batch, self.steps, self.noise_multiplier)

    def phase(self, step: int) -> Phase:
        """The phase of step number `step`, counted from 0; beyond the plan the last one."""
        return next((phase for phase in self.phases if step < phase.end), self.phases[-1])

    @property
    def clipping(self) -> Clipping:
        """How the first step is clipped, and every other unless there is a schedule."""
        return self.phases[0].clipping

    @property
    def gradient_multiplier(self) -> float:
        """The noise multiplier of the gradient alone, in the first step: larger than the step's if a statistic is
        released beside it."""
        return self.phases[0].gradient_multiplier

    @property
    def statistic_multiplier(self) -> float | None:
        """The noise multiplier of the statistic that the first step releases; None without one."""
        return self.phases[0].statistic_multiplier

    @property
    def setting(self) -> Setting:
        """What the first step's threshold policy knows about the run."""
        return self.phases[0].setting

    @cached_property
    def thresholds_change(self) -> bool:
        """Whether thresholds, or how steps are clipped, change within the run."""
        return len(self.phases) > 1 or not isinstance(self.clipping.policy, Constant)

    @cached_property
    def releases_statistics(self) -> bool:
        """Whether any step releases a statistic beside the gradient."""
        return any(phase.statistic_multiplier is not None for phase in self.phases)

    def sensitivity(self, thresholds: Tensor | None = None) -> float:
        """How far one record can move the clipped sum, at these thresholds or at the first step's."""
        return float(sensitivity(self.clipping.start(len(self.groups)) if thresholds is None else thresholds))

    def divisor(self, thresholds: Tensor) -> float:
        """What the noised sum is divided by at these thresholds. They are constants or released before the step, so what
        they do to a released sum costs nothing."""
        return self.expected_batch * self.sensitivity(thresholds) if self.unit_gradients else self.expected_batch

    def event(self, step: int = 0) -> StepEvent:
        """What step number `step`, counted from 0, releases: an event for the ledger."""
        relative, phase = relative_noise(self._noise_schedule, step), self.phase(step)
        gradient = relative * phase.gradient_multiplier
        return _event(self.sample_rate, gradient, phase.statistic_multiplier, self.projections)

    def planned(self) -> Ledger:
        """What all planned steps together release."""
        changes = set(accumulate((count for _, count in self._noise_schedule), initial=0))
        edges = sorted(changes | {phase.first for phase in self.phases})
        ledger = Ledger()
        for step, end in pairwise(edges):
            ledger.record(self.event(step), end - step)
        return ledger

    def stddevs(self, step: int, thresholds: Tensor) -> Tensor:
        """Standard deviation of the noise on each group's sum, [G,1], in that step and at these thresholds."""
        return noise_stddevs(thresholds, self.event(step).gradient_multiplier, self.phase(step).clipping.allocation)

    @cached_property
    def _noise_schedule(self) -> NoiseSchedule:
        return self.schedule.noise_schedule(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for files."""
        fields = asdict(self)
        del fields["schedule"]
        if self.projections is None:
            del fields["projections"]
        if not self.unit_gradients:
            del fields["unit_gradients"]
        fields["statistic_multiplier"] = self.statistic_multiplier
        phases = [{**_written(phase.clipping), "steps": phase.end - phase.first} for phase in self.phases]
        several = {"name": self.schedule.name, "phases": phases}
        fields["clipping"] = several if len(phases) > 1 else _written(self.clipping)
        fields["groups"] = dict(zip(self.groups.names, map(list, self.groups.members), strict=True))
        return fields | {"neighbouring": RELATIONS[self.neighbours]}

    def __str__(self) -> str:
        sure = " (approximation, can under-report)" if self.approximation else ""
        return "\n".join(
            [
                f"({self.epsilon:.4g}, {self.delta:.4g})-differential privacy for {self._protected()}",
                f"  neighbours  {RELATIONS[self.neighbours]}",
                f"  accountant  {self.accountant}{sure}",
                f"  steps       {self.steps:,}, each on a {self.sampling} batch of {self.expected_batch:,} expected "
                f"records (rate {self.sample_rate:.4g})",
                f"  noise       multiplier {self.noise_multiplier:.4g}{self._split()}, source {self.noise}",
                f"  clipping    {self._clipped()}{', gradients in units of the threshold' if self.unit_gradients else ''}",
                *(
                    []
                    if self.projections is None
                    else [f"  norms       estimated by {self.projections} random projections"]
                ),
                f"  parameters  {sum(self.dimensions):,} trainable",
            ]
        )

    def _protected(self) -> str:
        return "each record" if self.dataset_size is None else f"each of {self.dataset_size:,} records"

    def _clipped(self) -> str:
        if len(self.phases) == 1:
            return f"{self.clipping.name}, {len(self.groups)} group(s), {self.clipping.policy}"
        rows = [f"{self.schedule.name} of {len(self.phases)} phases, {len(self.groups)} group(s)"]
        for phase in self.phases:
            how = f"{phase.clipping.name}, {phase.clipping.rule}, {phase.clipping.policy}{_divided(phase)}"
            rows.append(f"              steps {phase.first + 1:,}-{phase.end:,}: {how}")
        return "\n".join(rows)

    def _split(self) -> str:
        return _divided(self.phases[0]) if len(self.phases) == 1 else ""


def _divided(phase: Phase) -> str:
    """How a step's noise multiplier is divided between gradient and statistic, for a reader."""
    if phase.statistic_multiplier is None:
        return ""
    return f" (gradient {phase.gradient_multiplier:.4g}, statistic {phase.statistic_multiplier:.4g})"


def _written(clipping: Clipping) -> dict[str, Any]:
    """A clipping as plain data."""
    rule, policy = repr(clipping.rule), repr(clipping.policy)
    return {"name": clipping.name, "rule": rule, "policy": policy, "allocation": clipping.allocation}


@lru_cache(maxsize=1024)
def _event(rate: float, gradient: float, statistic: float | None, projections: int | None) -> StepEvent:
    return StepEvent(rate, gradient, () if statistic is None else (statistic,), projections)


def sensitivity(thresholds: Tensor) -> Tensor:
    """How far one record can move the clipped sum, but for rounding: the length of the threshold vector."""
    return torch.linalg.vector_norm(thresholds.double())


def noise_stddevs(thresholds: Tensor, multiplier: float, allocation: str) -> Tensor:
    """Noise for each group such that the whole step has this multiplier, [G,1], for sums that are rounded.

    >>> noise_stddevs(torch.tensor([[3.0], [4.0]]), 2.0, "uniform").flatten() / (1 + RESERVE)
    tensor([10., 10.], dtype=torch.float64)
    """
    multiplier *= 1 + RESERVE
    if allocation == "equal-budget":
        return multiplier * math.sqrt(len(thresholds)) * thresholds.double()
    return torch.full_like(thresholds, multiplier, dtype=torch.float64) * sensitivity(thresholds)

"""The plan: what is promised, to whom, and what each step releases. Frozen; everything else follows from it."""

import math
import warnings
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from clipless import defaults
from clipless.accounting import (
    ACCOUNTANTS,
    Ledger,
    StepEvent,
    gradient_multiplier,
    scheduled_epsilon,
    scheduled_multiplier,
)
from clipless.arguments import large_delta_note, named, positive, whole
from clipless.clipping import Clipping
from clipless.errors import InvalidArgument
from clipless.noise_schedule import NoiseSchedule, relative_noise
from clipless.partition import Partition
from clipless.thresholds import Constant, Setting

LOSS_REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class PrivacyPlan:
    """(ε, δ)-differential privacy for adding or removing one record, over all planned steps.

    `noise_multiplier` is the ratio of noise to sensitivity of one whole step, gradient and statistic together, which is
    what the accountant is told; with a noise schedule it is the first step's. `dimensions` has the number of trainable
    parameters of each group.
    """

    epsilon: float
    delta: float
    accountant: str
    noise_multiplier: float
    dataset_size: int
    expected_batch: int
    steps: int
    steps_per_pass: int
    clipping: Clipping
    groups: Partition
    dimensions: tuple[int, ...]
    statistic_multiplier: float | None = None
    loss_reduction: str = defaults.LOSS_REDUCTION
    noise: str = "secure"
    sampling: str = "poisson"

    @cached_property
    def sample_rate(self) -> float:
        """The probability that a record is in a batch."""
        return self.expected_batch / self.dataset_size

    @property
    def approximation(self) -> bool:
        """Whether the true ε can be larger than the one stated."""
        return ACCOUNTANTS[self.accountant].approximation

    @cached_property
    def gradient_multiplier(self) -> float:
        """The noise multiplier of the gradient alone, in the first step: larger than the step's if a statistic is
        released beside it."""
        if self.statistic_multiplier is None:
            return self.noise_multiplier
        return gradient_multiplier(self.noise_multiplier, self.statistic_multiplier)

    @cached_property
    def setting(self) -> Setting:
        """What the threshold policy knows about the run."""
        return policy_setting(self.clipping, self.dimensions, self.expected_batch, self.steps, self.gradient_multiplier)

    @cached_property
    def thresholds_change(self) -> bool:
        """Whether thresholds change from step to step."""
        return not isinstance(self.clipping.policy, Constant)

    def sensitivity(self, thresholds: Tensor | None = None) -> float:
        """How far one record can move the clipped sum, at these thresholds or at the first step's."""
        return float(sensitivity(self.clipping.start(len(self.groups)) if thresholds is None else thresholds))

    def event(self, step: int = 0) -> StepEvent:
        """What step number `step`, counted from 0, releases: an event for the ledger."""
        relative = relative_noise(self._noise_schedule, step)
        return _event(self.sample_rate, relative * self.gradient_multiplier, self.statistic_multiplier)

    def planned(self) -> Ledger:
        """What all planned steps together release."""
        ledger, step = Ledger(), 0
        for _, count in self._noise_schedule:
            ledger.record(self.event(step), count)
            step += count
        return ledger

    def stddevs(self, step: int, thresholds: Tensor) -> Tensor:
        """Standard deviation of the noise on each group's sum, [G,1], in that step and at these thresholds."""
        return noise_stddevs(thresholds, self.event(step).gradient_multiplier, self.clipping.allocation)

    @cached_property
    def _noise_schedule(self) -> NoiseSchedule:
        return self.clipping.policy.noise_schedule(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for files."""
        fields = asdict(self)
        fields["clipping"] = {
            "name": self.clipping.name,
            "rule": repr(self.clipping.rule),
            "policy": repr(self.clipping.policy),
            "allocation": self.clipping.allocation,
        }
        fields["groups"] = dict(zip(self.groups.names, map(list, self.groups.members), strict=True))
        return fields | {"sample_rate": self.sample_rate, "neighbouring": "add or remove one record"}

    def __str__(self) -> str:
        sure = " (approximation, can under-report)" if self.approximation else ""
        return "\n".join(
            [
                f"({self.epsilon:.4g}, {self.delta:.4g})-differential privacy for each of {self.dataset_size:,} records",
                f"  neighbours  add or remove one record; accountant {self.accountant}{sure}",
                f"  steps       {self.steps:,}, each on a {self.sampling} batch of {self.expected_batch:,} expected "
                f"records (rate {self.sample_rate:.4g})",
                f"  noise       multiplier {self.noise_multiplier:.4g}{self._split()}, source {self.noise}",
                f"  clipping    {self.clipping.name}, {len(self.groups)} group(s), {self.clipping.policy}",
                f"  parameters  {sum(self.dimensions):,} trainable",
            ]
        )

    def _split(self) -> str:
        if self.statistic_multiplier is None:
            return ""
        return f" (gradient {self.gradient_multiplier:.4g}, statistic {self.statistic_multiplier:.4g})"


@lru_cache(maxsize=1024)
def _event(rate: float, gradient: float, statistic: float | None) -> StepEvent:
    return StepEvent(rate, gradient, () if statistic is None else (statistic,))


def sensitivity(thresholds: Tensor) -> Tensor:
    """How far one record can move the clipped sum: the length of the threshold vector."""
    return torch.linalg.vector_norm(thresholds.double())


def noise_stddevs(thresholds: Tensor, multiplier: float, allocation: str) -> Tensor:
    """Noise for each group such that the whole step has this multiplier, [G,1].

    >>> noise_stddevs(torch.tensor([[3.0], [4.0]]), 2.0, "uniform").flatten()
    tensor([10., 10.], dtype=torch.float64)
    """
    if allocation == "equal-budget":
        return multiplier * math.sqrt(len(thresholds)) * thresholds.double()
    return torch.full_like(thresholds, multiplier, dtype=torch.float64) * sensitivity(thresholds)


def make_plan(
    *,
    dataset_size: int,
    batch_size: int | None,
    epochs: int | None,
    steps: int | None,
    epsilon: float | None,
    noise_multiplier: float | None,
    delta: float | None,
    accountant: str,
    clipping: Clipping,
    groups: Partition,
    dimensions: tuple[int, ...],
    loss_reduction: str,
    noise: str,
) -> PrivacyPlan:
    """Check the numbers, fill in the defaults, and compute the noise multiplier or ε, whichever is not given."""
    named("loss_reduction", loss_reduction, dict.fromkeys(LOSS_REDUCTIONS))
    named("accountant", accountant, ACCOUNTANTS)
    batch = _expected_batch(batch_size, dataset_size)
    per_pass = defaults.steps_per_pass(dataset_size, batch)
    total = _total_steps(epochs, steps, per_pass)
    chosen_delta = defaults.delta(dataset_size) if delta is None else delta
    if delta is None and dataset_size < 2:
        raise InvalidArgument("with a single record there is no default delta: give delta= yourself.")
    _warn_of_large_delta(chosen_delta, dataset_size)
    schedule = clipping.policy.noise_schedule(total)
    eps, z = _budget(epsilon, noise_multiplier, chosen_delta, batch / dataset_size, schedule, accountant)
    statistic = clipping.policy.statistic_multiplier(z, policy_setting(clipping, dimensions, batch, total, z))
    if statistic is not None:
        gradient_multiplier(z, statistic)
    return PrivacyPlan(
        epsilon=eps,
        delta=chosen_delta,
        accountant=accountant,
        noise_multiplier=z,
        dataset_size=dataset_size,
        expected_batch=batch,
        steps=total,
        steps_per_pass=per_pass if steps is None else total,
        clipping=clipping,
        groups=groups,
        dimensions=dimensions,
        statistic_multiplier=statistic,
        loss_reduction=loss_reduction,
        noise=noise,
    )


def policy_setting(
    clipping: Clipping, dimensions: tuple[int, ...], expected_batch: int, steps: int, multiplier: float
) -> Setting:
    """What a threshold policy knows about a run. If every coordinate gets the same noise, a group's threshold adds to the
    noise on all coordinates; if the budget is divided equally, to the noise on G times its own."""
    groups, everything = len(dimensions), sum(dimensions)
    uniform = clipping.allocation == "uniform"
    noise_dimensions = tuple(everything if uniform else groups * own for own in dimensions)
    return Setting(groups, expected_batch, steps, multiplier, noise_dimensions)


def _warn_of_large_delta(delta: float, dataset_size: int) -> None:
    if note := large_delta_note(delta, dataset_size):
        warnings.warn(note, stacklevel=5)


def _expected_batch(batch_size: int | None, dataset_size: int) -> int:
    if batch_size is None:
        raise InvalidArgument("give batch_size=, the expected number of records in a batch.")
    batch = whole("batch_size", batch_size)
    if batch > dataset_size:
        raise InvalidArgument(
            f"batch_size={batch} is larger than the data set of {dataset_size} records: use at most {dataset_size}."
        )
    return batch


def _total_steps(epochs: int | None, steps: int | None, per_pass: int) -> int:
    if epochs is not None and steps is not None:
        raise InvalidArgument("epochs= and steps= contradict each other: give one of them.")
    if epochs is not None:
        return whole("epochs", epochs) * per_pass
    if steps is not None:
        return whole("steps", steps)
    raise InvalidArgument("give epochs= or steps=: the budget is divided over all steps of the run.")


def _budget(
    target: float | None, multiplier: float | None, delta: float, rate: float, schedule: NoiseSchedule, accountant: str
) -> tuple[float, float]:
    """ε and the first step's noise multiplier, the one computed from the other, for steps of this schedule."""
    if target is not None and multiplier is not None:
        raise InvalidArgument("epsilon= and noise_multiplier= contradict each other: give one of them.")
    if target is not None:
        z = scheduled_multiplier(target, delta, rate, schedule, accountant)
        return float(target), z
    if multiplier is not None:
        z = positive("noise_multiplier", multiplier)
        return scheduled_epsilon(z, rate, schedule, delta, accountant), z
    raise InvalidArgument("give epsilon=, the privacy budget (3.0 is a common choice), or noise_multiplier=.")

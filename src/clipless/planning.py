"""From the arguments of a run to its plan: numbers checked, defaults filled in, noise or epsilon computed."""

import warnings
from dataclasses import replace

from clipless.accounting import ACCOUNTANTS, scheduled_epsilon, scheduled_multiplier
from clipless.accounting.calibrate import search
from clipless.arguments import large_delta_note, named, positive
from clipless.errors import InvalidArgument
from clipless.neighbours import ZERO_OUT, draws
from clipless.noise_schedule import NoiseSchedule
from clipless.partition import Partition
from clipless.phases import Schedule
from clipless.plan import PrivacyPlan

LOSS_REDUCTIONS = ("mean", "sum")


def make_plan(
    *,
    dataset_size: int,
    neighbours: str = ZERO_OUT,
    sample_rate: float | None = None,
    batch_size: int | None,
    epochs: int | None,
    steps: int | None,
    epsilon: float | None,
    noise_multiplier: float | None,
    delta: float | None,
    accountant: str,
    schedule: Schedule,
    groups: Partition,
    dimensions: tuple[int, ...],
    loss_reduction: str | None,
    noise: str,
    projections: int | None = None,
    unit_gradients: bool = False,
) -> PrivacyPlan:
    """Check the numbers, fill in the defaults, and compute the noise multiplier or ε, whichever is not given."""
    if loss_reduction is not None:
        named("loss_reduction", loss_reduction, dict.fromkeys(LOSS_REDUCTIONS))
    named("accountant", accountant, ACCOUNTANTS)
    drawn = draws(
        neighbours,
        dataset_size,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        delta=delta,
        sample_rate=sample_rate,
    )
    noises = schedule.noise_schedule(drawn.steps)
    eps, z = _budget(epsilon, noise_multiplier, drawn.delta, drawn.sample_rate, noises, accountant)
    plan = PrivacyPlan(
        epsilon=eps,
        delta=drawn.delta,
        accountant=accountant,
        noise_multiplier=z,
        neighbours=neighbours,
        dataset_size=drawn.dataset_size,
        expected_batch=drawn.expected_batch,
        sample_rate=drawn.sample_rate,
        steps=drawn.steps,
        steps_per_pass=drawn.steps_per_pass,
        schedule=schedule,
        groups=groups,
        dimensions=dimensions,
        projections=projections,
        loss_reduction=loss_reduction,
        noise=noise,
        unit_gradients=unit_gradients,
    )
    if note := large_delta_note(plan.delta, plan.population):
        warnings.warn(note, stacklevel=4)
    assert plan.phases  # or raises: thresholds that do not fit the groups, a statistic that takes more than the step
    return plan if projections is None else _projected(plan, target=epsilon)


def _projected(plan: PrivacyPlan, target: float | None) -> PrivacyPlan:
    """The plan of a run whose norms are estimated: its steps cost more than their multipliers say, by what the accountant
    knows of random sensitivities."""
    if not ACCOUNTANTS[plan.accountant].takes_projections:
        raise InvalidArgument(
            f"gradients='jl' cannot be accounted for by {plan.accountant}: the sensitivity of a step is random and has no "
            "bound, so its Rényi divergences and the moments of its privacy loss are infinite. Use accountant='pld'."
        )
    if len(plan.groups) > 1:
        raise InvalidArgument(
            f"gradients='jl' estimates the norm of the whole gradient, and there are {len(plan.groups)} groups: use "
            "groups='flat', or gradients='exact'."
        )

    def spent(z: float) -> float:
        return replace(plan, noise_multiplier=z).planned().spent(plan.delta, plan.accountant).epsilon

    if target is None:
        return replace(plan, epsilon=spent(plan.noise_multiplier))
    return replace(plan, noise_multiplier=search(spent, float(target), plan.noise_multiplier))


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

"""Steps as events of dp-accounting, for comparisons with its accountants."""

import dp_accounting

from clipless.accounting import StepEvent
from clipless.accounting.selection.repeat_and_select import sampled_gaussian


def dp_event(step: StepEvent) -> dp_accounting.DpEvent:
    return sampled_gaussian(step.sample_rate, step.noise_multiplier)

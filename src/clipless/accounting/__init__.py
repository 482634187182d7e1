"""Accounting: events in, epsilon out. Imports no torch."""

from clipless.accounting.accountants import ACCOUNTANTS, APPROXIMATION_NOTE, epsilon
from clipless.accounting.calibrate import noise_multiplier
from clipless.accounting.events import StepEvent, gradient_multiplier, joint_multiplier
from clipless.accounting.ledger import Ledger, Spent
from clipless.accounting.schedule import scheduled_epsilon, scheduled_multiplier
from clipless.accounting.selection import SelectionEvent

__all__ = [
    "ACCOUNTANTS",
    "APPROXIMATION_NOTE",
    "Ledger",
    "SelectionEvent",
    "Spent",
    "StepEvent",
    "epsilon",
    "gradient_multiplier",
    "joint_multiplier",
    "noise_multiplier",
    "scheduled_epsilon",
    "scheduled_multiplier",
]

"""check: does this model, with this loss, keep the promise? Measured on a few records before any training."""

from clipless.preflight.checking import MOST_RECORDS, check, refuse_unsound, relative_error
from clipless.preflight.report import CheckReport, Handling

__all__ = ["MOST_RECORDS", "CheckReport", "Handling", "check", "refuse_unsound", "relative_error"]

"""`clipless.check`: does this model, with this loss, keep the declared sensitivity? Tested on a few records before training.

The package is not named `check`: importing it would replace the public function `clipless.check` by the module.
"""

from clipless.preflight.checking import MOST_RECORDS, check, refuse_unsound, relative_error
from clipless.preflight.report import CheckReport, Handling

__all__ = ["MOST_RECORDS", "CheckReport", "Handling", "check", "refuse_unsound", "relative_error"]

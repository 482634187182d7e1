"""How far the confidence of a classifier can be trusted: ECE, MCE, NLL, Brier, intervals and reliability diagrams.

    p, y = clipless.reliability.predictions(model, test_loader)
    clipless.reliability.ece(p, y)
    print(clipless.reliability.report(p, y))

Give test records. Numbers computed from the records a model was trained on are not covered by its guarantee, so reports
and figures say which records they come from. `probabilities` are [N, K], or [N] for the probability of class 1; `labels`
are N whole numbers; both NumPy arrays, torch tensors or lists.
"""

from clipless.reliability.bootstrap import Interval, bootstrap
from clipless.reliability.collecting import predictions
from clipless.reliability.figures import compare, diagram
from clipless.reliability.metrics import Bins, accuracy, bins_of, brier, ece, ece_when_calibrated, mce, nll
from clipless.reliability.reporting import Reliability, report

__all__ = [
    "Bins",
    "Interval",
    "Reliability",
    "accuracy",
    "bins_of",
    "bootstrap",
    "brier",
    "compare",
    "diagram",
    "ece",
    "ece_when_calibrated",
    "mce",
    "nll",
    "predictions",
    "report",
]

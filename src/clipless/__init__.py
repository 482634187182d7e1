"""clipless: train PyTorch models with differential privacy, with no clipping threshold to tune."""

from clipless import oracle
from clipless.accounting import Ledger, Spent, epsilon, noise_multiplier
from clipless.accounting.chain import read_ledger
from clipless.clipping import Clipping, abadi, auto_s, auto_v, dc_e, dc_p, decay, global_, quantile
from clipless.errors import (
    BudgetSpent,
    CliplessError,
    DamagedFile,
    InvalidArgument,
    InvalidType,
    LedgerInUse,
    Misuse,
    ReplayDiffers,
    TornLedger,
    Unsound,
    UnsupportedModule,
)
from clipless.grads import ClippedSum, Tuner, clipped_sum
from clipless.plan import PrivacyPlan
from clipless.preflight import CheckReport, check
from clipless.private import Private, make_private
from clipless.replacing import Replaced, replace_batchnorm

__version__ = "0.1.0"

__all__ = [
    "BudgetSpent",
    "CheckReport",
    "CliplessError",
    "ClippedSum",
    "Clipping",
    "DamagedFile",
    "InvalidArgument",
    "InvalidType",
    "Ledger",
    "LedgerInUse",
    "Misuse",
    "PrivacyPlan",
    "Private",
    "Replaced",
    "ReplayDiffers",
    "Spent",
    "TornLedger",
    "Tuner",
    "Unsound",
    "UnsupportedModule",
    "abadi",
    "auto_s",
    "auto_v",
    "check",
    "clipped_sum",
    "dc_e",
    "dc_p",
    "decay",
    "epsilon",
    "global_",
    "make_private",
    "noise_multiplier",
    "oracle",
    "quantile",
    "read_ledger",
    "replace_batchnorm",
]

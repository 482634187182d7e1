"""clipless: train PyTorch models with differential privacy, with no clipping threshold to tune.

Names are loaded on first use, so that `import clipless.accounting` needs no torch.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clipless import oracle
    from clipless.accounting import Ledger, Spent, epsilon, noise_multiplier
    from clipless.clipped import ClippedSum
    from clipless.clipping import Clipping, abadi, auto_s, auto_v, dc_e, dc_p, decay, global_, quantile
    from clipless.distributed import broadcast_weights
    from clipless.errors import (
        BudgetSpent,
        CliplessError,
        DamagedFile,
        InvalidArgument,
        InvalidType,
        LedgerInUse,
        Misuse,
        RankFailed,
        ReplayDiffers,
        TornLedger,
        Unsound,
        UnsupportedModule,
    )
    from clipless.gradients import Kernels
    from clipless.gradients.clipped_sum import clipped_sum
    from clipless.langevin import PosteriorSampler, sgld
    from clipless.phases import Schedule, schedule
    from clipless.plan import PrivacyPlan
    from clipless.preflight import CheckReport, check
    from clipless.privacy import Privacy
    from clipless.private import Private, make_private
    from clipless.replacing import Replaced, replace_batchnorm
    from clipless.runs.ledger_file import read_ledger

__version__ = "0.1.0"

_MODULE_OF = {
    "BudgetSpent": "clipless.errors",
    "CheckReport": "clipless.preflight",
    "CliplessError": "clipless.errors",
    "ClippedSum": "clipless.clipped",
    "Clipping": "clipless.clipping",
    "DamagedFile": "clipless.errors",
    "InvalidArgument": "clipless.errors",
    "InvalidType": "clipless.errors",
    "Kernels": "clipless.gradients",
    "Ledger": "clipless.accounting",
    "LedgerInUse": "clipless.errors",
    "Misuse": "clipless.errors",
    "PosteriorSampler": "clipless.langevin",
    "Privacy": "clipless.privacy",
    "PrivacyPlan": "clipless.plan",
    "Private": "clipless.private",
    "RankFailed": "clipless.errors",
    "Replaced": "clipless.replacing",
    "ReplayDiffers": "clipless.errors",
    "Schedule": "clipless.phases",
    "Spent": "clipless.accounting",
    "TornLedger": "clipless.errors",
    "Unsound": "clipless.errors",
    "UnsupportedModule": "clipless.errors",
    "abadi": "clipless.clipping",
    "auto_s": "clipless.clipping",
    "auto_v": "clipless.clipping",
    "broadcast_weights": "clipless.distributed",
    "check": "clipless.preflight",
    "clipped_sum": "clipless.gradients.clipped_sum",
    "dc_e": "clipless.clipping",
    "dc_p": "clipless.clipping",
    "decay": "clipless.clipping",
    "epsilon": "clipless.accounting",
    "global_": "clipless.clipping",
    "make_private": "clipless.private",
    "noise_multiplier": "clipless.accounting",
    "quantile": "clipless.clipping",
    "read_ledger": "clipless.runs.ledger_file",
    "replace_batchnorm": "clipless.replacing",
    "schedule": "clipless.phases",
    "sgld": "clipless.langevin",
}

__all__ = [
    "BudgetSpent",
    "CheckReport",
    "CliplessError",
    "ClippedSum",
    "Clipping",
    "DamagedFile",
    "InvalidArgument",
    "InvalidType",
    "Kernels",
    "Ledger",
    "LedgerInUse",
    "Misuse",
    "PosteriorSampler",
    "Privacy",
    "PrivacyPlan",
    "Private",
    "RankFailed",
    "Replaced",
    "ReplayDiffers",
    "Schedule",
    "Spent",
    "TornLedger",
    "Unsound",
    "UnsupportedModule",
    "abadi",
    "auto_s",
    "auto_v",
    "broadcast_weights",
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
    "schedule",
    "sgld",
]


def __getattr__(name: str) -> Any:
    """A public name or a submodule, loaded on first use."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

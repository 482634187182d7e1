"""The exceptions of clipless.

Every message says what is wrong and what to do about it. Each class also derives from the built-in exception that a
caller would expect, so `except ValueError` works without knowing clipless.
"""


class CliplessError(Exception):
    """Base class of everything clipless raises on purpose."""


class InvalidArgument(CliplessError, ValueError):
    """A value that makes no sense: epsilon <= 0, an unknown name, arguments that contradict each other."""


class InvalidType(CliplessError, TypeError):
    """An argument of the wrong type: a list where a model is expected."""


class UnsupportedModule(CliplessError, RuntimeError):
    """A module or a use of a parameter for which no bound per record exists."""


class Misuse(CliplessError, RuntimeError):
    """The training loop does something that would break the guarantee: a foreign batch, a step without its backward."""


class RankFailed(Misuse):
    """Another process of the run failed, cannot be reached or does something else, so this one cannot continue."""


class BudgetSpent(CliplessError, RuntimeError):
    """The planned number of private steps has been taken."""


class DamagedFile(CliplessError, ValueError):
    """A ledger or a checkpoint that is not what clipless wrote: damaged, cut short or edited."""


class TornLedger(DamagedFile):
    """A ledger whose last line is incomplete, as after a crash in the middle of a write."""


class LedgerInUse(CliplessError, RuntimeError):
    """Another process, or another run of this one, is writing this ledger."""


class ReplayDiffers(CliplessError, RuntimeError):
    """A repeated step does not release what it released before: the same noise would hide two different gradients."""


class Interrupted(CliplessError, RuntimeError):
    """Training was asked to stop, and stopped after a step with everything saved."""


class MissingLibrary(CliplessError, ImportError):
    """Something optional is asked for that is not installed."""


class Unsound(CliplessError, RuntimeError):
    """`clipless.check` found that the model, the loss or the engine breaks the declared sensitivity."""

"""The ledger file on the ranks that do not write it."""

from pathlib import Path

from clipless.accounting.events import Event


class FollowedJournal:
    """Counts the steps that are still to be repeated after the first rank's journal was resumed.

    The first rank checks that a repeated step equals the recorded one; if it does not, no rank shows the result.
    """

    def __init__(self, path: Path, pending: int = 0) -> None:
        self.path, self.pending = path, pending

    def place(self) -> None:
        """Returns None: only the first rank knows it."""

    def record(self, event: Event, fingerprint: str | None) -> bool:
        """Returns True for a new event, False for a repeated one, as the first rank's journal does."""
        repeated = self.pending > 0
        self.pending -= repeated
        return not repeated

    def refuse_lost(self) -> None:
        """Does nothing: the first rank looks after its file."""

    def close(self) -> None:
        """Does nothing: there is no file."""

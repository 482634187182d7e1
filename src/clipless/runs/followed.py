"""The ledger file as the ranks see it that do not write it."""

from pathlib import Path

from clipless.accounting.events import Event


class FollowedJournal:
    """Keeps count of the steps that the first rank's journal has still to see repeated after `resume`.

    Whether a repeated step is the recorded one the first rank finds out, and then no rank shows it.
    """

    def __init__(self, path: Path, pending: int = 0) -> None:
        self.path, self.pending = path, pending

    def place(self) -> None:
        """Only the first rank knows."""

    def record(self, event: Event, fingerprint: str | None) -> bool:
        """Returns True for a new event, False for a repeated one, as the first rank's journal does."""
        repeated = self.pending > 0
        self.pending -= repeated
        return not repeated

    def close(self) -> None:
        """There is no file to close."""

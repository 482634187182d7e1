"""The state of a private run in JAX, and how it is saved and resumed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipless import refusals
from clipless.errors import InvalidArgument, Misuse
from clipless.noise import NoiseSource
from clipless.plan import PrivacyPlan
from clipless.run_state import RunState
from clipless.runs.journal import Journal


class SavedGradients(RunState):
    """A run that belongs to the process that began it, with or without a ledger file."""

    def __init__(self, plan: PrivacyPlan, source: NoiseSource, allow_overspend: bool) -> None:
        super().__init__(plan, source, allow_overspend)
        self._owner, self._ended = os.getpid(), False
        self._journal: Journal | None = None

    @property
    def steps_taken(self) -> int:
        """All recorded steps, minus those that a resumed run has yet to repeat."""
        return self.ledger.steps - (self._journal.pending if self._journal else 0)

    def save_to(self, path: str | Path) -> None:
        """From now on write every event to this ledger file, which must not exist yet, before its result can be seen."""
        if self._journal:
            raise Misuse(f"the ledger is on disk already, in {self._journal.path}: a run has one ledger.")
        plan = self.plan
        self._journal = Journal.create(
            Path(path), plan.delta, plan.accountant, plan.planned(), plan.to_dict(), self.ledger
        )

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from, for pickle or torch.save; save parameters and optimizer state beside it.

        It holds the key of all later noise: keep it as secret as the data.
        """
        if self._batch is not None:
            raise Misuse("state_dict() in the middle of a batch: save after update().")
        if self._journal:
            self._journal.refuse_lost()
        return self._state() | {"ledger_file": self._journal.place() if self._journal else None}

    def load_state_dict(self, state: Mapping[str, Any], ledger: str | Path | None = None) -> None:
        """Resume in a fresh `make_private` with the same arguments.

        A run with a ledger file needs it here, as `ledger`: steps taken after the state was saved are then repeated at no
        cost, and each must release what it released before.

        Without a file never resume twice from one state: the same noise would be added to two different gradients.
        """
        refusals.refuse_begun(self._batch, self.ledger.steps, self._journal)
        refusals.refuse_other_plan(dict(state), self.plan.to_dict())
        place = state.get("ledger_file")
        if (place is None) != (ledger is None):
            raise InvalidArgument(
                "the state was saved with a ledger file: give ledger=, its path."
                if ledger is None
                else "the state was saved without a ledger file: leave ledger= out, and call save_to() afterwards."
            )
        found = None
        if place is not None and ledger is not None:
            self._journal, found = Journal.resume(Path(ledger), place["run"], place["position"], place["head"])
        self._take_state(dict(state))
        if found is not None:
            self.ledger = found.recorded()
        self._go_on(self.steps_taken, self._policy_state)

    def detach(self) -> None:
        """End the run: its keys are erased and its ledger file is closed."""
        self._batch, self._ended = None, True
        self._source.erase()
        if self._journal:
            self._journal.close()

    def _refuse_ended(self) -> None:
        """Raises after `detach`, and in a forked process."""
        if self._ended:
            raise Misuse("the run was detached and its keys are erased: call make_private again.")
        if os.getpid() != self._owner:
            raise Misuse(
                "this process was forked after make_private, and both would draw the same noise: call make_private in the "
                "process that trains."
            )

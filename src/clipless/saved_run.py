"""The state of a private run, in memory and on disk: what changes from step to step, how it is saved and resumed."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from clipless import refusals
from clipless.accounting import Ledger, StepEvent
from clipless.distributed import Alone, Ranks, one_digest, optimizer_settings
from clipless.errors import Misuse, RankFailed
from clipless.noise import NoiseSource
from clipless.plan import PrivacyPlan
from clipless.run_state import RunState
from clipless.runs.checkpoint import checkpoint_of, random_states, read_checkpoint
from clipless.runs.fingerprint import fingerprint
from clipless.runs.followed import FollowedJournal
from clipless.runs.journal import Journal
from clipless.runs.ledger_file import LedgerFile
from clipless.runs.shard_folder import refuse_damaged_shards, remove_old_shards

if TYPE_CHECKING:
    from clipless.distributed.saving import States
    from clipless.distributed.shards import Sharded


class Removable(Protocol):
    """Something registered on the model or the optimizer that can be removed."""

    def remove(self) -> None: ...


class SavedRun(RunState):
    """A run of a model and an optimizer, and how it is saved. `_handles` is empty before the run is attached and after it is
    detached."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: PrivacyPlan,
        source: NoiseSource,
        allow_overspend: bool,
        ranks: Alone | Ranks,
        shards: "Sharded | None",
    ) -> None:
        super().__init__(plan, source, allow_overspend)
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._shards = shards
        self._journal: Journal | FollowedJournal | None = None
        self._handles: list[Removable] = []

    @property
    def ledger_file(self) -> dict[str, Any] | None:
        """The id of the ledger file (`run`), its number of events (`position`), and its last hash (`head`). Kept elsewhere,
        it shows whether a ledger was cut or rewritten. None without a file, and on every rank but the first, which writes
        it."""
        return self._journal.place() if self._journal else None

    def _digests(self, gradients: Mapping[str, Tensor], statistic: Tensor | None) -> str:
        """Digests of what this rank releases, and of what must be the same on all ranks even of a sharded model: thresholds,
        statistic, and settings of the optimizer, such as the learning rate. At steps 1, 2, 4, 8 and so on the weights are
        among it, unless they are sharded: ranks may have changed their own."""
        shared, step = [] if statistic is None else [statistic], self.ledger.steps + 1
        compared = self._ranks.size > 1 and self._shards is None and step & (step - 1) == 0
        weights = self._model.parameters() if compared else ()
        settings = "".join(optimizer_settings(self._optimizer)) if self._ranks.size > 1 else ""
        same = fingerprint([self._thresholds, *weights, *shared]) + hashlib.sha256(settings.encode()).hexdigest()[:32]
        return f"{fingerprint([*gradients.values(), *shared])} {same}"

    def _record(self, where: str, event: StepEvent, told: Sequence[str]) -> None:
        """Refuse a release that is not the same on all ranks, and record the event, on disk if there is a ledger file. A
        repeated step is there already, and must equal the one recorded."""
        released = one_digest(where, told, sharded=self._shards is not None and len(told) > 1)
        if self._journal is None:
            self.ledger.record(event)
            return
        with self._ranks.together(where):
            if self._journal.record(event, released):
                self.ledger.record(event)

    def save_to(self, path: str | Path) -> None:
        """From now on write every event to this ledger file, which must not exist yet, before its result can be seen.

        Steps already taken are written first. `clipless report` reads the file; docs/ledger.md says what it guarantees.
        """
        made: Journal | FollowedJournal | None = None
        try:
            with self._ranks.together("save_to"):
                if self._journal:
                    raise Misuse(f"the ledger is on disk already, in {self._journal.path}: a run has one ledger.")
                made = self._create_journal(Path(path)) if self._ranks.rank == 0 else FollowedJournal(Path(path))
        except RankFailed:
            if isinstance(made, Journal):
                made.close()
                made.path.unlink()
            raise
        self._journal = made

    def _create_journal(self, path: Path) -> Journal:
        plan = self.plan
        return Journal.create(path, plan.delta, plan.accountant, plan.planned(), plan.to_dict(), self.ledger)

    def save_checkpoint(self, path: str | Path, extra: Any = None) -> None:
        """Write weights, optimizer, random states, `extra` and the run's state to one file, atomically. The tensors of a
        sharded model are written to a folder beside it first.

        `extra` may hold tensors and plain values, such as a scheduler's state_dict(). The file holds the key of all later
        noise: keep it as secret as the data, and remove it when the run has ended. Needs a ledger on disk (`save_to`),
        which belongs to the checkpoint.
        """
        with self._ranks.together("save_checkpoint"):
            if self._journal is None or not self._handles:
                raise Misuse(
                    "a checkpoint needs its ledger on disk: call save_to(path) first, and save before detach()."
                )
            self._journal.refuse_lost()
            state, place = self.state_dict(), Path(path)
            states = self._model.state_dict(), self._optimizer.state_dict()
        _, *others = self._ranks.gathered(random_states())
        states, shards = self._saved_shards(place, states)
        with self._ranks.together("save_checkpoint"):
            if isinstance(self._journal, Journal):
                saved = checkpoint_of(place, self._journal, self._optimizer, states, state, extra, others, shards)
                saved.write(place)
                remove_old_shards(place, kept=shards)

    def _saved_shards(self, path: Path, states: "States") -> tuple["States", dict[str, Any] | None]:
        """Write sharded tensors to disk. Returns the states without them, and what the checkpoint has to say of them."""
        if self._shards is None:
            return states, None
        from clipless.distributed.saving import save_shards

        return save_shards(path, states, self._ranks)

    def load_checkpoint(self, path: str | Path, *, ledger: str | Path | None = None, reseed: bool = False) -> Any:
        """Resume from a checkpoint, in a fresh `make_private` with the same arguments. Returns the checkpoint's `extra`.

        The ledger is expected where it was relative to the checkpoint, or at `ledger`. Steps that were taken after the
        checkpoint are repeated at no cost, and each must release what it released before. With `reseed` they stay counted
        instead, and the run continues with new noise and ends that much earlier.
        If anything is refused, nothing has been changed.
        """
        ranks, journal, found = self._ranks, None, None
        with ranks.together("load_checkpoint"):
            refusals.refuse_begun(self._batch, self.ledger.steps, self._journal)
            saved = read_checkpoint(Path(path))
            refusals.refuse_other_plan(saved.private, self.plan.to_dict())
            saved.refuse_unfit(self._model, self._optimizer)
            where = saved.ledger_path(Path(path)) if ledger is None else Path(ledger)
            if saved.shards:
                refuse_damaged_shards(saved.shards, Path(path), ranks.rank, ranks.size)
        ranks.same("load_checkpoint", f"{saved.position} {saved.head}")
        with ranks.together("load_checkpoint"):
            if ranks.rank == 0:
                journal, found = Journal.resume(where, saved.run, saved.position, saved.head)
            if saved.shards or self._shards:
                from clipless.distributed.saving import placed_as

                saved = placed_as(saved, Path(path), self._model, self._optimizer)
        saved.restore(self._model, self._optimizer, ranks.rank)
        self._follow(saved.private, where, journal, found, reseed)
        return saved.extra

    def resumable_state(self) -> dict[str, Any]:
        """What `resume` needs, as tensors and plain values, for a trainer that saves weights and optimizer itself:
        `state_dict()`, the place in the ledger on disk, and the random states of all ranks. A call for every rank."""
        with self._ranks.together("resumable_state"):
            if self._journal is None or not self._handles:
                raise Misuse(
                    "a checkpoint needs its ledger on disk: call save_to(path) first, and save before detach()."
                )
            self._journal.refuse_lost()
            state, place, path = self.state_dict(), self._journal.place(), str(self._journal.path.absolute())
        place = self._ranks.shared(place)
        return {"private": state, "place": place, "path": path, "random": self._ranks.gathered(random_states())}

    def resume(
        self, state: Mapping[str, Any], *, ledger: str | Path | None = None, reseed: bool = False
    ) -> dict[str, Any] | None:
        """Resume from a `resumable_state`, in a fresh `make_private` with the same arguments, as `load_checkpoint` does;
        the caller restores weights and optimizer. Returns this rank's random states, for `set_random_states` when the rest
        is restored; None if there are none for it. The ledger is expected where it was, or at `ledger`."""
        ranks, journal, found = self._ranks, None, None
        with ranks.together("resume"):
            refusals.refuse_begun(self._batch, self.ledger.steps, self._journal)
            refusals.refuse_other_plan(state["private"], self.plan.to_dict())
            where = Path(state["path"] if ledger is None else ledger)
        ranks.same("resume", f"{state['place']['position']} {state['place']['head']}")
        with ranks.together("resume"):
            if ranks.rank == 0:
                journal, found = Journal.resume(where, **state["place"])
        self._follow(state["private"], where, journal, found, reseed)
        return state["random"][ranks.rank] if ranks.rank < len(state["random"]) else None

    def _follow(
        self, state: dict[str, Any], where: Path, journal: Journal | None, found: LedgerFile | None, reseed: bool
    ) -> None:
        """Go on from a saved state by the ledger on disk, which only the first rank has read."""
        ranks = self._ranks
        self.load_state_dict(state)
        with ranks.together("resuming"):
            if reseed and journal and found:
                journal.give_up_pending(found)
        pending = ranks.shared(journal.pending if journal else 0)
        events = ranks.shared((found.ledger() if reseed else found.recorded()).to_dict() if found else {})
        self.ledger = Ledger.from_dict(events)
        self._journal = journal or FollowedJournal(where, pending)
        self._go_on(self.ledger.steps - self._journal.pending, self._policy_state)
        if reseed:
            self._source.renew(self.ledger.steps - self._journal.pending, self.loader.draws)
            self._source.load_state_dict(ranks.shared(self._source.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        """The state to resume the run from. It holds the key of all later noise: keep it as secret as the data."""
        if self._batch is not None:
            raise Misuse("state_dict() in the middle of a batch: save after optimizer.step().")
        return self._state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; the caller restores weights and optimizer. The plan must be the same.

        Never resume twice from one state: the same noise would be added to two different gradients. `load_checkpoint`
        prevents that by the ledger on disk.
        """
        refusals.refuse_begun(self._batch, self.ledger.steps, self._journal)
        self._take_state(state)

"""The state of a private run, in memory and on disk: what changes from step to step, how it is saved and resumed."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from clipless import refusals
from clipless.accounting import Ledger, Spent, StepEvent
from clipless.distributed import Alone, Ranks
from clipless.errors import Misuse, RankFailed
from clipless.noise import NoiseSource
from clipless.phases import Phase
from clipless.plan import PrivacyPlan
from clipless.runs.checkpoint import checkpoint_of, random_states, read_checkpoint
from clipless.runs.fingerprint import fingerprint
from clipless.runs.followed import FollowedJournal
from clipless.runs.journal import Journal
from clipless.runs.shard_folder import refuse_damaged_shards, remove_old_shards
from clipless.sampling.loader import Batch, PrivateLoader
from clipless.thresholds.history import History
from clipless.thresholds.policy import State

if TYPE_CHECKING:
    from clipless.distributed.saving import States
    from clipless.distributed.shards import Sharded


class Removable(Protocol):
    """Something registered on the model or the optimizer that can be removed."""

    def remove(self) -> None: ...


class SavedRun(refusals.Uncopyable):
    """The part of a run that is saved: the ledger, the policy's state, the keys of the noise, the number of draws.

    `_noise` caches the event and the standard deviations of a step until the policy's state changes; `_handles` is empty
    before the run is attached and after it is detached.
    """

    loader: PrivateLoader

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: PrivacyPlan,
        source: NoiseSource,
        ranks: Alone | Ranks,
        shards: "Sharded | None",
    ) -> None:
        self.plan = plan
        self.ledger = Ledger()
        self.history = History()
        self._model, self._optimizer, self._source, self._ranks = model, optimizer, source, ranks
        self._shards = shards
        self._batch: Batch | None = None
        self._journal: Journal | FollowedJournal | None = None
        self._handles: list[Removable] = []
        self._policy_state: State = {}
        self._thresholds: Tensor
        self._noise: tuple[StepEvent, list[float]] | None
        self._phase = plan.phases[0]
        self._set_policy(plan.clipping.policy.init(plan.setting))

    def _set_policy(self, state: State) -> None:
        self._policy_state, self._thresholds = state, self._phase.clipping.policy.thresholds(state)
        self._noise = None

    def _go_on(self, step: int, state: State) -> None:
        """The policy's state before that step; from its beginning where another policy set the thresholds so far."""
        before, self._phase = self._phase, self.plan.phase(step)
        begins = self._phase.span != before.span
        self._set_policy(self._phase.clipping.policy.init(self._phase.setting) if begins else state)

    def _note(self, phase: Phase, statistic: Tensor | None) -> None:
        """Keep what was released after a step of a phase. Where policies change, what is not thresholds is kept under the
        number of its phase, counted from 1."""
        state = self._policy_state
        if self.plan.phases[-1].span:
            own = {f"{name} (phase {self._phase.number + 1})": value for name, value in state.items()}
            state = {"thresholds": self._thresholds, **{k: v for k, v in own.items() if not k.startswith("thresholds")}}
            if statistic is not None:
                state[f"statistic (phase {phase.number + 1})"], statistic = statistic, None
        self.history.append(state, statistic)

    @property
    def epochs(self) -> int:
        """Passes over `loader` in the plan."""
        return self.plan.steps // self.plan.steps_per_pass

    @property
    def ledger_file(self) -> dict[str, Any] | None:
        """The id of the ledger file (`run`), its number of events (`position`), and its last hash (`head`). Kept elsewhere,
        it shows whether a ledger was cut or rewritten. None without a file, and on every rank but the first, which writes
        it."""
        return self._journal.place() if self._journal else None

    @property
    def thresholds(self) -> Tensor:
        """The current thresholds, one row per group, [G,1]. They are constants or released values: safe to show."""
        return self._thresholds.clone()

    def spent(self) -> Spent:
        """The privacy spent so far, computed from the events in the ledger."""
        return self.ledger.spent(self.plan.delta, self.plan.accountant)

    def _is_new(self, step: int, event: StepEvent, gradients: Mapping[str, Tensor], statistic: Tensor | None) -> bool:
        """Refuse a release that is not the same on all ranks, and write the event to the ledger file, if there is one. False
        for a repeated step, which must equal the one recorded there."""
        where, shared = f"the release of step {step + 1}", [] if statistic is None else [statistic]
        released = fingerprint([*gradients.values(), *shared])
        if self._shards and self._ranks.size > 1:  # the digests of all shards, by rank
            released = hashlib.sha256("".join(self._ranks.told(where, released)).encode()).hexdigest()[:32]
        self._ranks.same(where, f"{released} {fingerprint([self._thresholds, *shared])}")
        return self._journal is None or self._journal.record(event, released)

    def save_to(self, path: str | Path) -> None:
        """From now on write every event to this ledger file, which must not exist yet, before its result can be seen.

        Steps already taken are written first. `clipless report` reads the file; docs/ledger.md says what it guarantees.
        """
        made: Journal | FollowedJournal | None = None
        try:
            with self._ranks.together("save_to"):
                if self._journal:
                    raise Misuse(f"the ledger is on disk already, in {self._journal.path}: a run has one ledger.")
                made = self._created(Path(path)) if self._ranks.rank == 0 else FollowedJournal(Path(path))
        except RankFailed:
            if isinstance(made, Journal):
                made.close()
                made.path.unlink()
            raise
        self._journal = made

    def _created(self, path: Path) -> Journal:
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
        self.load_state_dict(saved.private)
        with ranks.together("load_checkpoint"):
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
        return saved.extra

    def state_dict(self) -> dict[str, Any]:
        """The state to resume the run from. It holds the key of all later noise: keep it as secret as the data."""
        if self._batch is not None:
            raise Misuse("state_dict() in the middle of a batch: save after optimizer.step().")
        return {
            "plan": self.plan.to_dict(),
            "ledger": self.ledger.to_dict(),
            "phase": self._phase.number,
            "policy": {name: value.clone() for name, value in self._policy_state.items()},
            "history": self.history.state_dict(),
            "draws": self.loader.draws,
            "noise": self._source.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; the caller restores weights and optimizer. The plan must be the same.

        Never resume twice from one state: the same noise would be added to two different gradients. `load_checkpoint`
        prevents that by the ledger on disk.
        """
        refusals.refuse_begun(self._batch, self.ledger.steps, self._journal)
        refusals.refuse_other_plan(state, self.plan.to_dict())
        self._source.load_state_dict(state["noise"])
        self.ledger = Ledger.from_dict(state["ledger"])
        self._phase = self.plan.phases[state.get("phase", 0)]
        self._set_policy({name: value.clone() for name, value in state["policy"].items()})
        self.history = History.from_state_dict(state["history"])
        self.loader.draws = state["draws"]

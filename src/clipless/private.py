"""make_private: the one place where the parts meet, and one private step from top to bottom."""

import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.hooks import RemovableHandle

from clipless import refusals
from clipless.accounting import Ledger, Spent
from clipless.accounting.journal import Journal
from clipless.checkpoint import capture, read_checkpoint
from clipless.clipping import Clipping, as_clipping
from clipless.errors import Misuse
from clipless.fetching import Fetcher, fetcher, source_of
from clipless.fingerprint import fingerprint
from clipless.foreign import names_answered
from clipless.grads import Engine, Tuner, as_tuner
from clipless.noise import NoiseSource, noise_source
from clipless.partition import partition
from clipless.plan import PrivacyPlan, make_plan
from clipless.preflight import refuse_unsound
from clipless.processes import refuse_processes
from clipless.sampling import Batch, PoissonSampler, PrivateLoader
from clipless.stepping import Arguments, Guard, clear_gradients, within_own_step
from clipless.thresholds.history import History

_ATTACHED: "weakref.WeakSet[nn.Module | Optimizer]" = weakref.WeakSet()


@names_answered
def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Dataset[Any] | DataLoader[Any],
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    clipping: str | Clipping = "auto-s",
    accountant: str = "pld",
    loss_reduction: str = "mean",
    noise: str = "torch",
    seed: int | None = None,
    allow_overspend: bool = False,
    tuner: str | Tuner = "model",
    check: tuple[Callable[[nn.Module, Any], Tensor], Any] | None = None,
    group: bool | None = None,
) -> "Private":
    """Make an ordinary training loop differentially private: `optimizer.step()` then releases noised gradients only.

    Give `epsilon` or `noise_multiplier`, `epochs` or `steps`, and the expected `batch_size`; without `delta` it is
    N**-1.1. Train on `private.loader`. Model and optimizer stay what they are and get hooks, which `detach()` removes.
    `check=(loss_fn, batch)` runs `clipless.check` first, which raises `Unsound` for a model or loss that mixes records.
    `tuner="time"` times the exact ways to each layer's share instead of modelling their cost (docs/performance.md).
    Several processes are refused; `group=False` says that this one trains alone, whatever torchrun says.
    If anything is refused, nothing has been changed.
    """
    refuse_processes(model, group)
    data, own_batch_size, settings = source_of(dataset)
    parameters = refusals.trainable(model)
    refusals.refuse_optimizer(optimizer, parameters)
    refusals.refuse_attached((*model.modules(), optimizer), _ATTACHED)
    refusals.refuse_unclear("allow_overspend", allow_overspend)
    batch_size = refusals.one_batch_size(batch_size, own_batch_size)
    how = as_clipping(clipping)
    groups = partition(how.groups, parameters)
    plan = make_plan(
        dataset_size=len(data),  # type: ignore[arg-type]
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        accountant=accountant,
        clipping=how,
        groups=groups,
        dimensions=tuple(sum(parameters[name].numel() for name in members) for members in groups.members),
        loss_reduction=loss_reduction,
        noise=noise,
    )
    if check is not None:
        refuse_unsound(model, check, how, loss_reduction)
    source = noise_source(noise, seed)
    return Private(model, optimizer, plan, fetcher(data, settings), source, as_tuner(tuner), allow_overspend, group)


class Private(refusals.Whole):
    """A training run under a privacy plan. Made by `make_private`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: PrivacyPlan,
        fetch: Fetcher,
        source: NoiseSource,
        tuner: Tuner,
        allow_overspend: bool,
        group: bool | None,
    ) -> None:
        self.plan = plan
        self.ledger = Ledger()
        self.history = History()
        self._model, self._optimizer, self._source = model, optimizer, source
        self._allow_overspend, self._guard = allow_overspend, Guard(optimizer, group)
        self._batch: Batch | None = None
        self._statistic: Tensor | None = None
        self._journal: Journal | None = None
        self._policy_state = plan.clipping.policy.init(plan.setting)
        self._engine = Engine(model, plan.groups, self._factors, self._observe, tuner)
        self._engine.tape.self_check.active = True
        sampler = PoissonSampler(source, plan.dataset_size, plan.sample_rate)
        self.loader = PrivateLoader(fetch, sampler, plan.steps_per_pass, self)
        self._handles: list[RemovableHandle | Guard] = []
        self._attach()

    @property
    def epochs(self) -> int:
        """Passes over `loader` in the plan."""
        return self.plan.steps // self.plan.steps_per_pass

    @property
    def steps_taken(self) -> int:
        """Steps behind the present weights: all that are recorded, less those that a resumed run has yet to repeat."""
        return self.ledger.steps - (self._journal.pending if self._journal else 0)

    @property
    def ledger_file(self) -> dict[str, Any] | None:
        """Which ledger file this is (`run`), how many events it has (`position`), and its last hash (`head`): keep it
        elsewhere, and a ledger that was cut or written anew can be told from the true one. None without a file."""
        return self._journal.place() if self._journal else None

    @property
    def thresholds(self) -> Tensor:
        """The current thresholds, one row per group, [G,1]. They are constants or released values: safe to show."""
        return self.plan.clipping.policy.thresholds(self._policy_state).clone()

    def spent(self) -> Spent:
        """The privacy spent so far, computed from the events in the ledger."""
        return self.ledger.spent(self.plan.delta, self.plan.accountant)

    def detach(self) -> None:
        """Remove every hook: model and optimizer are ordinary again, and no longer private. A second call does nothing."""
        if not self._handles:
            return
        self._engine.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._batch = None
        if self._journal:
            self._journal.close()
        _ATTACHED.difference_update(self._engine.tape.modules)
        _ATTACHED.discard(self._optimizer)

    def _attach(self) -> None:
        self._engine.tape.attach()
        self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(self._guard.attach(self._engine.tape.parameters))
        _ATTACHED.update(self._engine.tape.modules)
        _ATTACHED.add(self._optimizer)

    # What the loader announces.

    def steps_left(self) -> int | None:
        """Steps until the budget is spent, None if overspending is allowed; raises `BudgetSpent` when there are none."""
        if self._allow_overspend:
            return None
        if self.steps_taken >= self.plan.steps:
            raise refusals.budget_spent(self.plan.steps, self.spent())
        return self.plan.steps - self.steps_taken

    def refuse_unstepped(self) -> None:
        """Raises if the batch that was handed out last has not been stepped."""
        refusals.refuse_unstepped(self._batch is not None, self._engine.seen)

    def open_batch(self, batch: Batch) -> None:
        """A new logical batch begins."""
        self._guard.before_batch(first=not self.ledger.steps)
        self.refuse_unstepped()
        refusals.refuse_foreign_batch(batch, self.plan)
        self._begin(batch if self._handles else None)

    def reopen_batch(self) -> None:
        """The open batch begins anew."""
        if self._batch is None:
            raise Misuse("there is no batch to hand out again: the last one was stepped, so go on with private.loader.")
        self._begin(self._batch)

    def _begin(self, batch: Batch | None) -> None:
        """Nothing has been added up, for this batch or for none."""
        self._engine.clear()
        self._batch, self._statistic = batch, None

    def open_part(self, records: int) -> None:
        """The records of the next forward and backward pass."""
        averaged = self.plan.loss_reduction == "mean"
        self._engine.open(records, records if averaged else 1, averaged)

    # One step.

    def backward(self, losses: Tensor) -> None:
        """From one loss per record, (B,): nothing is left to be misstated, and losses that couple records are refused."""
        self._engine.backward(refusals.one_per_record(losses, self._engine.tape.part))

    def _factors(self, norms: Tensor, groups: Sequence[int]) -> Tensor:
        """How much of some records enters these groups' sums over the expected batch, [g,b]."""
        thresholds = self.plan.clipping.policy.thresholds(self._policy_state)[groups].to(norms)
        return self.plan.clipping.rule(norms, thresholds) / self.plan.expected_batch

    def _observe(self, norms: Tensor) -> None:
        """Add up the policy's statistic over the parts of the batch."""
        observed = self.plan.clipping.policy.observe(self._policy_state, norms)
        if observed is not None:
            self._statistic = observed if self._statistic is None else self._statistic + observed

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Turn the clipped sum into the private gradient that the optimizer reads. If that fails the batch is gone."""
        if self._batch is None and within_own_step(optimizer):
            return None
        self.steps_left()
        arguments = self._guard.before_step(args, kwargs)
        self._refuse_step()
        try:
            self._release(self.steps_taken)
        finally:
            self._begin(None)
        return arguments

    def _release(self, step: int) -> None:
        """Noised, recorded, then shown."""
        gradients = self._noised_gradients(step)
        statistic = self._noised_statistic(step)
        self._record(step, gradients, statistic)
        for name, parameter in self._engine.tape.parameters.items():
            parameter.grad = gradients[name] if parameter.requires_grad else None
        clear_gradients(self._optimizer, but=self._engine.tape.parameters.values())
        self._policy_state = self.plan.clipping.policy.update(self._policy_state, statistic, self.plan.setting)
        self.history.append(self._policy_state, statistic)

    def _noised_gradients(self, step: int) -> dict[str, Tensor]:
        """The clipped sum over the expected batch with noise, for each parameter: tensors of their own, every time."""
        sums, parameters = self._engine.complete(), self._engine.tape.parameters
        thresholds = self.plan.clipping.policy.thresholds(self._policy_state)
        by_group = (self.plan.stddevs(step, thresholds).flatten() / self.plan.expected_batch).tolist()
        stddevs = [by_group[self.plan.groups.group_of[name]] for name in parameters]
        released = self._source.release("gradient", step, list(sums.values()), stddevs)
        return {name: noised.to(p.dtype) for (name, p), noised in zip(parameters.items(), released, strict=True)}

    def _noised_statistic(self, step: int) -> Tensor | None:
        """The batch's statistic with noise; None if the policy needs none."""
        if self.plan.statistic_multiplier is None:
            return None
        if self._statistic is None:
            self._observe(torch.zeros(len(self.plan.groups), 0))
        assert self._statistic is not None
        (noised,) = self._source.release("statistic", step, [self._statistic], [self.plan.statistic_multiplier])
        return noised

    def _record(self, step: int, gradients: Mapping[str, Tensor], statistic: Tensor | None) -> None:
        """Write the step down, on disk if there is a ledger file. A repeated step must be the one written there."""
        event = self.plan.event(step)
        if self._journal:
            released = [*gradients.values(), *([] if statistic is None else [statistic])]
            if not self._journal.record(event, fingerprint(released)):
                return
        self.ledger.record(event)

    def _refuse_step(self) -> None:
        refusals.refuse_incomplete(self._engine.seen, None if self._batch is None else self._batch.records)
        if not self._engine.tape.intact():
            raise Misuse("the model's hooks were removed: call detach() and make_private anew.")
        self._engine.tape.restore()
        refusals.refuse_changed_parameters(self._model, self._optimizer, self._engine.tape.parameters)
        self._engine.refuse_unsound()

    # State, in memory and on disk.

    def save_to(self, path: str | Path) -> None:
        """From now on write every event to this ledger file, which must not exist yet, before its result can be seen.

        Steps already taken are written first. `clipless report` reads the file; docs/ledger.md tells what it promises.
        """
        if self._journal:
            raise Misuse(f"the ledger is on disk already, in {self._journal.path}: a run has one ledger.")
        plan, past = self.plan, self.ledger
        self._journal = Journal.create(Path(path), plan.delta, plan.accountant, plan.planned(), plan.to_dict(), past)

    def save_checkpoint(self, path: str | Path, extra: Any = None) -> None:
        """Write weights, optimizer, random states, `extra` and the run's state to one file, in one move.

        `extra` may hold tensors and plain values, such as a scheduler's state_dict(). The file holds the seed of the
        noise: keep it as secret as the data. Needs a ledger on disk (`save_to`), which belongs to the checkpoint.
        """
        if self._journal is None or not self._handles:
            raise Misuse("a checkpoint needs its ledger on disk: call save_to(path) first, and save before detach().")
        capture(Path(path), self._journal, self._model, self._optimizer, self.state_dict(), extra).write(Path(path))

    def load_checkpoint(self, path: str | Path, *, ledger: str | Path | None = None, reseed: bool = False) -> Any:
        """Go on from a checkpoint, in a fresh `make_private` with the same arguments, and return its `extra`.

        The ledger is taken from where it lay beside the checkpoint, or from `ledger`. Steps that were taken after the
        checkpoint are repeated at no cost, and each must release what it released before. With `reseed`, or a noise
        source that cannot repeat itself, they stay counted and the run goes on with new noise, ending that much earlier.
        If anything is refused, nothing has been changed.
        """
        refusals.refuse_begun(self._batch, self.ledger.steps, self._journal)
        saved = read_checkpoint(Path(path))
        refusals.refuse_other_plan(saved.private, self.plan.to_dict())
        saved.refuse_unfit(self._model, self._optimizer)
        where = saved.ledger_path(Path(path)) if ledger is None else Path(ledger)
        journal, found = Journal.resume(where, saved.run, saved.position, saved.head)
        saved.restore(self._model, self._optimizer)
        self.load_state_dict(saved.private)
        repeats = self._source.replayable and not reseed
        if not repeats:
            journal.give_up_pending(found)
            self._source.seed = secrets.randbits(128) if self._source.replayable else None
        self.ledger = found.recorded() if repeats else found.ledger()
        self._journal = journal
        return saved.extra

    def state_dict(self) -> dict[str, Any]:
        """What the run needs to go on later. It holds the seed of the noise: keep it as secret as the data."""
        if self._batch is not None:
            raise Misuse("state_dict() in the middle of a batch: save after optimizer.step().")
        return {
            "plan": self.plan.to_dict(),
            "ledger": self.ledger.to_dict(),
            "policy": {name: value.clone() for name, value in self._policy_state.items()},
            "history": self.history.state_dict(),
            "draws": self.loader.draws,
            "seed": self._source.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, with weights and optimizer restored by the caller. The plan must be the same.

        Never go on twice from one state: the same noise would hide two different gradients. `load_checkpoint` sees to
        that, with a ledger on disk.
        """
        refusals.refuse_begun(self._batch, self.ledger.steps, self._journal)
        refusals.refuse_other_plan(state, self.plan.to_dict())
        self.ledger = Ledger.from_dict(state["ledger"])
        self._policy_state = {name: value.clone() for name, value in state["policy"].items()}
        self.history = History.from_state_dict(state["history"])
        self.loader.draws = state["draws"]
        self._source.seed = state["seed"]

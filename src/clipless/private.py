"""make_private: the one place where the parts meet, and one private step from top to bottom."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from clipless import refusals
from clipless.clipping import Clipping, as_clipping
from clipless.closures import Arguments, within_own_step
from clipless.distributed import Alone, Idle, Ranks, facts, is_sharded, on_every_rank, ranks_of, shards_of, unwrapped
from clipless.errors import InvalidType, Misuse
from clipless.foreign import names_answered
from clipless.gradients import Engine, Kernels
from clipless.noise import NoiseSource, chosen_noise, noise_source
from clipless.partition import partition
from clipless.plan import PrivacyPlan, make_plan
from clipless.preflight import refuse_unsound
from clipless.sampling.fetching import Fetcher, fetcher, source_of
from clipless.sampling.loader import Batch, PoissonSampler, PrivateLoader
from clipless.saved_run import SavedRun
from clipless.stepping import Guard, clear_gradients, unstepped

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
    noise: str | None = None,
    seed: int | None = None,
    allow_overspend: bool = False,
    kernels: Kernels | None = None,
    check: tuple[Callable[[nn.Module, Any], Tensor], Any] | None = None,
    group: ProcessGroup | bool | None = None,
) -> "Private":
    """Make an ordinary training loop differentially private: `optimizer.step()` then releases noised gradients only.

    Give `epsilon` or `noise_multiplier`, `epochs` or `steps`, and the expected `batch_size`; without `delta` it is
    N**-1.1. Train on `private.loader`. Model and optimizer stay what they are and get hooks, which `detach()` removes.
    `check=(loss_fn, batch)` runs `clipless.check` first, which raises `Unsound` for a model or loss that mixes records.
    `kernels=clipless.Kernels(memory_cap=...)` bounds the memory that private training takes over plain training.
    Noise is secure, or repeatable where a `seed` is given, which then must stay secret (docs/noise.md).
    Several processes train one run together where torch.distributed is initialised, or in the `group` given
    (docs/distributed.md); `group=False` says that this process trains alone, whatever torchrun says.
    If anything is refused, nothing has been changed.
    """
    ranks = ranks_of(group)
    with ranks.together("make_private"):
        model, idle = unwrapped(model, group)
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
            noise=chosen_noise(noise, seed),
        )
        if kernels is not None and not isinstance(kernels, Kernels):
            raise InvalidType(f"kernels must be clipless.Kernels(memory_cap=...) or None, got {kernels!r}.")
        if check is not None and is_sharded(model):
            raise Misuse("check= runs the model in one process: call clipless.check(...) before fully_shard.")
        if check is not None:
            refuse_unsound(model, check, how, loss_reduction)
        source = noise_source(noise, seed)
    if ranks.size > 1:
        ranks.refuse_differences(lambda: facts(model, optimizer, plan.to_dict(), seed, allow_overspend=allow_overspend))
        source.load_state_dict(ranks.shared(source.state_dict()))
    ranks = ranks.apart() if is_sharded(model) else ranks
    fetch, kernels = fetcher(data, settings), kernels or Kernels()
    return on_every_rank(
        ranks,
        lambda: Private(model, optimizer, plan, fetch, source, kernels, allow_overspend, group, ranks, idle),
    )


class Private(SavedRun):
    """A training run under a privacy plan. Made by `make_private`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: PrivacyPlan,
        fetch: Fetcher,
        source: NoiseSource,
        kernels: Kernels,
        allow_overspend: bool,
        group: object,
        ranks: Alone | Ranks,
        idle: Idle,
    ) -> None:
        super().__init__(model, optimizer, plan, source, ranks, shards_of(model, ranks))
        self._idle = idle
        self._allow_overspend, self._guard = (
            allow_overspend,
            Guard(model, optimizer, None if group is None and ranks.size == 1 else False),
        )
        self._statistic: Tensor | None = None
        self._engine = Engine(
            model,
            plan.groups,
            self._factors,
            None if plan.statistic_multiplier is None else self._observe,
            kernels,
            plan.expected_batch,
            checks_itself=True,
            shards=self._shards,
        )
        share = (ranks.rank, ranks.size)
        sampler = PoissonSampler(
            source, plan.dataset_size, plan.sample_rate, share=share, in_step=self._shards is not None
        )
        self.loader = PrivateLoader(fetch, sampler, plan.steps_per_pass, self)
        self._attach()

    @property
    def steps_taken(self) -> int:
        """Steps behind the present weights: all that are recorded, less those that a resumed run has yet to repeat."""
        return self.ledger.steps - (self._journal.pending if self._journal else 0)

    def detach(self) -> None:
        """Remove every hook and erase the keys of the noise: model and optimizer are ordinary again, and no longer private.
        A second call does nothing."""
        if not self._handles:
            return
        self._engine.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._batch = None
        self._source.erase()
        if self._journal:
            self._journal.close()
        _ATTACHED.difference_update(self._engine.modules)
        _ATTACHED.discard(self._optimizer)

    def _attach(self) -> None:
        self._engine.attach()
        self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(self._guard.attach(self._engine.parameters))
        self._handles.append(self._idle.attach())
        _ATTACHED.update(self._engine.modules)
        _ATTACHED.add(self._optimizer)

    # What the loader announces.

    def steps_left(self) -> int | None:
        """Steps until the budget is spent, None if overspending is allowed; raises `BudgetSpent` when there are none."""
        if self._allow_overspend:
            return None
        left = self.plan.steps - self.steps_taken
        if left <= 0:
            raise refusals.budget_spent(self.plan.steps, self.spent())
        return left

    def refuse_unstepped(self) -> None:
        """Raises if the batch that was handed out last has not been stepped."""
        if self._batch is not None:
            raise unstepped(self._engine.seen)

    def open_batch(self, batch: Batch) -> None:
        """A new logical batch begins; the last one was stepped."""
        self._guard.before_batch(batch, self.plan, first=not self.ledger.steps)
        self._batch = batch if self._handles else None

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
        self._engine.open(records, averaged=self.plan.loss_reduction == "mean")

    # One step.

    def backward(self, losses: Tensor) -> None:
        """From one loss per record, (B,): nothing is left to be misstated, and losses that couple records are refused."""
        self._engine.backward(losses)

    def _factors(self, norms: Tensor, groups: Sequence[int]) -> Tensor:
        """How much of some records enters these groups' sums, [g,b]."""
        thresholds = self._thresholds[groups] if len(self._thresholds) > 1 else self._thresholds
        return self.plan.clipping.rule(norms, thresholds.to(norms))

    def _observe(self, norms: Tensor) -> None:
        """Add up the policy's statistic over the parts of the batch."""
        observed = self.plan.clipping.policy.observe(self._policy_state, norms)
        assert observed is not None
        self._statistic = observed if self._statistic is None else self._statistic + observed

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Turn the clipped sum into the private gradient that the optimizer reads. If that fails the batch is gone."""
        if self._batch is None and within_own_step(optimizer):
            return None
        step = self.steps_taken
        self._engine.refuse_missed()
        with self._ranks.together(f"step {step + 1}"):
            self.steps_left()
            arguments = self._guard.before_step(args, kwargs)
            self._guard.refuse_step(self._engine.seen, None if self._batch is None else self._batch.records)
            if not self._engine.intact():
                raise Misuse("the model's hooks were removed: call detach() and make_private anew.")
            if not self._shards:
                self._engine.refuse_unsound()
        if self._shards:  # which takes all ranks, so all must have come here
            with self._ranks.together(f"step {step + 1}"):
                self._engine.refuse_unsound()
        try:
            self._release(step)
        finally:
            self._begin(None)
        return arguments

    def _release(self, step: int) -> None:
        """Add up over the ranks, add noise, record the event, then show the result."""
        if self._noise is None or self.plan.thresholds_change:
            self._noise = self.plan.event(step), self._stddevs(step)
        event, stddevs = self._noise
        if self._statistic is None and self.plan.statistic_multiplier is not None:
            device = next(iter(self._engine.parameters.values())).device  # that of the other ranks' statistic
            self._observe(torch.zeros(len(self.plan.groups), 0, device=device))
        sums, statistic = self._engine.complete(), self._statistic
        if self._ranks.size > 1:
            added_up = () if self._shards else sums.values()  # sums of shards are added up already
            self._ranks.add_up([*added_up, *([] if statistic is None else [statistic])])
        with self._ranks.together(f"the release of step {step + 1}"):
            gradients = self._noised_gradients(step, sums, stddevs)
            statistic = self._noised_statistic(step, statistic)
            self._record(step, event, gradients, statistic)
        for name, parameter in self._engine.parameters.items():
            parameter.grad = gradients[name] if parameter.requires_grad else None
        clear_gradients(self._optimizer, but=self._engine.parameters.values())
        if self.plan.thresholds_change:
            self._set_policy(self.plan.clipping.policy.update(self._policy_state, statistic, self.plan.setting))
            self.history.append(self._policy_state, statistic)
        self._source.forget_steps(step + 1)

    def _stddevs(self, step: int) -> list[float]:
        """Standard deviation of the noise on each parameter's sum over the expected batch, at the present thresholds."""
        by_group = (self.plan.stddevs(step, self._thresholds).flatten() / self.plan.expected_batch).tolist()
        return [by_group[self.plan.groups.group_of[name]] for name in self._engine.parameters]

    def _noised_gradients(self, step: int, sums: Mapping[str, Tensor], stddevs: list[float]) -> dict[str, Tensor]:
        """The clipped sum over the expected batch with noise, for each parameter: tensors of their own, every time."""
        parameters, shards = self._engine.parameters, self._shards
        places = None if shards is None else shards.places()
        released = self._source.release("gradient", step, list(sums.values()), stddevs, places)
        gradients = {name: noised.to(p.dtype) for (name, p), noised in zip(parameters.items(), released, strict=True)}
        return {name: shards.placed(name, own) for name, own in gradients.items()} if shards else gradients

    def _noised_statistic(self, step: int, statistic: Tensor | None) -> Tensor | None:
        """The batch's statistic with noise; None if the policy needs none."""
        if statistic is None or self.plan.statistic_multiplier is None:
            return None
        (noised,) = self._source.release("statistic", step, [statistic], [self.plan.statistic_multiplier])
        return noised

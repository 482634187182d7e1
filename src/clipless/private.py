"""make_private, which puts the parts together, and one private step from top to bottom."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from clipless import defaults, heap, refusals
from clipless.clipped import LossFunction
from clipless.clipping import Clipping
from clipless.closures import Arguments, within_own_step
from clipless.distributed import (
    Alone,
    Idle,
    Ranks,
    facts,
    is_sharded,
    on_every_rank,
    ranks_of,
    refuse_other_records,
    shards_of,
    unwrapped,
)
from clipless.distributed.releasing import released_sums
from clipless.errors import Misuse
from clipless.foreign import names_answered
from clipless.gradients import Engine, Kernels, ProjectionEngine
from clipless.noise import NoiseSource, chosen_noise, noise_source
from clipless.partition import partition
from clipless.phases import Schedule, as_schedule
from clipless.plan import PrivacyPlan
from clipless.planning import make_plan
from clipless.preflight import refuse_unsound
from clipless.sampling.fetching import Fetcher, fetcher, source_of
from clipless.sampling.loader import Batch, DrawnPart, Parts, PoissonSampler, PrivateLoader
from clipless.sampling.rows import is_made_of
from clipless.saved_run import SavedRun
from clipless.splitting import Splitter
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
    clipping: str | Clipping | Schedule = "auto-s",
    accountant: str = "pld",
    neighbours: str = "zero-out",
    sample_rate: float | None = None,
    micro_batch: int | None = None,
    memory: int | None = None,
    loss_reduction: str | None = None,
    noise: str | None = None,
    seed: int | None = None,
    allow_overspend: bool = False,
    kernels: Kernels | None = None,
    check: tuple[Callable[[nn.Module, Any], Tensor], Any] | None = None,
    group: ProcessGroup | bool | None = None,
    gradients: str = "exact",
    projections: int = defaults.PROJECTIONS,
    unit_gradients: bool = False,
) -> "Private":
    """Make an ordinary training loop differentially private: `optimizer.step()` then releases noised gradients only.

    Give `epsilon` or `noise_multiplier`, `epochs` or `steps`, and the expected `batch_size`; without `delta` it is 1e-5, or
    1/(10 N) if that is smaller. `neighbours="add-remove"`, for a secret N, needs `sample_rate`, `steps` and `delta`. Train
    on `private.loader`, and give `private.backward` one loss per record, or call `backward()` on their mean, or on their
    sum with `loss_reduction="sum"`. A step beyond the plan is refused unless `allow_overspend=True`. `clipping` is a name,
    an object such as `clipless.auto_s()`, or a `clipless.schedule`. Model and optimizer get hooks, which `detach()`
    removes. If anything is refused, nothing has been changed. Noise is secure, or, with a `seed`, repeatable; the seed must
    then stay secret (docs/noise.md). `check=(loss_fn, batch)` runs `clipless.check` first. `kernels` bounds memory, `group`
    is for several processes (docs/distributed.md), `gradients="jl"` estimates norms (docs/projections.md), and
    `unit_gradients=True` divides the gradient by the step's threshold (docs/clipping.md).

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> private = make_private(model, optimizer, list(torch.randn(64, 2)), epsilon=3.0, batch_size=16, epochs=1)
    >>> for x in private.loader:
    ...     private.backward(model(x)[:, 0].square())  # one loss per record
    ...     optimizer.step()
    >>> private.spent().epsilon <= 3.0
    True
    """
    ranks = ranks_of(group)
    with ranks.together("make_private"):
        model, idle = unwrapped(model, group)
        data, own_batch_size, settings = source_of(dataset)
        parameters = refusals.trainable(model)
        refusals.refuse_optimizer(optimizer, parameters)
        refusals.refuse_attached((*model.modules(), optimizer), _ATTACHED)
        refusals.refuse_unclear(allow_overspend=allow_overspend, unit_gradients=unit_gradients)
        batch_size = refusals.one_batch_size(batch_size, own_batch_size)
        splitter, how = Splitter(micro_batch, memory), as_schedule(clipping)
        refusals.refuse_split_shards(splitter.splits, is_sharded(model))
        groups = partition(how.groups, parameters)
        plan = make_plan(
            dataset_size=len(data),  # type: ignore[arg-type]
            neighbours=neighbours, sample_rate=sample_rate, batch_size=batch_size, epochs=epochs, steps=steps,
            epsilon=epsilon, noise_multiplier=noise_multiplier, delta=delta, accountant=accountant,
            schedule=how,
            groups=groups,
            dimensions=tuple(sum(parameters[name].numel() for name in members) for members in groups.members),
            loss_reduction=loss_reduction,
            noise=chosen_noise(noise, seed),
            projections=refusals.chosen_projections(gradients, projections, kernels, ranks.size, is_sharded(model)),
            unit_gradients=unit_gradients,
        )  # fmt: skip
        if check is not None:
            for phase in plan.phases:
                refuse_unsound(model, check, phase.clipping, loss_reduction)
        source, fetch = noise_source(noise, seed), fetcher(data, settings)
    if ranks.size > 1:
        ranks.refuse_differences(lambda: facts(model, optimizer, plan.to_dict(), fetch.size, seed, allow_overspend))
        source.load_state_dict(ranks.shared(source.state_dict()))
        refuse_other_records(ranks, fetch.once, fetch.size)
    ranks = ranks.apart()
    parts = (model, optimizer, plan, fetch, source, kernels or Kernels(), splitter)
    return on_every_rank(ranks, lambda: Private(*parts, allow_overspend, group, ranks, idle))


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
        splitter: Splitter,
        allow_overspend: bool,
        group: object,
        ranks: Alone | Ranks,
        idle: Idle,
    ) -> None:
        super().__init__(model, optimizer, plan, source, allow_overspend, ranks, shards_of(model, ranks))
        self._idle, self._splitter = idle, splitter
        self._guard = Guard(model, optimizer, None if group is None and ranks.size == 1 else False)
        self._statistic: Tensor | None = None
        observe, shards = self._observe if plan.releases_statistics else None, self._shards
        self._engine: Engine | ProjectionEngine
        if plan.projections is None:
            self._engine = Engine(
                model, plan.groups, self._factors, observe, kernels, checks_itself=True, shards=shards
            )
        else:
            vector = lambda number, like: self._source.vector(self.steps_taken, number, like)  # noqa: E731
            self._engine = ProjectionEngine(model, self._factors, observe, vector, plan.projections)
        share, in_step = (ranks.rank, ranks.size), shards is not None
        sampler = PoissonSampler(source, fetch.size, plan.sample_rate, share=share, in_step=in_step)
        self.loader = PrivateLoader(fetch, sampler, plan.steps_per_pass, self, plan.expected_batch)
        self._attach()
        heap.keep_freed_memory()

    @property
    def steps_taken(self) -> int:
        """Steps that led to the present weights: all recorded ones, less those that a resumed run has yet to repeat."""
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
        _ATTACHED.difference_update({*self._engine.modules, self._optimizer})

    def _attach(self) -> None:
        self._engine.attach()
        self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
        self._handles += [self._guard.attach(self._engine.parameters), self._idle.attach()]
        self._handles += [self._shards.attach()] if self._shards else []
        _ATTACHED.update({*self._engine.modules, self._optimizer})

    # What the loader announces.

    def refuse_unstepped(self) -> None:
        """Raises if the last batch has not been stepped."""
        if self._batch is not None:
            raise unstepped(self._engine.seen)

    def open_batch(self, batch: Batch) -> None:
        """A new logical batch begins; the last one was stepped."""
        self._guard.before_batch(batch, self.plan, first=not self.ledger.steps)
        self._batch = batch if self._handles else None

    def _begin(self, batch: Batch | None) -> None:
        """Forget all sums. The next ones are of this batch, or of none."""
        self._engine.clear()
        self._batch, self._statistic = batch, None

    def open_part(self, records: int) -> None:
        """Begin a micro-batch of this many records."""
        reduction = self.plan.loss_reduction
        self._engine.open(records, averaged=None if reduction is None else reduction == "mean")

    # One step.

    def step(self, record_losses: LossFunction, batch: Any) -> None:
        """Take one private step: zero_grad(), forward, backward, noise, optimizer.step(). Returns nothing.

        In the first steps, and now and then, the function is called again, on the same batch and on some of its records: it
        must keep nothing from call to call, and give each record the loss that it would have alone.

        Args:
            record_losses: `record_losses(model, batch)` returns one loss for each record, (B,).
            batch: What `private.loader` yields, or what `private.loader.microbatches(n)` yields for a batch.
        """
        self._optimizer.zero_grad()
        for part, drawn in self._parts(record_losses, batch):
            self._engine.run(record_losses, part, drawn)
        self._optimizer.step()

    def _parts(self, record_losses: LossFunction, batch: Any) -> Iterator[tuple[Any, DrawnPart | None]]:
        """The micro-batches of what the loader yielded, each when its turn comes."""
        if isinstance(batch, Parts):
            for part in batch:
                yield part, self.loader.newest
            return
        drawn = self.loader.newest
        if drawn is not None and self._engine.due and not is_made_of(batch, drawn.given):
            raise refusals.changed_batch()
        if drawn is None or not self._splitter.splits:
            yield batch, drawn
        else:
            model, engine = self._model, self._engine
            yield from self._splitter.parts(record_losses, model, batch, drawn, self.open_part, engine.silenced)

    def accumulate(self, record_losses: LossFunction, part: Any) -> None:
        """Forward and backward of one micro-batch, with the checks of `step`, for trainers that call `optimizer.step()`
        themselves."""
        self._engine.run(record_losses, part, self.loader.newest)

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass from one loss per record, (B,). Losses that couple records are refused."""
        self._engine.backward(losses)

    def _factors(self, norms: Tensor, groups: Sequence[int]) -> Tensor:
        """The clipping factors of some records in these groups, [g,b]."""
        thresholds = self._thresholds[groups] if self._thresholds.shape[0] > 1 else self._thresholds
        return self._phase.clipping.factors(norms, thresholds.to(norms), groups)

    def _observe(self, norms: Tensor) -> None:
        """Add the policy's statistic of a micro-batch to that of the batch."""
        observed = self._phase.clipping.policy.observe(self._policy_state, norms)
        if observed is not None:
            self._statistic = observed if self._statistic is None else self._statistic + observed

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Set p.grad to the private gradients for the optimizer. If that fails, the batch is discarded."""
        if self._batch is None and within_own_step(optimizer):
            return None
        step = self.steps_taken
        if self._shards:
            self._engine.refuse_missed()
        with self._ranks.together(f"step {step + 1}"):
            if step >= self.plan.steps and not self._allow_overspend:
                raise refusals.budget_spent(self.plan.steps, self.spent())
            arguments = self._guard.before_step(args, kwargs)
            self._guard.refuse_step(self._engine.seen, None if self._batch is None else self._batch.records)
            if not self._engine.intact():
                raise Misuse("the model's hooks were removed: call detach() and make_private anew.")
            if self._shards and self._shards.was_whole:  # and all ranks gather it again next
                self._ranks.same(f"step {step + 1}", "")
            self._engine.refuse_unsound()
        try:
            self._release(step)
        finally:
            self._begin(None)
        return arguments

    def _release(self, step: int) -> None:
        """Add up the ranks' sums and statistics, add noise, record the event, and only then set p.grad."""
        if self._noise is None or self.plan.thresholds_change:
            self._noise = self.plan.event(step), self._stddevs(step), self.plan.divisor(self._thresholds)
        event, stddevs, divisor = self._noise
        if self._statistic is None and self._phase.statistic_multiplier is not None:
            device = next(iter(self._engine.parameters.values())).device  # the device of the other ranks' statistic
            self._observe(torch.zeros(len(self.plan.groups), 0, device=device))
        sums, where = self._engine.complete(), f"the release of step {step + 1}"
        with self._ranks.together(where) as told:
            gradients = self._noised_gradients(step, sums, stddevs, divisor)
            statistic = None if self._statistic is None else self._noised_statistic(step, self._statistic)
            if self._ranks.size > 1:
                told.own = self._digests(gradients, statistic)
        if self._ranks.size == 1 and self._journal is None:
            self.ledger.record(event)
        else:
            self._record(where, event, told.by_all if self._ranks.size > 1 else [self._digests(gradients, statistic)])
        for name, parameter in self._engine.parameters.items():
            parameter.grad = gradients[name] if parameter.requires_grad else None
        clear_gradients(self._optimizer, but=self._engine.parameters.values())
        if self.plan.thresholds_change:
            phase = self._phase
            self._go_on(step + 1, phase.clipping.policy.update(self._policy_state, statistic, phase.setting))
            self._note(phase, statistic)
        self._source.forget_steps(step + 1)

    def _stddevs(self, step: int) -> list[float]:
        """Standard deviation of the noise on each parameter's sum, at the present thresholds."""
        by_group = self.plan.stddevs(step, self._thresholds).flatten().tolist()
        return [by_group[self.plan.groups.group_of[name]] for name in self._engine.parameters]

    def _noised_gradients(
        self, step: int, sums: Mapping[str, Tensor], stddevs: list[float], divisor: float
    ) -> dict[str, Tensor]:
        """The private gradients: (clipped sum over all ranks + noise) / divisor, in fresh tensors."""
        parameters, values, shards = self._engine.parameters, list(sums.values()), self._shards
        types = [parameter.dtype for parameter in parameters.values()]
        release = partial(self._source.release, "gradient", step, divisor=divisor)
        shared = self._ranks, shards, values, stddevs, types, self._statistic, release
        released = released_sums(*shared) if self._ranks.size > 1 else release(values, stddevs, types=types)
        noised = {
            name: part if part.dtype is p.dtype else part.to(p.dtype)
            for (name, p), part in zip(parameters.items(), released, strict=True)
        }
        return {name: shards.placed(name, part) for name, part in noised.items()} if shards else noised

"""make_private for JAX: one private step from per-example gradients to an update, as an optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import Tensor

from clipless import refusals
from clipless.clipping import Clipping
from clipless.errors import InvalidArgument, Misuse
from clipless.foreign import names_answered
from clipless.integrations.jax.data import ArrayFetcher, ArrayLoader, in_memory, usual_rows
from clipless.integrations.jax.host import observed, to_jax, to_torch
from clipless.integrations.jax.rules import form_of
from clipless.integrations.jax.saving import SavedGradients
from clipless.integrations.jax.sums import BLOCK, Parameters, clip_rows
from clipless.noise import NoiseSource, chosen_noise, noise_source
from clipless.partition import partition
from clipless.phases import Schedule, as_schedule
from clipless.plan import PrivacyPlan
from clipless.planning import make_plan
from clipless.runs.fingerprint import fingerprint
from clipless.sampling.loader import Batch, PoissonSampler
from clipless.stepping import unstepped


class PrivateState(NamedTuple):
    """The optax state: how many steps were taken. Everything else is in the run."""

    steps: jax.Array


@names_answered
def make_private(
    params: Any,
    data: Any,
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
    noise: str | None = None,
    seed: int | None = None,
    allow_overspend: bool = False,
) -> "PrivateGradients":
    """A private run of these parameters, a pytree, on these records, a pytree of arrays with a row per record.

    The arguments mean what they mean in `clipless.make_private`. Train on `run.loader`, and give per-example gradients to
    `run.transformation()`, the first of an optax chain. Groups go by the names of the leaves, such as "layers.0.weight".
    """
    _refuse_several_processes()
    arrays, size = in_memory(data)
    parameters = Parameters.of(params)
    refusals.refuse_unclear(allow_overspend=allow_overspend)
    how = as_schedule(clipping)
    for _, part in how.parts:
        form_of(part.rule)
    groups = partition(how.groups, parameters.names)
    numbers = dict(zip(parameters.names, (int(np.prod(shape)) for shape in parameters.shapes), strict=True))
    if noise == "device":
        raise InvalidArgument("noise='device' is for torch: here noise is made in main memory, so leave noise unset.")
    plan = make_plan(
        dataset_size=size,
        neighbours=neighbours,
        sample_rate=sample_rate,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        accountant=accountant,
        schedule=how,
        groups=groups,
        dimensions=tuple(sum(numbers[name] for name in members) for members in groups.members),
        loss_reduction=None,
        noise=chosen_noise(noise, seed),
    )
    fetch = ArrayFetcher(arrays, usual_rows(plan.expected_batch, plan.population), size)
    return PrivateGradients(parameters, plan, fetch, noise_source(noise, seed), allow_overspend)


class PrivateGradients(SavedGradients):
    """A private run in JAX. Made by `make_private`."""

    def __init__(
        self,
        parameters: Parameters,
        plan: PrivacyPlan,
        fetch: ArrayFetcher,
        source: NoiseSource,
        allow_overspend: bool,
    ) -> None:
        super().__init__(plan, source, allow_overspend)
        self._parameters, self._fetch = parameters, fetch
        self._groups = parameters.grouped(plan.groups)
        self._open: int | None  # records of the part whose gradients are awaited
        self._blocks: list[list[Tensor]]
        self._statistic: Tensor | None
        self._begin(None)
        sampler = PoissonSampler(source, fetch.size, plan.sample_rate)
        self.loader = ArrayLoader(fetch, sampler, plan.steps_per_pass, self, plan.expected_batch)

    def transformation(self) -> optax.GradientTransformation:
        """From per-example gradients of the open batch to private gradients. Its `update` runs outside jit: it adds noise in
        main memory and writes the ledger. After `add`, give it None."""
        return optax.GradientTransformation(self._init, self._update)

    # What the loader announces.

    def refuse_unstepped(self) -> None:
        """Raises if the last batch has not been stepped."""
        if self._batch is not None:
            raise unstepped(self._seen)

    def open_batch(self, batch: Batch) -> None:
        """A new batch begins; the last one was stepped."""
        self._refuse_ended()
        self._begin(batch)

    def open_part(self, records: int) -> None:
        """Begin a micro-batch of so many records."""
        self._open = records

    def _begin(self, batch: Batch | None) -> None:
        self._batch, self._seen = batch, 0
        self._open, self._blocks, self._statistic = None, [], None

    # One step.

    def add(self, gradients: Any) -> None:
        """Clip the per-example gradients of the part that the loader handed out last, and add them to the batch's sum."""
        leaves = jax.tree_util.tree_leaves(gradients)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise _traced()
        self._refuse_ended()
        records, rows = self._open, len(self._fetch.finite)
        if self._batch is None or records is None:
            raise Misuse("gradients without a batch: take one from loader, and give its gradients once.")
        leaves = self._parameters.rows(gradients)
        if len(leaves[0]) != rows:
            raise Misuse(
                "the gradients have another number of rows than the batch: give those of the batch that loader handed out "
                "last, padding included, in its order."
            )
        self._open = None
        rule, thresholds, broken = self._phase.clipping.rule, self._thresholds.numpy(), ~self._fetch.finite
        for first in range(0, rows, BLOCK):
            some = slice(first, min(first + BLOCK, rows))
            here = min(max(records - first, 0), BLOCK)
            part = leaves if rows <= BLOCK else [leaf[some] for leaf in leaves]
            sums, norms = clip_rows(part, thresholds, here, broken[some], rule, self._groups)
            self._blocks.append([to_torch(one) for one in sums])
            if self._phase.statistic_multiplier is not None:
                self._observe(np.asarray(norms)[:, :here])
        self._seen += records

    def _observe(self, norms: Any) -> None:
        """Add the policy's statistic of some records to that of the batch."""
        found = observed(self._phase.clipping.policy, self._policy_state, norms)
        if found is not None:
            self._statistic = found if self._statistic is None else self._statistic + found

    def _init(self, params: Any) -> PrivateState:
        if Parameters.of(params) != self._parameters:
            raise InvalidArgument("init() of other parameters than make_private got: give it the same tree.")
        return PrivateState(jnp.asarray(self.steps_taken, jnp.int32))

    def _update(self, gradients: Any, state: PrivateState, params: Any = None) -> tuple[Any, PrivateState]:
        if isinstance(state.steps, jax.core.Tracer):
            raise _traced()
        if int(state.steps) > self.steps_taken:
            raise Misuse(
                f"the optimizer's state is of step {int(state.steps)}, and the ledger has {self.steps_taken}: restore both "
                "from the same moment, or the epsilon is that of another run."
            )
        if gradients is not None:
            self.add(gradients)
        released = self._step()
        return released, PrivateState(jnp.asarray(self.steps_taken, jnp.int32))

    def _step(self) -> Any:
        """The private gradients of the open batch. If noise or ledger fail, the batch is discarded."""
        self._refuse_ended()
        if self.steps_taken >= self.plan.steps and not self._allow_overspend:
            raise refusals.budget_spent(self.plan.steps, self.spent())
        if self._batch is None:
            raise Misuse("update() without a batch: take one from loader, compute its gradients, then update() once.")
        if self._open is not None or self._seen != self._batch.records:
            raise Misuse(
                "update() before all records of the batch were added: give it their gradients, or add() those of every "
                "micro-batch first."
            )
        try:
            return self._release(self.steps_taken)
        finally:
            self._begin(None)

    def _release(self, step: int) -> Any:
        """Add noise, record the event, and only then return the gradients."""
        event, phase = self.plan.event(step), self._phase
        by_group = self.plan.stddevs(step, self._thresholds).flatten().tolist()
        if phase.statistic_multiplier is not None and self._statistic is None:
            self._observe(np.zeros((len(self.plan.groups), 0), np.float32))
        stddevs = [by_group[group] for group in self._groups]
        sums = [_total(blocks) for blocks in zip(*self._blocks, strict=True)]
        released = self._source.release("gradient", step, sums, stddevs, self.plan.expected_batch)
        statistic = self._noised_statistic(step, self._statistic)
        shown = [*released, *([] if statistic is None else [statistic])]
        if self._journal is None or self._journal.record(event, fingerprint(shown)):
            self.ledger.record(event)
        if self.plan.thresholds_change:
            self._go_on(step + 1, phase.clipping.policy.update(self._policy_state, statistic, phase.setting))
            self._note(phase, statistic)
        self._source.forget_steps(step + 1)
        typed = zip(released, self._parameters.dtypes, strict=True)
        return self._parameters.structure.unflatten([to_jax(part, dtype) for part, dtype in typed])


def _total(blocks: tuple[Tensor, ...]) -> Tensor:
    """The sum of blocks, in float64 if there are several, as one of their type."""
    first, *others = blocks
    if not others:
        return first
    return torch.stack([block.double() for block in blocks]).sum(0).to(first.dtype)


def _refuse_several_processes() -> None:
    if jax.process_count() > 1:
        raise Misuse(
            f"JAX runs in {jax.process_count()} processes, and each would train a run of its own and report the epsilon of "
            "one: train in one process, or use torch.distributed with clipless.make_private."
        )


def _traced() -> Misuse:
    return Misuse(
        "update() is inside jit, vmap or another transformation, where noise would be drawn once and baked in: jit the "
        "gradients and what follows, and call update() itself outside. optax.MultiSteps and apply_if_finite trace it too: "
        "use loader.microbatches(n) and add()."
    )

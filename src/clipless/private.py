"""make_private: the one place where the parts meet, and one private step from top to bottom."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset
from torch.utils.hooks import RemovableHandle

from clipless.accounting import Ledger, Spent
from clipless.clipping import Clipping, as_clipping
from clipless.errors import BudgetSpent, InvalidArgument, InvalidType, Misuse
from clipless.grads import Engine
from clipless.noise import NoiseSource, noise_source
from clipless.partition import partition
from clipless.plan import PrivacyPlan, make_plan
from clipless.preflight import refuse_unsound
from clipless.sampling import Batch, Fetcher, PoissonSampler, PrivateLoader, fetcher, source_of
from clipless.thresholds.history import History

_ATTACHED: "weakref.WeakSet[nn.Module | Optimizer]" = weakref.WeakSet()


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
    check: tuple[Callable[[nn.Module, Any], Tensor], Any] | None = None,
) -> "Private":
    """Make an ordinary training loop differentially private: `optimizer.step()` then releases noised gradients only.

    Give `epsilon` or `noise_multiplier`, `epochs` or `steps`, and the expected `batch_size`; without `delta` it is
    N**-1.1. Train on `private.loader`. Model and optimizer stay what they are and get hooks, which `detach()` removes.
    `check=(loss_fn, batch)` runs `clipless.check` first, which raises `Unsound` for a model or loss that mixes records.
    If anything is refused, nothing has been changed.
    """
    data, own_batch_size, settings = source_of(dataset)
    parameters = _trainable(model)
    _refuse_optimizer(optimizer, parameters)
    for thing in (*model.modules(), optimizer):
        if thing in _ATTACHED:
            raise Misuse("this model or optimizer is private already: call detach() on its Private object first.")
    if not isinstance(allow_overspend, bool):
        raise InvalidType(f"allow_overspend must be True or False, got {allow_overspend!r}.")
    if None not in (batch_size, own_batch_size) and batch_size != own_batch_size:
        raise InvalidArgument(
            f"batch_size={batch_size} contradicts the DataLoader's batch_size={own_batch_size}: give one of them."
        )
    how = as_clipping(clipping)
    groups = partition(how.groups, parameters)
    plan = make_plan(
        dataset_size=len(data),  # type: ignore[arg-type]
        batch_size=own_batch_size if batch_size is None else batch_size,
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
        refuse_unsound(model, check, how)
    return Private(model, optimizer, plan, fetcher(data, settings), noise_source(noise, seed), allow_overspend)


class Private:
    """A training run under a privacy plan. Made by `make_private`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: PrivacyPlan,
        fetch: Fetcher,
        source: NoiseSource,
        allow_overspend: bool,
    ) -> None:
        self.plan = plan
        self.ledger = Ledger()
        self.history = History()
        self._model = model
        self._optimizer = optimizer
        self._source = source
        self._allow_overspend = allow_overspend
        self._batch: Batch | None = None
        self._statistic: Tensor | None = None
        self._policy_state = plan.clipping.policy.init(plan.setting)
        self._engine = Engine(model, plan.groups, self._factors)
        sampler = PoissonSampler(source, plan.dataset_size, plan.sample_rate)
        self.loader = PrivateLoader(fetch, sampler, plan.steps_per_pass, self)
        self._handles: list[RemovableHandle] = []
        self._attach()

    @property
    def epochs(self) -> int:
        """Passes over `loader` in the plan."""
        return self.plan.steps // self.plan.steps_per_pass

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
        self._engine.tape.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._batch = None
        _ATTACHED.difference_update(self._engine.tape.modules)
        _ATTACHED.discard(self._optimizer)

    def _attach(self) -> None:
        self._engine.tape.attach()
        self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
        everywhere = register_optimizer_step_pre_hook(_refuse_other_optimizers(self))
        weakref.finalize(self, everywhere.remove)
        self._handles.append(everywhere)
        _ATTACHED.update(self._engine.tape.modules)
        _ATTACHED.add(self._optimizer)

    # What the loader announces.

    def steps_left(self) -> int | None:
        """Steps until the budget is spent, None if overspending is allowed; raises `BudgetSpent` when there are none."""
        if self._allow_overspend:
            return None
        if self.ledger.steps >= self.plan.steps:
            raise BudgetSpent(
                f"all {self.plan.steps} planned steps are taken: {self.spent()}. Plan more steps from the start, or pass "
                "allow_overspend=True to go on at a higher epsilon."
            )
        return self.plan.steps - self.ledger.steps

    def open_batch(self, batch: Batch) -> None:
        """A new logical batch begins."""
        if self._engine.seen:
            raise Misuse(
                "a new batch was asked for before step(): gradients do not accumulate over logical batches. Call "
                "optimizer.step() after each batch; for small memory use private.loader.microbatches(n)."
            )
        if (batch.sampling, batch.sample_rate) != (self.plan.sampling, self.plan.sample_rate):
            raise Misuse(
                f"a {batch.sampling} batch at rate {batch.sample_rate} does not fit the plan: {self.plan.sampling} at "
                f"rate {self.plan.sample_rate}."
            )
        self._engine.clear()
        self._statistic = None
        self._batch = batch

    def open_part(self, records: int) -> None:
        """The records of the next forward and backward pass."""
        self._engine.open(records, scale=records if self.plan.loss_reduction == "mean" else 1)

    # One step.

    def _factors(self, norms: Tensor) -> Tensor:
        """How much of each record enters the sum, [G,B]; the policy's statistic is added up beside it."""
        policy = self.plan.clipping.policy
        observed = policy.observe(self._policy_state, norms)
        if observed is not None:
            self._statistic = observed if self._statistic is None else self._statistic + observed
        return self.plan.clipping.rule(norms, policy.thresholds(self._policy_state).to(norms))

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Turn the clipped sum into the private gradient that the optimizer reads."""
        self._refuse_step(args, kwargs)
        step = self.ledger.steps
        self.ledger.record(self.plan.event(step))
        self._release_gradient(step)
        self._release_statistic(step)
        self._engine.clear()
        self._batch = None

    def _release_gradient(self, step: int) -> None:
        sums, parameters = self._engine.sums, self._engine.tape.parameters
        thresholds = self.plan.clipping.policy.thresholds(self._policy_state)
        stddevs = self.plan.stddevs(step, thresholds).flatten().tolist()
        noises = self._source.normals("gradient", step, parameters.values())
        for (name, parameter), noise in zip(parameters.items(), noises, strict=True):
            total = noise.mul_(stddevs[self.plan.groups.group_of[name]])
            if name in sums:
                total = total.to(sums[name].dtype).add_(sums[name])
            private_gradient = total.div_(self.plan.expected_batch).to(parameter.dtype)
            parameter.grad = private_gradient if parameter.requires_grad else None

    def _release_statistic(self, step: int) -> None:
        """Noise the statistic, let the policy set the next thresholds from it, and keep what was released."""
        policy, released = self.plan.clipping.policy, None
        if self.plan.statistic_multiplier is not None:
            if self._statistic is None:
                self._factors(torch.zeros(len(self.plan.groups), 0))
            assert self._statistic is not None
            (noise,) = self._source.normals("statistic", step, [self._statistic])
            released = self._statistic + self.plan.statistic_multiplier * noise
        self._statistic = None
        self._policy_state = policy.update(self._policy_state, released, self.plan.setting)
        self.history.append(self._policy_state, released)

    def _refuse_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(argument not in (None, self._optimizer) for argument in (*args, *kwargs.values())):
            raise Misuse("step(closure) would evaluate the loss again after the noise: call step() without arguments.")
        if any(getattr(self._optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            raise Misuse(
                "a gradient scaler would scale the gradients and not the noise: train without GradScaler (bfloat16 needs "
                "none)."
            )
        self.steps_left()
        if self._batch is None:
            raise Misuse("step() without a batch: take one from private.loader, backward() its loss, then step() once.")
        if self._engine.seen != self._batch.records:
            done = "some" if self._engine.seen else "none"
            raise Misuse(
                f"step() without its backward(): {done} of the batch's records went through backward(). Call "
                "loss.backward() on the model's output for the whole batch, or for every micro-batch, before step(). If "
                "you did, the model's hooks were removed or its output detached."
            )
        if not self._engine.tape.intact():
            raise Misuse("the model's hooks were removed: call detach() and make_private anew.")
        self._engine.tape.restore()
        self._refuse_changed_parameters()

    def _refuse_changed_parameters(self) -> None:
        known = {id(p) for p in self._engine.tape.parameters.values()}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise Misuse(f"parameter {name!r} became trainable after make_private: freeze it, or attach anew.")
        if any(
            id(p) not in known for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad
        ):
            raise Misuse("the optimizer got parameters that are not private: add them before make_private.")

    # State.

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
        """Go on from a saved state, with weights and optimizer restored by the caller. The plan must be the same."""
        if self._batch is not None or self.ledger.steps:
            raise Misuse("load_state_dict() after training began: load into a fresh make_private.")
        expected = {"plan", "ledger", "policy", "history", "draws", "seed"}
        if not isinstance(state, dict) or expected - state.keys():
            missing = sorted(expected - state.keys()) if isinstance(state, dict) else sorted(expected)
            raise InvalidArgument(f"not a state of a private run: {', '.join(missing)} is missing.")
        if state["plan"] != self.plan.to_dict():
            changed = [key for key, value in self.plan.to_dict().items() if state["plan"].get(key) != value]
            raise InvalidArgument(f"the saved state belongs to another plan (different: {', '.join(changed)}).")
        self.ledger = Ledger.from_dict(state["ledger"])
        self._policy_state = {name: value.clone() for name, value in state["policy"].items()}
        self.history = History.from_state_dict(state["history"])
        self.loader.draws = state["draws"]
        self._source.seed = state["seed"]


def _trainable(model: object) -> dict[str, nn.Parameter]:
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise InvalidArgument("the model has no trainable parameter: set requires_grad_(True) on what should learn.")
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise InvalidArgument(f"parameter {name!r} has no shape yet: run the model on one example first.")
        if not parameter.is_floating_point():
            raise InvalidType(
                f"parameter {name!r} is {parameter.dtype}: only real floating-point parameters are supported."
            )
    return parameters


def _refuse_optimizer(optimizer: object, parameters: dict[str, nn.Parameter]) -> None:
    if not isinstance(optimizer, Optimizer):
        raise InvalidType(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if isinstance(optimizer, LBFGS | SparseAdam):
        raise InvalidArgument(
            f"{type(optimizer).__name__} cannot use a private gradient (it re-evaluates a closure, or wants sparse "
            "gradients, and noise is dense): take SGD, Adam or another optimizer of one dense gradient per step."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    missing = [name for name, p in parameters.items() if id(p) not in held]
    if missing:
        raise InvalidArgument(
            f"the optimizer does not hold the trainable parameter {missing[0]!r} (and {len(missing) - 1} more): give it "
            "model.parameters(), or freeze with requires_grad_(False) what should not learn."
        )
    if held - {id(p) for p in parameters.values()}:
        raise InvalidArgument(
            "the optimizer holds parameters that are not the model's: their gradients would be in clear."
        )


def _refuse_other_optimizers(private: Private) -> Callable[[Optimizer, Any, Any], None]:
    """A hook on every optimizer: one that steps this model's parameters in place of the private one is refused."""
    watched = weakref.ref(private)

    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owner = watched()
        if owner is None or optimizer is owner._optimizer:
            return
        own = {id(p) for p in owner._engine.tape.parameters.values()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise Misuse(
                "another optimizer steps the parameters of a private model: step the optimizer given to make_private, or "
                "detach() and attach the new one."
            )

    return refuse

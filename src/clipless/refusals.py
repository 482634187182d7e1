"""What make_private and a private step refuse of the model and the optimizer they are given."""

from collections.abc import Collection, Iterable
from typing import Any, NoReturn, Protocol, SupportsIndex

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer, SparseAdam

from clipless.errors import BudgetSpent, InvalidArgument, InvalidType, Misuse
from clipless.grads.frames import Part
from clipless.grads.layout import written
from clipless.grads.watch import became_trainable


class Whole:
    """One thing, which is not copied, pickled or unpacked."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Misuse(
            "a private run cannot be copied or pickled: both would draw the same noise. Copy the model, which is then a "
            "plain one; to go on elsewhere use save_checkpoint() and load_checkpoint(); for another process call "
            "make_private there."
        )

    def __iter__(self) -> NoReturn:
        raise InvalidType(
            "make_private returns one object, private, and no tuple: model and optimizer stay the ones you gave. Iterate "
            "over private.loader."
        )


def trainable(model: object) -> dict[str, nn.Parameter]:
    """The parameters that learn; refuses what is no model or has none that can."""
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


def refuse_optimizer(optimizer: object, parameters: dict[str, nn.Parameter]) -> None:
    """Refuses an optimizer that cannot use a private gradient, or that holds other parameters than these."""
    if not isinstance(optimizer, Optimizer):
        raise InvalidType(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        raise InvalidType(
            f"{type(optimizer).__name__} wraps another optimizer: give make_private the one inside (optimizer.optimizer), "
            "and go on stepping the wrapper."
        )
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


def refuse_attached(things: Iterable[object], attached: Collection[object]) -> None:
    """Refuses modules and optimizers that are in a private run already."""
    if any(thing in attached for thing in things):
        raise Misuse("this model or optimizer is private already: call detach() on its Private object first.")


def refuse_unclear(name: str, value: object) -> None:
    """Refuses what is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidType(f"{name} must be True or False, got {value!r}.")


def one_batch_size(given: int | None, of_loader: int | None) -> int | None:
    """The expected batch, by argument or by a DataLoader."""
    if None not in (given, of_loader) and given != of_loader:
        raise InvalidArgument(
            f"batch_size={given} contradicts the DataLoader's batch_size={of_loader}: give one of them."
        )
    return of_loader if given is None else given


def budget_spent(steps: int, spent: object) -> BudgetSpent:
    """The refusal of a step beyond the plan."""
    return BudgetSpent(
        f"all {steps} planned steps are taken: {spent}. Plan more steps from the start, or pass allow_overspend=True to go "
        "on at a higher epsilon."
    )


def refuse_unstepped(waiting: bool, seen: int) -> None:
    """Refuses a new batch while the last one waits for its step, after `seen` of its records were in backward()."""
    if not waiting:
        return
    if seen:
        raise Misuse(
            "a new batch was asked for before step(): gradients do not accumulate over logical batches. Call "
            "optimizer.step() after each batch; for small memory use private.loader.microbatches(n). After an exception "
            "private.loader.again() hands out the open batch from its beginning."
        )
    raise Misuse(
        "the last batch from private.loader was not stepped, and none may be dropped: a choice of batches by what is in "
        "them is not what the ledger counts. Call backward() and optimizer.step() for every batch, empty ones like any "
        "other, and break only after step(). If the batch is lost, private.loader.again() hands it out once more. Use one "
        "iterator at a time: zip(loader, loader) takes two batches for one step."
    )


class Drawn(Protocol):
    """How a batch is drawn, or planned to be."""

    @property
    def sampling(self) -> str: ...

    @property
    def sample_rate(self) -> float: ...


def refuse_foreign_batch(batch: Drawn, plan: Drawn) -> None:
    """Refuses a batch that was not drawn in the planned way at the planned rate."""
    if (batch.sampling, batch.sample_rate) != (plan.sampling, plan.sample_rate):
        raise Misuse(
            f"a {batch.sampling} batch at rate {batch.sample_rate} does not fit the plan: {plan.sampling} at rate "
            f"{plan.sample_rate}."
        )


def refuse_begun(*signs: object) -> None:
    """Refuses a state for a run in which anything has happened."""
    if any(sign is not None and sign != 0 for sign in signs):
        raise Misuse("load_state_dict() after training began: load into a fresh make_private.")


def one_per_record(losses: object, part: Part | None) -> Tensor:
    """The losses, if there is one for each record of the open part."""
    if part is None:
        raise Misuse("backward() without a batch: take one from private.loader, run the model on it, then backward().")
    if not isinstance(losses, Tensor):
        raise InvalidType(f"backward() takes a tensor of one loss per record, got {type(losses).__name__}.")
    if losses.shape != (part.records,):
        shape = written(losses.shape, part.records)
        raise InvalidArgument(
            f"backward() takes one loss per record, a tensor of shape (B,), got {shape}: use reduction='none', and average "
            "over each record's own tokens or outputs."
        )
    if not losses.requires_grad and part.records:
        raise Misuse(
            "the losses have no gradient: compute them from the model's output, without no_grad() or detach()."
        )
    return losses


def refuse_incomplete(seen: int, records: int | None) -> None:
    """Refuses a step without a batch (`records` is None), or on one of which only `seen` records were in backward()."""
    if records is None:
        raise Misuse("step() without a batch: take one from private.loader, backward() its loss, then step() once.")
    if seen != records:
        raise Misuse(
            f"step() without its backward(): {'some' if seen else 'none'} of the batch's records went through backward(). "
            "Call loss.backward() on the model's output for the whole batch, or for every micro-batch, before step(). If "
            "you did, the model's hooks were removed or its output detached."
        )


def refuse_changed_parameters(model: nn.Module, optimizer: Optimizer, private: dict[str, nn.Parameter]) -> None:
    """Refuses trainable parameters of the model or the optimizer that are not among the private ones."""
    known = {id(p) for p in private.values()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise became_trainable(name)
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        raise Misuse("the optimizer got parameters that are not private: add them before make_private.")


def refuse_other_plan(state: object, plan: dict[str, Any]) -> None:
    """Refuses what is no state of a private run, or that of a run with another plan."""
    expected = {"plan", "ledger", "policy", "history", "draws", "seed"}
    if not isinstance(state, dict) or expected - state.keys():
        missing = sorted(expected - state.keys()) if isinstance(state, dict) else sorted(expected)
        raise InvalidArgument(f"not a state of a private run: {', '.join(missing)} is missing.")
    if state["plan"] != plan:
        changed = [key for key, value in plan.items() if state["plan"].get(key) != value]
        raise InvalidArgument(f"the saved state belongs to another plan (different: {', '.join(changed)}).")

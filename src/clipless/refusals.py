"""What make_private refuses: models, optimizers, arguments and saved states that do not fit."""

from collections.abc import Collection, Iterable
from typing import Any, NoReturn, SupportsIndex

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer, SparseAdam

from clipless import defaults
from clipless.arguments import named, whole
from clipless.errors import BudgetSpent, InvalidArgument, InvalidType, Misuse
from clipless.gradients import Kernels
from clipless.neighbours import with_relation


class Uncopyable:
    """Refuses to be copied, pickled or unpacked."""

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
    """The trainable parameters by name. Raises for anything but a model with trainable parameters."""
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
    """Raises for an optimizer that cannot use a private gradient, or that holds other parameters than these."""
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
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise InvalidArgument(
            "ZeroRedundancyOptimizer has another optimizer step, which private training does not see: give make_private a "
            "plain one. To divide its state over the ranks, shard the model by fully_shard (docs/distributed.md)."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    missing = [name for name, p in parameters.items() if id(p) not in held]
    if missing:
        raise InvalidArgument(
            f"the optimizer does not hold the trainable parameter {missing[0]!r} (and {len(missing) - 1} more): give it "
            "model.parameters(), or freeze with requires_grad_(False) what should not learn; build it after fully_shard."
        )
    if held - {id(p) for p in parameters.values()}:
        raise InvalidArgument(
            "the optimizer holds parameters that are not the model's: their gradients would be in clear."
        )


def refuse_attached(things: Iterable[object], attached: Collection[object]) -> None:
    """Raises for modules and optimizers that are already in a private run."""
    if any(thing in attached for thing in things):
        raise Misuse("this model or optimizer is private already: call detach() on its Private object first.")


def refuse_unclear(**switches: object) -> None:
    """Raises for anything but True and False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InvalidType(f"{name} must be True or False, got {value!r}.")


def one_batch_size(given: int | None, of_loader: int | None) -> int | None:
    """The expected batch, from the argument or from the DataLoader."""
    if None not in (given, of_loader) and given != of_loader:
        raise InvalidArgument(
            f"batch_size={given} contradicts the DataLoader's batch_size={of_loader}: give one of them."
        )
    return of_loader if given is None else given


def chosen_projections(gradients: str, projections: int, kernels: object, processes: int, sharded: bool) -> int | None:
    """How many projections estimate each norm; None for exact norms. Raises for kernels that do not fit."""
    if kernels is not None and not isinstance(kernels, Kernels):
        raise InvalidType(f"kernels must be clipless.Kernels(memory_cap=...) or None, got {kernels!r}.")
    if not named("gradients", gradients, {"exact": False, "jl": True}):
        if projections != defaults.PROJECTIONS:
            raise InvalidArgument(
                "projections= estimate norms with gradients='jl', and these are exact: give that too."
            )
        return None
    if kernels is not None:
        raise InvalidArgument("kernels= is about exact norms, and gradients='jl' estimates them: leave it out.")
    if sharded:
        raise InvalidArgument(
            "gradients='jl' needs the whole model in one process, and this one is sharded: use gradients='exact', or leave "
            "fully_shard out."
        )
    if processes > 1:
        raise InvalidArgument(
            "gradients='jl' trains in one process, and this run has several: use gradients='exact', or group=False in "
            "a process that trains alone."
        )
    return whole("projections", projections)


def refuse_split_shards(splits: bool, sharded: bool) -> None:
    """Raise if `private.step` is to split batches of a sharded model: all ranks must take the same number of parts."""
    if splits and sharded:
        raise InvalidArgument(
            "micro_batch= and memory= do not go with a sharded model. Give private.step what "
            "private.loader.microbatches(n) yields, which has as many parts on every rank."
        )


def changed_batch() -> Misuse:
    """The error for a batch of other numbers than the loader yielded."""
    return Misuse(
        "private.step() got a batch that was changed after private.loader yielded it, so clipless does not see whether "
        "records were mixed on the way (mixup, a statistic of the batch). Make the change inside record_losses, or in the "
        "data set. Other devices, shapes and types are fine."
    )


def budget_spent(steps: int, spent: object) -> BudgetSpent:
    """The error for a step beyond the plan."""
    return BudgetSpent(
        f"all {steps} planned steps are taken: {spent}. Plan more steps from the start, or pass allow_overspend=True to go "
        "on at a higher epsilon."
    )


def refuse_begun(*signs: object) -> None:
    """Raises if the run that should load a state has already begun."""
    if any(sign is not None and sign != 0 for sign in signs):
        raise Misuse("load_state_dict() after training began: load into a fresh make_private.")


def refuse_other_plan(state: object, plan: dict[str, Any]) -> None:
    """Raises for anything but the state of a private run with this plan."""
    expected = {"plan", "ledger", "policy", "history", "draws", "noise"}
    if not isinstance(state, dict) or expected - state.keys():
        missing = sorted(expected - state.keys()) if isinstance(state, dict) else sorted(expected)
        raise InvalidArgument(f"not a state of a private run: {', '.join(missing)} is missing.")
    saved = with_relation(state["plan"])
    if None in (saved.get("loss_reduction"), plan["loss_reduction"]):
        saved |= {"loss_reduction": plan["loss_reduction"]}  # it was not needed in one of them
    if saved != plan:
        changed = [key for key, value in plan.items() if saved.get(key) != value]
        raise InvalidArgument(f"the saved state belongs to another plan (different: {', '.join(changed)}).")

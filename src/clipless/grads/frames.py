"""What the tape writes down while modules run, and how it puts everything back."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from clipless.errors import CliplessError, Misuse, UnsupportedModule
from clipless.grads.checks import PartCheck
from clipless.grads.layout import Dims, Place, Shapes, packed_in, shapes_of, written
from clipless.grads.outputs import hides_tensors
from clipless.grads.pieces import Piece
from clipless.grads.takeover import Takeover


@dataclass
class Part:
    """Some records of a logical batch that go through forward and backward together, and what came back for them.

    `uses` counts the taps that the forward pass made for a parameter; `late` is set when a part of the model runs again in
    the backward pass, where more of them may be made. `tapped` are the bytes of the outputs that were tapped: about what
    norms need, as as many bytes of gradients come back. `broken` are the records with data that are not finite, [b], if
    these were looked at. `due` asks for the checks of this part, which `check` makes; `averaged` says that the loss divided
    by the number of records, and `modes` which modules were in training mode.
    """

    records: int
    due: bool = False
    averaged: bool = False
    check: PartCheck | None = None
    modes: list[bool] = field(default_factory=list)
    uses: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    arrived: set[str] = field(default_factory=set)
    late: bool = False
    tapped: int = 0
    broken: Tensor | None = None
    begun: bool = False
    task: int = -1
    done: bool = False


@dataclass
class Frame:
    """A module whose forward is running, and which of its parameters the tape has turned off for that time. With a
    `stand_in` it is the outermost one, and an empty batch's input was replaced."""

    module: nn.Module
    place: Place
    armed: bool
    stand_in: bool = False
    turned_off: list[nn.Parameter] = field(default_factory=list)
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list)
    takeover: Takeover | None = None
    dims: Dims = ()
    out_dims: Dims = ()
    unsure: bool = False
    random_state: list[Any] = field(default_factory=list)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module uses itself, by their path in it: its own, those in its lists and dictionaries of
    parameters, and attention's output projection, which is never called as a module."""
    own = dict(module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict) or isinstance(module, nn.MultiheadAttention):
            own |= {f"{name}.{path}": parameter for path, parameter in own_parameters(child).items()}
    return own


def idle(module: nn.Module) -> bool:
    """Whether it is one of torch's own that has nothing to learn, to keep or to call, such as an activation: what happens
    in it is no business of the tape."""
    own = (module._parameters, module._buffers, module._modules)
    return type(module).__module__.startswith("torch.nn.modules.") and not any(own)


def turn_off(frame: Frame, parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.requires_grad_(False)
            frame.turned_off.append(parameter)


def put_back(frame: Frame) -> None:
    if frame.takeover is not None:
        frame.takeover.end()
    for parameter in frame.turned_off:
        parameter.requires_grad_(True)
    for holder, local, parameter in frame.swapped:
        holder._parameters[local] = parameter


def unseen_by_checkpoints() -> AbstractContextManager[Any]:
    """Inside, what autograd saves is not counted by a checkpoint around the model."""
    return saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


def by_size(shapes: Shapes, size: int) -> Dims:
    return tuple(shape.index(size) if size in shape else None for shape in shapes)


def refuse_foreign_rows(inputs: Any, records: int) -> None:
    shapes = shapes_of(inputs)
    if shapes and not any(records in shape for shape in shapes):
        raise Misuse(
            "the model's rows are not the batch's records: no input has one row for each. Give it what private.loader "
            "handed out, as it is; split a batch with private.loader.microbatches(n), and use other data under "
            "torch.no_grad()."
        )


def refuse_packed(name: str, values: Any) -> None:
    if packed_in(values):
        raise UnsupportedModule(
            f"module {name!r} is given or returns a packed sequence, in which the records have no dimension of their own. "
            "Hand the model padded sequences and their lengths, pack them in its forward, and give them to nn.RNN, nn.LSTM "
            "or nn.GRU alone."
        )


def refuse_hidden(name: str, output: Any) -> None:
    if hides_tensors(output):
        raise UnsupportedModule(
            f"module {name!r} returns an object in which no tensor can be seen, so its gradient would be lost. Return a "
            "tensor, or tensors in a tuple, a list, a dictionary or a dataclass."
        )


def shared_input(place: Place, shapes: Shapes, records: int) -> CliplessError:
    got = ", ".join(written(shape, records) for shape in shapes) or "no tensor"
    return UnsupportedModule(
        f"module {place.name!r} has {got} as {place.side} for a batch of B records: its rows are not the records, so their "
        "gradients cannot be told apart. Give it one row per record, in the first dimension (for positions: "
        "positions.expand(len(x), -1)); split a batch with private.loader.microbatches(n), and use other data under "
        "torch.no_grad()."
    )


def left_the_model(name: str) -> CliplessError:
    return UnsupportedModule(
        f"module {name!r} handed out a tensor computed from its parameters alone, and it met the records outside the "
        "model's forward, or in a part that is checkpointed with use_reentrant=True. Use it inside, return one row per "
        "record, and checkpoint with use_reentrant=False."
    )


def in_place(owner: str, name: str) -> CliplessError:
    """What to say where a module was given up and cannot be taken as a whole."""
    return UnsupportedModule(
        f"module {owner!r} uses its parameters in the in-place operation {name!r}, whose gradient cannot be told apart by "
        "record. Compute a new tensor instead (torch.where, torch.cat, torch.stack, or the operation without the trailing "
        "underscore)."
    )


def draws_at_random(name: str) -> CliplessError:
    return UnsupportedModule(
        f"module {name!r} has parameters of its own and draws random numbers (dropout) in its forward, so its gradient per "
        "record cannot be computed again. Move the parameter into a small module of its own, or turn the randomness off."
    )


def not_its_own(parameter: str, module: nn.Module) -> CliplessError:
    return UnsupportedModule(
        f"parameter {parameter!r} is not one that {type(module).__name__} computes with in its own forward. For weight norm "
        "and the like use torch.nn.utils.parametrizations."
    )


def interrupted(again: bool) -> CliplessError:
    """Of a backward pass that an exception ended; `again` if the forward pass was repeated after it."""
    if again:
        return Misuse(
            "backward() on a micro-batch was interrupted after a part of it had been added to the others: start again from "
            "the last checkpoint, with smaller micro-batches."
        )
    return Misuse(
        "backward() was interrupted by an exception: run the model on the same batch once more, then call backward()."
    )


def used_again(name: str) -> CliplessError:
    return UnsupportedModule(
        f"parameter {name!r} was used once more, by a part of the model that is checkpointed with use_reentrant=True, after "
        "its gradient seemed complete. Checkpoint with use_reentrant=False."
    )


def rounded_mean() -> CliplessError:
    return Misuse(
        "a mean loss whose gradient has 16 bits: the division by the number of records is rounded, so that one record more "
        "changes the share of every other. Call private.backward(losses) with one loss per record (reduction='none'), or "
        "sum the losses and pass loss_reduction='sum'."
    )


def modes_changed() -> CliplessError:
    return Misuse(
        "train() or eval() was called between the forward pass and its backward(), so what is computed again for the "
        "gradients of single records would not be the same. Call backward() first."
    )


def hidden_output(name: str) -> CliplessError:
    return UnsupportedModule(
        f"{name!r} returns an object in which no tensor is found, so nothing can be checked. Return tensors, or tuples, "
        "lists, dictionaries or dataclasses of them."
    )

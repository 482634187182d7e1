"""What the tape writes down while modules run, and how it puts everything back."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from clipless.errors import CliplessError, Misuse, UnsupportedModule
from clipless.grads.layout import Dims, Place, Shapes, packed_in, shapes_of, written
from clipless.grads.pieces import Piece


@dataclass
class Part:
    """Some records of a logical batch that go through forward and backward together, and what came back for them."""

    records: int
    uses: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    begun: bool = False
    done: bool = False


@dataclass
class Frame:
    """A module whose forward is running, and which of its parameters the tape has turned off for that time."""

    module: nn.Module
    place: Place
    armed: bool
    turned_off: list[nn.Parameter] = field(default_factory=list)
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list)
    dims: Dims = ()
    out_dims: Dims = ()
    random_state: list[Tensor] = field(default_factory=list)


def holders(module: nn.Module) -> list[nn.Module]:
    """The module and those of its children whose parameters it uses itself: lists of parameters, attention's output."""
    own: list[nn.Module] = [module]
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            own += holders(child)
        elif isinstance(module, nn.MultiheadAttention):
            own.append(child)
    return own


def put_back(frame: Frame) -> None:
    for parameter in frame.turned_off:
        parameter.requires_grad_(True)
    for holder, local, parameter in frame.swapped:
        holder._parameters[local] = parameter


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


def shared_input(place: Place, shapes: Shapes, records: int) -> CliplessError:
    got = ", ".join(written(shape, records) for shape in shapes) or "no tensor"
    return UnsupportedModule(
        f"module {place.name!r} has {got} as {place.side} for a batch of B records: its rows are not the records, so their "
        "gradients cannot be told apart. Give it one row per record, in the first dimension (for positions: "
        "positions.expand(len(x), -1)); split a batch with private.loader.microbatches(n), and use other data under "
        "torch.no_grad()."
    )

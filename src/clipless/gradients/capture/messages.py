"""Errors for forward and backward passes in which per-sample gradients cannot be computed."""

from typing import Any

import torch
from torch import nn

from clipless.errors import CliplessError, Misuse, UnsupportedModule
from clipless.gradients.capture.layout import Place
from clipless.gradients.records import written
from clipless.gradients.trees import Shapes, hides_tensors, nested_in, packed_in, shapes_of


def refuse_unfit_inputs(name: str, inputs: Any, records: int) -> None:
    """Raise if no input of the model has a row for each record, or if one is packed."""
    refuse_nested(name, inputs)
    shapes = shapes_of(inputs)
    if shapes and not any(records in shape for shape in shapes):
        raise Misuse(
            "the model's rows are not the batch's records: no input has one row for each. Give it what private.loader "
            "handed out, as it is; split a batch with private.loader.microbatches(n), and use other data under "
            "torch.no_grad()."
        )
    refuse_packed(name, inputs)


def refuse_packed(name: str, values: Any) -> None:
    if packed_in(values):
        raise UnsupportedModule(
            f"module {name!r} is given or returns a packed sequence, in which the records have no dimension of their own. "
            "Hand the model padded sequences and their lengths, pack them in its forward, and give them to nn.RNN, nn.LSTM "
            "or nn.GRU alone."
        )


def refuse_nested(name: str, values: Any) -> None:
    if nested_in(values):
        raise UnsupportedModule(
            f"module {name!r} is given or returns a nested tensor, which torch cannot divide by record. Pad it to one size "
            "(x.to_padded_tensor(0.0)) and mask the padding, or give layers its values without the nesting (x.values(), a "
            "row for each position): clipless finds the record of every row."
        )


def refuse_nested_batch(batch: Any) -> None:
    if nested_in(batch):
        raise UnsupportedModule(
            "the batch holds a nested tensor, in which torch cannot choose single records, so nothing can be checked on "
            "some of them. Pad in the collate function (torch.nn.utils.rnn.pad_sequence), and pass the lengths or a mask."
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
        f"module {place.name!r} has {got} as {place.side} for a batch of B records: its rows are not the records, so "
        "per-sample gradients cannot be computed. Give it one row per record, in the first dimension (for positions: "
        "positions.expand(len(x), -1)); split a batch with private.loader.microbatches(n), and use other data under "
        "torch.no_grad()."
    )


def transformed(owner: str) -> CliplessError:
    return UnsupportedModule(
        f"module {owner!r} or its parameters are used inside torch.vmap or another transform of torch.func, where its "
        "output cannot be tapped. Call layers on the whole batch, outside of transforms. Only a module that uses "
        "parameters of its own in a transform, and no layers, is run again record by record."
    )


def unidentified_rows(owner: str) -> CliplessError:
    return UnsupportedModule(
        f"module {owner!r} has rows that are not the records of the batch, and no seeded backward pass identified their "
        "records: the model returns the loss itself, or a part of it is checkpointed with use_reentrant=True. Compute one "
        "loss per record from the model's output, call private.backward(losses), and checkpoint with use_reentrant=False."
    )


def rows_together(owner: str) -> CliplessError:
    return UnsupportedModule(
        f"module {owner!r} uses its parameters in an operation on rows that are not the records, and the operation does not "
        "treat every row by itself, so per-sample gradients cannot be computed. Give it one row per record, in the first "
        "dimension."
    )


def indivisible(owner: str, operation: object) -> CliplessError:
    return UnsupportedModule(
        f"module {owner!r} uses its parameters in the operation {getattr(operation, '__name__', operation)}, whose gradient "
        f"torch {torch.__version__} cannot compute record by record: the error above says why. Use operations of torch in "
        "its place, or a newer version of torch."
    )


def left_the_model(name: str) -> CliplessError:
    return UnsupportedModule(
        f"module {name!r} returned a tensor computed from its parameters alone, which was combined with records outside the "
        "model's forward, or in a part that is checkpointed with use_reentrant=True. Use it inside, return one row per "
        "record, and checkpoint with use_reentrant=False."
    )


def in_place(owner: str, name: str) -> CliplessError:
    """The error for a module that was given up and can no longer be handled as a whole."""
    return UnsupportedModule(
        f"module {owner!r} uses its parameters in the in-place operation {name!r}, for which per-sample gradients cannot be "
        "computed. Compute a new tensor instead (torch.where, torch.cat, torch.stack, or the operation without the trailing "
        "underscore)."
    )


def draws_at_random(name: str) -> CliplessError:
    return UnsupportedModule(
        f"module {name!r} has parameters of its own and draws random numbers (dropout) in its forward, so its per-sample "
        "gradients cannot be recomputed. Move the parameter into a small module of its own, or turn the randomness off."
    )


def swapped(name: str) -> CliplessError:
    return UnsupportedModule(
        f"module {name!r} runs with other tensors in place of its parameters (torch.func.functional_call), but did not in "
        "the passes in which clipless found out how to handle it. Replace its parameters in every call, or in none."
    )


def fails_alone(name: str, error: Exception) -> CliplessError:
    return UnsupportedModule(
        f"module {name!r} has no layer rule, so it is run again for single records, and that fails with the "
        f"{type(error).__name__} above. If its first run writes into an object that it is given, such as a cache, leave "
        "that out (use_cache=False); otherwise let it take any number of records."
    )


def not_its_own(parameter: str, module: nn.Module) -> CliplessError:
    return UnsupportedModule(
        f"parameter {parameter!r} is not one that {type(module).__name__} computes with in its own forward. For weight norm "
        "and the like use torch.nn.utils.parametrizations."
    )


def interrupted(again: bool) -> CliplessError:
    """The error after a backward pass that raised; `again` if the forward pass has been repeated since."""
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
        "a mean loss whose gradient has 16 bits: the division by the number of records is rounded, so that adding a "
        "record changes the contribution of every other. Call private.backward(losses) with one loss per record "
        "(reduction='none'), or sum the losses and pass loss_reduction='sum'."
    )


def called_in_parts(name: str) -> CliplessError:
    return Misuse(
        f"module {name!r} was called, and not the model that make_private got, so clipless does not see what the loop "
        "computes between its parts, such as a statistic of the batch. Call private.step(record_losses, batch), which sees "
        "everything from batch to losses; or call the model itself (model(x), not model.forward(x)), with all parts "
        "inside its forward; or run other passes under torch.no_grad()."
    )


def unstated_reduction() -> CliplessError:
    return Misuse(
        "loss.backward() was called, but make_private() was not told whether the loss is the mean or the sum over the "
        "records. Use private.step(record_losses, batch) or private.backward(losses), with one loss per record. If it must "
        "be loss.backward(), pass loss_reduction='mean' or 'sum' to make_private."
    )


def modes_changed() -> CliplessError:
    return Misuse(
        "train() or eval() was called between the forward pass and its backward(), so what is recomputed for "
        "per-sample gradients would differ. Call backward() first."
    )


def hidden_output(name: str) -> CliplessError:
    return UnsupportedModule(
        f"{name!r} returns an object in which no tensor is found, so nothing can be checked. Return tensors, or tuples, "
        "lists, dictionaries or dataclasses of them."
    )


def stray_parameter(name: str) -> CliplessError:
    return UnsupportedModule(
        f"parameter {name!r} was used outside its module's forward, so per-sample gradients cannot be computed. Call "
        "the module that owns it, or move the parameter into a small module with a forward of its own."
    )


def inside_shards(name: str) -> CliplessError:
    return Misuse(
        f"module {name!r} of a sharded model was called by itself: the ranks agree on what they do where the model that "
        "was given to make_private is called. Call that model, and use parts of it under torch.no_grad()."
    )


def stray_shard(name: str) -> CliplessError:
    return UnsupportedModule(
        f"parameter {name!r} is used outside the module that owns it, and is sharded there: it is not together then. Leave "
        "that module out of fully_shard, so that it is sharded with the whole model."
    )


def still_divided(name: str) -> CliplessError:
    return UnsupportedModule(
        f"module {name!r} runs while its parameters are sharded: a part of it was given to fully_shard and is never called "
        "by itself, or old-style weight norm looks at them first. Give fully_shard the module around it instead."
    )

"""From the per-sample gradients of a tensor that was computed from parameters alone to those of the parameters."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from clipless.gradients.forms import (
    Form,
    Instantiated,
    Products,
    Scales,
    Stacked,
    Standardisation,
    Standardised,
    can_be_scaled,
    transposed,
)
from clipless.gradients.layers.rule import at_least_float32


@dataclass(frozen=True)
class Root:
    """A parameter that traced tensors are computed from: a leaf of their graph."""

    name: str
    owner: str
    value: Tensor


class FromParameters(Protocol):
    """A tensor computed from parameters alone."""

    value: Tensor
    roots: tuple[Root, ...]


def to_roots(tensor: FromParameters, form: Form) -> list[tuple[str, Form]]:
    """The per-sample gradients of the parameters that a traced tensor was computed from, given its own."""
    if tensor.value.is_leaf:
        return [(tensor.roots[0].name, form)]
    direct = _directly(tensor, form)
    if direct is not None:
        return [(tensor.roots[0].name, direct)]
    standardised = _standardised(tensor, form)
    if standardised is not None:
        return standardised
    values = [root.value for root in tensor.roots]
    cotangents = form.per_record().to(tensor.value.dtype)
    grads = torch.autograd.grad(
        [tensor.value], values, [cotangents], retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    pairs = zip(tensor.roots, grads, strict=True)
    return [(root.name, Instantiated(at_least_float32(g))) for root, g in pairs if g is not None]


def _directly(tensor: FromParameters, form: Form) -> Form | None:
    """The parameter's form, if the traced tensor is a slice of it or has its last two dimensions transposed; else None."""
    node = tensor.value.grad_fn
    if node is None or len(tensor.roots) > 1 or getattr(node.next_functions[0][0], "variable", None) is None:
        return None
    whole = tensor.roots[0].value
    if node.name() == "SelectBackward0" and node._saved_dim == 0:  # type: ignore[attr-defined]
        index = node._saved_index  # type: ignore[attr-defined]
        return Stacked({(index - 2**64 if index >= 2**63 else index) % len(whole): form}, len(whole))
    swapped = node.name() in ("TransposeBackward0", "TBackward0") and tensor.value.shape == whole.mT.shape
    last = swapped and (node.name() == "TBackward0" or _last_two(node, whole.dim()))
    return transposed(form) if last else None


def _last_two(node: Any, rank: int) -> bool:
    """Whether a transposition swaps the last two of so many dimensions, which autograd keeps as unsigned numbers."""
    dims = (node._saved_dim0, node._saved_dim1)
    return {(dim - 2**64 if dim >= 2**63 else dim) % rank for dim in dims} == {rank - 2, rank - 1}


def _standardised(tensor: FromParameters, form: Form) -> list[tuple[str, Form]] | None:
    """The forms of V and of what the scales were computed from, if the tensor is V with its rows standardised."""
    found = _batch_norm(tensor) or _weight_norm(tensor)
    if found is None:
        return None
    whole, how, weight, edge = found
    names = {id(root.value): root for root in tensor.roots}
    if id(whole) not in names or not can_be_scaled(form):
        return None
    products = Products(form, how.direction)
    forms: list[tuple[str, Form]] = [(names.pop(id(whole)).name, Standardised(form, how, products))]
    if len(names) > 1 or (names and edge is None) or (edge is not None and not names):
        return None  # the scales were computed from several parameters, or V and the scales from one
    if edge is not None:
        (gain,) = names.values()
        if _leaves(edge.edge.node) != {id(gain.value)}:
            return None  # V enters the scales too
        forms.append((gain.name, Scales(products, weight, len(form), partial(_pulled, edge, gain.value))))
    return forms


class Scaling(NamedTuple):
    """Where the scales of the rows enter the standardisation, and their shape there."""

    edge: GradientEdge
    shape: torch.Size


Found = tuple[Tensor, Standardisation, float, Scaling | None]


def _pulled(scaling: Scaling, root: Tensor, grads: Tensor) -> Tensor:
    """Gradients of the scales, [b,o], pulled back to the parameter that these were computed from."""
    cotangents = grads.view(-1, *scaling.shape).to(root.dtype)
    (found,) = torch.autograd.grad([scaling.edge], [root], [cotangents], is_grads_batched=True, retain_graph=True)
    return at_least_float32(found)


def _batch_norm(tensor: FromParameters) -> Found | None:
    """W = scale·(V - mean)/std, by torch's batch_norm of [1,o,n], as in timm and transformers."""
    node: Any = tensor.value.grad_fn
    node = node.next_functions[0][0] if node is not None and node.name() == "ViewBackward0" else node
    if node is None or node.name() != "NativeBatchNormBackward0" or not node._saved_training:
        return None
    before, shape = node.next_functions[0][0], node._saved_input.shape
    whole = _leaf(before.next_functions[0][0]) if before is not None and before.name() == "ViewBackward0" else None
    if whole is None or len(shape) != 3 or shape[0] != 1 or whole.shape != tensor.value.shape:
        return None
    if len(whole) != shape[1] or not whole.is_contiguous() or node.next_functions[2][0] is not None:
        return None
    rows, size = node._saved_input.detach()[0], shape[2]
    mean, rate, scale = node._saved_result1, node._saved_result2, node._saved_weight
    direction = ((rows - mean.unsqueeze(1)) * (rate / size**0.5).unsqueeze(1)).view(whole.shape)
    factor = rate if scale is None else rate * scale.detach()
    how, edge = Standardisation(direction, factor, centred=True), node.next_functions[1]
    return whole, how, size**0.5, None if edge[0] is None else Scaling(GradientEdge(*edge), factor.shape)


def _weight_norm(tensor: FromParameters) -> Found | None:
    """W = scale·V/‖V‖, by torch's weight_norm."""
    node: Any = tensor.value.grad_fn
    if node is None or node.name() != "WeightNormInterfaceBackward0" or node._saved_dim != 0:
        return None
    whole, edge = _leaf(node.next_functions[0][0]), node.next_functions[1]
    if whole is None or whole.shape != tensor.value.shape:
        return None
    lengths, scale = node._saved_result1.flatten(), node._saved_g.detach().flatten()
    direction = whole.detach() / lengths.view(-1, *[1] * (whole.dim() - 1))
    how = Standardisation(direction, scale / lengths, centred=False)
    shape = node._saved_g.shape
    return whole, how, 1.0, None if edge[0] is None else Scaling(GradientEdge(*edge), shape)


def _leaves(node: Any) -> set[int]:
    """The parameters that a node of autograd's graph was computed from."""
    if node is None:
        return set()
    leaf = _leaf(node)
    return {id(leaf)} if leaf is not None else {found for before, _ in node.next_functions for found in _leaves(before)}


def _leaf(node: Any) -> Tensor | None:
    """The parameter whose gradient autograd's node accumulates; None for another node."""
    variable: Tensor | None = getattr(node, "variable", None)
    return variable

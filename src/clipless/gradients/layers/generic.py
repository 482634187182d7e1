"""The rule for any other module: recompute and differentiate it for each record, vectorised by vmap."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode

from clipless.gradients.forms import Form, Instantiated
from clipless.gradients.layers.rule import Use, at_least_float32
from clipless.gradients.trees import differentiable
from clipless.torch_internals import pytree


def generic(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    """Exact for every module that draws no random numbers and whose output for a record depends on that record alone.

    What vmap cannot trace (data-dependent control flow, in-place operations) is run in a loop over the records.
    """
    leaves, spec = pytree.tree_flatten((use.args, dict(use.kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    own = {path: use.module.get_parameter(path) for path in use.wanted}
    parameters = {path: parameter.detach() for path, parameter in own.items()}

    def pull_back(parameters: dict[str, Tensor], record: list[Tensor], cotangents: tuple[Tensor, ...]) -> Tensor:
        """Inner product of the module's output for one record with the gradient that arrived there."""
        values = iter(
            value if dim is None else value.unsqueeze(dim) for value, dim in zip(record, use.dims, strict=True)
        )
        args, kwargs = pytree.tree_unflatten([next(values) if isinstance(x, Tensor) else x for x in leaves], spec)
        with ReplacedParameters({id(own[path]): value for path, value in parameters.items()}):
            outputs = differentiable(functional_call(use.module, parameters, args, kwargs))
        rows = [out.squeeze(dim or 0) for out, dim in zip(outputs, use.out_dims, strict=True)]
        parts = [(row * cotangent).sum() for row, cotangent in zip(rows, cotangents, strict=True)]
        return torch.stack(parts).sum()

    per_record = _each_record(grad(pull_back), parameters, tensors, use, grads)
    return {name: Instantiated(at_least_float32(value)) for name, value in per_record.items()}


def generic_rows(
    use: Use, grads: tuple[Tensor, ...], record: Tensor, records: int, by_record: tuple[bool, ...]
) -> dict[str, Form]:
    """As `generic`, for a module whose rows are not the records: it is run on all rows of one record at a time.

    `record` [n] has the record of each of the `use.records` rows. Inputs that are `by_record` are split by record.
    """
    leaves, spec = pytree.tree_flatten((use.args, dict(use.kwargs)))
    parameters = {path: use.module.get_parameter(path).detach() for path in use.wanted}
    found: dict[str, Tensor] = {
        path: at_least_float32(p.new_zeros(records, *p.shape)) for path, p in parameters.items()
    }
    for b in range(records):
        rows = (record == b).nonzero().flatten()
        if len(rows) == 0:
            continue
        where = zip(use.dims, by_record, strict=True)
        some = [_taken(leaf, *next(where), rows, b) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        cotangents = [grad.index_select(0, rows) for grad in grads]
        for path, value in _gradients(use, parameters, pytree.tree_unflatten(some, spec), cotangents).items():
            found[path][b] = value
    return {path: Instantiated(value) for path, value in found.items()}


def gradients_together(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The gradients of the parameters for all rows together."""
    parameters = {path: use.module.get_parameter(path).detach() for path in use.wanted}
    return _gradients(use, parameters, (use.args, dict(use.kwargs)), list(grads))


def _taken(tensor: Tensor, dim: int | None, whole: bool, rows: Tensor, record: int) -> Tensor:
    """A record's slice of a tensor, or its rows."""
    if dim is None:
        return tensor
    return tensor.narrow(dim, record, 1) if whole else tensor.index_select(dim, rows)


def _gradients(use: Use, parameters: dict[str, Tensor], inputs: Any, cotangents: list[Tensor]) -> dict[str, Tensor]:
    own = {id(use.module.get_parameter(path)): path for path in parameters}

    def pull_back(parameters: dict[str, Tensor]) -> Tensor:
        args, kwargs = inputs
        with ReplacedParameters({number: parameters[path] for number, path in own.items()}):
            outputs = differentiable(functional_call(use.module, parameters, args, kwargs))
        moved = [out.movedim(dim or 0, 0) for out, dim in zip(outputs, use.out_dims, strict=True)]
        return torch.stack([(row * cotangent).sum() for row, cotangent in zip(moved, cotangents, strict=True)]).sum()

    return grad(pull_back)(parameters)


class ReplacedParameters(TorchFunctionMode):
    """Inside, operations use these values in place of the tensors with these ids. It reaches parameters that a module also
    holds in a list or a closure, which `functional_call` does not."""

    def __init__(self, values: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        if any(id(leaf) in self._values for leaf in leaves):
            leaves = [self._values.get(id(leaf), leaf) for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        return func(*args, **(kwargs or {}))


def _each_record(
    gradient: Callable[..., dict[str, Tensor]],
    parameters: dict[str, Tensor],
    tensors: list[Tensor],
    use: Use,
    grads: tuple[Tensor, ...],
) -> dict[str, Tensor]:
    in_dims = (None, list(use.dims), tuple(0 for _ in grads))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return vmap(gradient, in_dims=in_dims)(parameters, tensors, grads)
    except RuntimeError:
        rows = []
        for b in range(use.records):
            record = [t if dim is None else t.select(dim, b) for t, dim in zip(tensors, use.dims, strict=True)]
            rows.append(gradient(parameters, record, tuple(g[b] for g in grads)))
        return {name: torch.stack([row[name] for row in rows]) for name in parameters}

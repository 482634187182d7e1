"""Forward-mode differentiation of a pass through a module: how its outputs move as its parameters move along a direction."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipless.errors import UnsupportedModule
from clipless.gradients.checks.passes import Rerun
from clipless.gradients.trees import differentiable


def tangents(rerun: Rerun, name: str, directions: Mapping[int, Tensor]) -> list[Tensor | None]:
    """The derivatives of a module's floating-point outputs along `directions`, given by the id of each parameter; None for
    an output that does not move. Refuses operations that have no forward mode."""
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad(), _kernels(), forward_ad.dual_level():
            own = rerun.module.named_parameters()
            duals = {
                path: forward_ad.make_dual(parameter.detach(), directions[id(parameter)])
                for path, parameter in own
                if id(parameter) in directions
            }

            def run(*args: Any, **kwargs: Any) -> Any:
                return functional_call(rerun.module, duals, args, kwargs)

            with _padding_kept(rerun.module):
                outputs = differentiable(rerun(run=run)[0])
            return [forward_ad.unpack_dual(output).tangent for output in outputs]
    except RuntimeError as refused:
        if "forward AD" not in str(refused) and "jvp" not in str(refused):
            raise
        reason = str(refused).partition(" that does not support it")[0].partition("\n")[0]
        raise UnsupportedModule(
            f"{name!r} does something that has no forward-mode derivative ({reason}), so its gradient norms cannot be "
            "estimated by projections. Use gradients='exact', or replace that operation; a custom autograd.Function needs a "
            "jvp()."
        ) from refused


@contextmanager
def _padding_kept(module: nn.Module) -> Iterator[None]:
    """Inside, what embeddings give for padding does not move, as it has no gradient in the backward pass."""

    def keep(table: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return torch.where((args[0] == table.padding_idx).unsqueeze(-1), output.detach(), output)

    tables = [part for part in module.modules() if isinstance(part, nn.Embedding) and part.padding_idx is not None]
    handles = [table.register_forward_hook(keep) for table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _kernels() -> Iterator[None]:
    """Take the kernels that have a forward mode: not oneDNN's LSTM, not flash attention, not the encoder's fast path."""
    fast = torch.backends.mha.get_fastpath_enabled()
    mkldnn = torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(mkldnn)

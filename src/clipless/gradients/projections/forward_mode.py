"""Forward-mode differentiation of a pass through a module: how its outputs move as its parameters move along a direction."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipless.errors import UnsupportedModule
from clipless.gradients.checks.passes import Rerun
from clipless.gradients.trees import differentiable
from clipless.torch_internals import get_mkldnn_enabled, set_mkldnn_enabled


class ForwardMode:
    """Runs passes again in forward mode: with the kernels of the user's own pass, so that the numbers are the same, or, once
    one of these was found to have no forward mode, with others that have."""

    def __init__(self) -> None:
        self._others = False

    def kernels(self) -> AbstractContextManager[None]:
        """Those that passes are run with."""
        return _kernels(self._others)

    def tangents(self, rerun: Rerun, name: str, directions: Mapping[int, Tensor]) -> list[Tensor | None]:
        """The derivatives of a module's floating-point outputs along `directions`, given by the id of each parameter; None
        for an output that does not move. Refuses operations that have no forward mode."""
        try:
            return self._tangents(rerun, directions)
        except RuntimeError as refused:
            if "forward AD" not in str(refused) and "jvp" not in str(refused):
                raise
            if not self._others:
                self._others = True
                return self.tangents(rerun, name, directions)
            reason = str(refused).partition(" that does not support it")[0].partition("\n")[0]
            raise UnsupportedModule(
                f"{name!r} does something that has no forward-mode derivative ({reason}), so its gradient norms cannot be "
                "estimated by projections. Use gradients='exact', or replace that operation; a custom autograd.Function "
                "needs a jvp()."
            ) from refused

    def _tangents(self, rerun: Rerun, directions: Mapping[int, Tensor]) -> list[Tensor | None]:
        with warnings.catch_warnings(action="ignore"), torch.no_grad(), self.kernels(), forward_ad.dual_level():
            duals = {
                path: forward_ad.make_dual(parameter.detach(), directions[id(parameter)])
                for path, parameter in rerun.module.named_parameters()
                if id(parameter) in directions
            }

            def run(*args: Any, **kwargs: Any) -> Any:
                return functional_call(rerun.module, duals, args, kwargs)

            with _padding_kept(rerun.module):
                outputs = differentiable(rerun(run=run)[0])
            return [forward_ad.unpack_dual(output).tangent for output in outputs]


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
def _kernels(others: bool) -> Iterator[None]:
    """The usual kernels but the encoder's fast path, or `others`: not oneDNN's LSTM and not flash attention."""
    fast, mkldnn = torch.backends.mha.get_fastpath_enabled(), get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    set_mkldnn_enabled(mkldnn and not others)
    try:
        with sdpa_kernel(SDPBackend.MATH) if others else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        set_mkldnn_enabled(mkldnn)

"""Everything that clipless takes from torch beyond its public interface, in one file: what to look at for another version.

Names are torch's own objects, not wrappers: a private step calls some of them for every layer. A version of torch without
one that is needed is refused when clipless is first used. Internals of FSDP2 are in distributed/shards.py, which only
sharded models import. `_parameters`, `_buffers`, `_modules` and `_version`, which torch has always had, are used where they
are needed.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence

from clipless.errors import MissingLibrary

try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_current_level
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
    from torch.nn.modules.dropout import _DropoutNd as AnyDropout
    from torch.nn.modules.instancenorm import _InstanceNorm as AnyInstanceNorm
    from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNorm
    from torch.nn.utils.spectral_norm import SpectralNorm as OldSpectralNorm
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.weak import WeakIdRef

    # The number of the backward pass that is running in this thread; -1 outside of one.
    current_graph_task = torch._C._current_graph_task_id
    # `queue_callback`: called when the running backward pass ends.
    execution_engine: Any = torch.autograd.Variable._execution_engine
    # Contexts in which tensor subclasses are plain tensors, and in which torch functions are not overridden by modes either.
    DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
    DisableTorchFunction = torch._C.DisableTorchFunction
    # The DistributedDataParallel whose forward pass is running, or None.
    active_wrapper: Callable[[], Any] = DistributedDataParallel._get_active_ddp_module
    get_mkldnn_enabled, set_mkldnn_enabled = torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled
    # The functions that nn.LSTM, nn.GRU and nn.RNN call.
    RECURRENT_KERNELS: Any = torch._VF
except (ImportError, AttributeError) as error:
    raise MissingLibrary(
        f"clipless is made for torch 2.6 to 2.15, and this is torch {torch.__version__}, which lacks something ({error}): "
        "install one of these, pip install 'torch>=2.6'."
    ) from error

# oneDNN's product of dense matrices, which torch's compiler calls: (left, right, bias, function, its numbers, algorithm).
onednn_linear: Callable[..., Any] | None = getattr(
    getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None
)

__all__ = [
    "GROUPED_PRODUCTS",
    "RECURRENT_KERNELS",
    "AnyBatchNorm",
    "AnyDropout",
    "AnyInstanceNorm",
    "BackwardCalls",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "OldSpectralNorm",
    "SpectralNorm",
    "StorageWeakRef",
    "TorchDispatchMode",
    "WeakIdRef",
    "active_wrapper",
    "applied",
    "current_graph_task",
    "execution_engine",
    "get_eval_frame_callback",
    "get_mkldnn_enabled",
    "get_unwrapped",
    "instance_norm_writes",
    "is_compiled",
    "is_functorch_wrapped_tensor",
    "maybe_current_level",
    "onednn_linear",
    "pytree",
    "rms_norm_eps",
    "set_mkldnn_enabled",
]

# In torch 2.6 a packed sequence is a leaf of trees, and what recurrent layers take and give would not be seen in it.
if len(pytree.tree_leaves(PackedSequence(torch.empty(0, device="cpu"), torch.empty(0, device="cpu")))) == 1:
    pytree.register_pytree_node(PackedSequence, lambda p: (list(p), None), lambda parts, _: PackedSequence(*parts))

# Products of many matrices at a time, for mixtures of experts. torch has had them since 2.8, in public since 2.10.
GROUPED_PRODUCTS = {
    found for found in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)) if found is not None
}


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without what it does for the transforms of torch.func."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def is_compiled(module: nn.Module) -> bool:
    """Whether the module was compiled by torch.compile, or by its own `compile`."""
    wrapped = type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")
    return wrapped or module._compiled_call_impl is not None


class BackwardCalls:
    """Tells of the next call of `loss.backward()` or `torch.autograd.backward()`, before it runs. torch has no hook for it,
    and what was saved between the outputs and the loss is freed on the way back."""

    def __init__(self) -> None:
        self._plain: Callable[..., None] | None = None

    def await_next(self, tell: Callable[[Any], None]) -> None:
        """Call `tell` with the tensors of the next call, once."""
        self.forget()
        plain = self._plain = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self.forget()
            tell(tensors)
            plain(tensors, *args, **kwargs)

        torch.autograd.backward = backward

    def forget(self) -> None:
        """Tell of nothing any more."""
        if self._plain is not None:
            torch.autograd.backward, self._plain = self._plain, None


@cache
def instance_norm_writes() -> bool:
    """Whether InstanceNorm writes its running statistics in eval mode too, as in torch 2.6: there they become their own mean
    over the records, which is rounded and so depends on how many there are."""
    mean, variance = torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")
    F.instance_norm(torch.zeros(1, 1, 2, device="cpu"), mean, variance, use_input_stats=False)
    return mean._version > 0


@cache
def rms_norm_eps(dtype: torch.dtype) -> float:
    """What RMSNorm without an `eps` adds for inputs of this type: the precision of the type that it computes in or, as in
    torch 2.6, of the input's own."""
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    lifted = F.rms_norm(torch.full((1,), 1e-6, dtype=dtype, device="cpu"), (1,))
    return wide if float(lifted) > 1e-6 / (2 * math.sqrt(wide)) else torch.finfo(dtype).eps

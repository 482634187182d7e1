"""Normalisation layers that treat each record by itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipless.gradients.forms import Form, Instantiated
from clipless.gradients.layers.norm_sums import norm_sums
from clipless.gradients.layers.rule import Use, register
from clipless.torch_internals import rms_norm_eps


@register(nn.LayerNorm)
def layer_norm(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    module = use.module
    assert isinstance(module, nn.LayerNorm)
    return _last_dimensions(use, grads[0], module.normalized_shape, module.eps, centred=True)


@register(nn.GroupNorm)
def group_norm(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    """From sums over positions alone, as torch does: Σ g·(x - mean)/std = (Σ g·x - mean·Σ g)/std."""
    module, acts, grad = use.module, use.batched(), grads[0]
    assert isinstance(module, nn.GroupNorm)
    b, c = acts.shape[:2]
    x, g = acts.reshape(b, c, -1).contiguous(), grad.reshape(b, c, -1)
    shift = g.sum(2)
    forms: dict[str, Form] = {"bias": Instantiated(shift)}
    if "weight" in use.wanted:
        _, *statistics = torch.native_group_norm(x, None, None, b, c, x.shape[2], module.num_groups, module.eps)
        mean, rstd = (s.repeat_interleave(c // module.num_groups, 1) for s in statistics)  # [b,c]
        forms["weight"] = Instantiated((torch.linalg.vecdot(x, g) - mean * shift) * rstd)
    return {name: forms[name] for name in use.wanted}


@register(nn.RMSNorm)
def rms_norm(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    module = use.module
    assert isinstance(module, nn.RMSNorm)
    given = (*use.args, *use.kwargs.values())[0].dtype
    eps = rms_norm_eps(given) if module.eps is None else module.eps
    return _last_dimensions(use, grads[0], module.normalized_shape, eps, centred=False)


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Form]:
    """With running statistics only in eval mode: in training mode the module is refused before it runs."""
    module = use.module
    assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
    acts = use.batched(rank=1 + module._get_no_batch_dim())
    if module.training or not module.track_running_stats:
        normalised = F.instance_norm(acts, eps=module.eps)
    else:
        assert module.running_mean is not None
        assert module.running_var is not None
        mean, var = module.running_mean.to(acts.dtype), module.running_var.to(acts.dtype)
        normalised = F.instance_norm(acts, mean, var, use_input_stats=False, eps=module.eps)
    return _affine(use, normalised, grads[0], dims=range(2, normalised.dim()))


def _last_dimensions(use: Use, grad: Tensor, shape: tuple[int, ...], eps: float, centred: bool) -> dict[str, Form]:
    sums = norm_sums(use.input, grad, len(shape), eps, centred)
    forms = dict(zip(("weight", "bias"), map(Instantiated, sums), strict=True))
    return {name: forms[name] for name in use.wanted}


def _affine(use: Use, normalised: Tensor, grad: Tensor, dims: range) -> dict[str, Form]:
    """Scale and shift after a normalisation: their gradients, summed over the dimensions they are shared along."""
    parts = {"weight": lambda: grad * normalised, "bias": lambda: grad}
    return {name: Instantiated(_summed(parts[name](), dims)) for name in use.wanted}


def _summed(tensor: Tensor, dims: range) -> Tensor:
    return tensor.sum(tuple(dims)) if len(dims) else tensor

"""Modules that are refused because they mix records or store something of them, so that no per-record bound exists."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clipless.errors import Misuse, UnsupportedModule
from clipless.torch_internals import AnyBatchNorm, AnyInstanceNorm, instance_norm_writes, is_compiled


@dataclass(frozen=True)
class Refusal:
    """A kind of module that is refused: which, in what state, why, and what to do instead. `applies` is called with modules
    of these kinds only."""

    what: str
    kinds: tuple[type[nn.Module], ...]
    applies: Callable[[Any], bool]
    why: str
    remedy: str


def _mixes_the_batch(module: AnyBatchNorm) -> bool:
    return module.training or module.running_mean is None


def _tracks_statistics(module: AnyInstanceNorm) -> bool:
    return module.track_running_stats and (module.training or instance_norm_writes())


def _rescales_rows(module: nn.Embedding | nn.EmbeddingBag) -> bool:
    return module.max_norm is not None


def _divides_by_counts(module: nn.Embedding | nn.EmbeddingBag) -> bool:
    return module.scale_grad_by_freq


def _always(module: nn.Module) -> bool:
    return True


REFUSALS = (
    Refusal(
        "ScriptModule, scripted or traced",
        (torch.jit.ScriptModule,),
        _always,
        "is compiled by TorchScript, which runs where no hook can see it",
        "Use the module that it was made from",
    ),
    Refusal(
        "BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm in training mode or without running statistics",
        (AnyBatchNorm,),
        _mixes_the_batch,
        "mixes records, so no per-record bound exists",
        "Replace it with GroupNorm (clipless.replace_batchnorm(model)) or put it in eval mode (with running statistics) "
        "and keep it there: model.train() turns it on again",
    ),
    Refusal(
        "InstanceNorm1d, InstanceNorm2d, InstanceNorm3d with running statistics in training mode",
        (AnyInstanceNorm,),
        _tracks_statistics,
        "keeps running statistics of the training records, which no noise protects",
        "Build it with track_running_stats=False",
    ),
    Refusal(
        "Embedding, EmbeddingBag with max_norm",
        (nn.Embedding, nn.EmbeddingBag),
        _rescales_rows,
        "has max_norm, which rescales the rows that the records use, without noise",
        "Build it with max_norm=None",
    ),
    Refusal(
        "Embedding, EmbeddingBag with scale_grad_by_freq",
        (nn.Embedding, nn.EmbeddingBag),
        _divides_by_counts,
        "has scale_grad_by_freq, which divides by counts over the whole batch and so mixes records",
        "Build it with scale_grad_by_freq=False",
    ),
)


# A quick test: most modules are of none of these kinds.
_SUSPECTS = tuple(kind for refusal in REFUSALS for kind in refusal.kinds)


def refuse_compiled(module: nn.Module, name: str) -> None:
    """Raise if the module was compiled by torch.compile, or by its own `compile`."""
    if is_compiled(module):
        raise UnsupportedModule(f"{name!r} is compiled by torch.compile, which {_NO_HOOKS}")


_NO_HOOKS = (
    "skips the hooks that compute per-sample gradients. Train the model it was made from "
    "(model._orig_mod of torch.compile(model)); to evaluate, compile a copy (copy.deepcopy(model))."
)


def compiled_pass() -> Misuse:
    """The error to raise if torch.compile runs the model."""
    return Misuse(f"the model is run by torch.compile, which {_NO_HOOKS}")


def may_be_refused(module: nn.Module) -> bool:
    """Whether the module is of a kind that is refused in some mode."""
    return isinstance(module, _SUSPECTS)


def refuse_module(module: nn.Module, name: str) -> None:
    """Raise if the module, in its present mode, mixes the records of a batch or stores statistics of them."""
    if not isinstance(module, _SUSPECTS):
        return
    for refusal in REFUSALS:
        if isinstance(module, refusal.kinds) and refusal.applies(module):
            raise UnsupportedModule(f"{type(module).__name__} {name!r} {refusal.why}. {refusal.remedy}.")

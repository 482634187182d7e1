"""What cannot be bounded per record and is refused by name: modules that mix records or learn from them in secret."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from clipless.errors import UnsupportedModule


def refuse_module(module: nn.Module, name: str) -> None:
    """Raise if the module, in its present mode, mixes the records of a batch or keeps statistics of them."""
    kind = type(module).__name__
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        raise UnsupportedModule(
            f"{kind} {name!r} mixes records, so no per-record bound exists. Replace it with GroupNorm, or put it in eval "
            "mode (with running statistics) and keep it there: model.train() turns it on again."
        )
    if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
        raise UnsupportedModule(
            f"{kind} {name!r} keeps running statistics of the training records, which no noise protects. Build it with "
            "track_running_stats=False."
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise UnsupportedModule(
            f"{kind} {name!r} has max_norm, which rescales the rows that the records use, without noise. Build it with "
            "max_norm=None."
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        raise UnsupportedModule(
            f"{kind} {name!r} has scale_grad_by_freq, which divides by counts over the whole batch and so mixes records. "
            "Build it with scale_grad_by_freq=False."
        )


class BufferGuard:
    """Notices buffers that a forward pass in training changes: what the records write there, no noise protects."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._values: dict[str, Tensor] = {}
        self._clean = False

    def remember(self) -> None:
        """Note the buffers as they are. Until one forward pass was clean their values are kept, to be put back."""
        self._before = {name: (buffer, buffer._version) for name, buffer in self._floating()}
        if not self._clean:
            self._values = {name: buffer.detach().clone() for name, buffer in self._floating()}

    def refuse_changes(self) -> None:
        """Raise if a buffer was written to or replaced since `remember`."""
        now = dict(self._floating())
        for name, (buffer, version) in self._before.items():
            if now.get(name) is not buffer or buffer._version != version:
                self._put_back()
                raise UnsupportedModule(
                    f"buffer {name!r} changes during a training forward pass, which would store the records without "
                    "noise. Turn off what tracks statistics there, or put that module in eval mode."
                )
        self._values, self._clean = {}, True

    def _floating(self) -> list[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in self._model.named_buffers() if buffer.is_floating_point()]

    def _put_back(self) -> None:
        with torch.no_grad():
            for name, value in self._values.items():
                buffer = self._before[name][0]
                buffer.copy_(value)
                owner, _, own_name = name.rpartition(".")
                self._model.get_submodule(owner)._buffers[own_name] = buffer

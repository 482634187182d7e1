"""Which dimension of its inputs and outputs a layer reads as the batch, and which inputs it reads as a single record."""

from torch import nn

from clipless.gradients.trees import Dims

_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
_INSTANCE_NORMS: dict[type[nn.Module], int] = {nn.InstanceNorm1d: 2, nn.InstanceNorm2d: 3, nn.InstanceNorm3d: 4}


def is_packed(module: nn.Module, ranks: tuple[int, ...]) -> bool:
    """Whether the first of these inputs is a packed sequence: its data is followed by a tensor that counts as a number."""
    return isinstance(module, nn.RNNBase) and len(ranks) > 1 and ranks[1] == 0


def is_unbatched(module: nn.Module, ranks: tuple[int, ...]) -> bool:
    """Whether the first input is a single record for the layer."""
    rank = ranks[0]
    if isinstance(module, _CONVOLUTIONS):
        return rank == 1 + len(module.kernel_size)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return rank == len(module.normalized_shape)
    for norm, unbatched in _INSTANCE_NORMS.items():
        if isinstance(module, norm):
            return rank == unbatched
    if isinstance(module, nn.RNNBase):
        return rank == 2 and not is_packed(module, ranks)
    return rank == (0 if isinstance(module, nn.Embedding) else 1)


def batch_dims(module: nn.Module, ranks: tuple[int, ...], packed: bool = False) -> Dims:
    """The dimension of the batch in each tensor of a batched call, inputs or outputs, of so many dimensions. Where sequences
    are `packed`, their data counts as one row for each."""
    if not isinstance(module, nn.RNNBase):
        return tuple(0 if rank else None for rank in ranks)
    first = 0 if module.batch_first or packed else 1
    return tuple(None if not rank else first if k == 0 else 0 if rank == 1 else 1 for k, rank in enumerate(ranks))

"""conv.c: gradients per record of a convolution's weight."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clipless.native.library import COUNT, POINTER, function, threads
from clipless.native.tiles import LANES, ROWS, whole

# As in the source: how many numbers of patches are laid out at a time, for how many positions at least, and how far past the
# end memory is touched.
PATCHES, FEWEST, RUN = 24576, 8, 8


class Geometry(NamedTuple):
    """How a convolution moves over its input: for each dimension the zero padding on both sides, stride and dilation."""

    padding: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    groups: int


# Input [b,c,*s], gradient of the output [b,o,*t], the weight's shape [o,i,*k] and how it moves; to gradients [b,o,i,*k] and
# their squared norms [b], float64.
ConvRows = Callable[[Tensor, Tensor, Sequence[int], Geometry], tuple[Tensor, Tensor]]


def build(library: Path) -> ConvRows | None:
    """For float32 tensors in main memory, in one or two dimensions."""
    run = function(library, "clipless_conv_rows", *[POINTER] * 6, *[COUNT] * 3)
    if run is None:
        return None

    def rows(acts: Tensor, grads: Tensor, weight: Sequence[int], how: Geometry) -> tuple[Tensor, Tensor]:
        outputs, channels, *kernel = weight
        _refuse_unfit(acts, grads, weight, how)
        acts, grads = acts.contiguous(), grads.contiguous()
        made, squares = acts.new_empty(len(acts), *weight), torch.empty(len(acts), dtype=torch.float64)
        (height, width), (above, left), (tall, wide) = _two(acts.shape[2:], 1), _two(how.padding, 0), _two(kernel, 1)
        moves = (*_two(how.stride, 1), *_two(how.dilation, 1))
        seen = (len(acts), how.groups, channels, height, width, above, left, outputs // how.groups)
        innermost = puts_channels_innermost(channels)
        sizes = (*seen, *_two(grads.shape[2:], 1), tall, wide, *moves, innermost)
        stride = whole(min(channels, LANES) * tall * wide, LANES)
        padded = (
            (height + 2 * above) * (width + 2 * left) * (whole(channels, LANES) if innermost else how.groups * channels)
        )
        padded += RUN
        room = padded + (ROWS * tall * wide * LANES if innermost else max(PATCHES, FEWEST * stride)) + RUN
        workers = max(1, min(len(acts), threads(made.nbytes * grads[0, 0].numel() if len(acts) else 0)))
        memory = acts.new_empty(workers * room)
        places = [tensor.data_ptr() for tensor in (acts, grads, made, squares)]
        run(*places, (COUNT * len(sizes))(*sizes), memory.data_ptr(), padded, room, workers)
        return made, squares

    return rows


def puts_channels_innermost(channels: int) -> bool:
    """Whether LANES channels are computed side by side: at most a quarter of the lanes may be without one.

    >>> [count for count in range(50) if puts_channels_innermost(count)]
    [12, 13, 14, 15, 16, 24, 25, 26, 27, 28, 29, 30, 31, 32, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49]
    """
    return 0 < 3 * whole(channels, LANES) <= 4 * channels


def _refuse_unfit(acts: Tensor, grads: Tensor, weight: Sequence[int], how: Geometry) -> None:
    """Refuse sizes that do not fit together: the compiled code would read past the end of a tensor."""
    fit = acts.shape[:2] == (len(grads), weight[1] * how.groups) and grads.shape[1] == weight[0]
    fit = fit and acts.dtype is grads.dtype is torch.float32 and acts.is_cpu and grads.is_cpu
    for size, positions, kernel, pad, stride, apart in zip(
        acts.shape[2:], grads.shape[2:], weight[2:], how.padding, how.stride, how.dilation, strict=True
    ):
        fit = fit and (positions - 1) * stride + (kernel - 1) * apart < size + 2 * pad
    if not fit:
        raise ValueError(
            f"gradients {tuple(grads.shape[1:])} are not those of a convolution of {tuple(acts.shape[1:])}."
        )


def _two(sizes: Sequence[int], missing: int) -> tuple[int, int]:
    """Sizes in two dimensions; in one dimension the first is `missing`."""
    return (missing, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])

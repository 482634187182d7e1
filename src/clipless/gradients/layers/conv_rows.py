"""Per-sample gradients of a convolution's weight, written out by compiled code: native/conv.c."""

from collections.abc import Iterator

import torch
from torch import Tensor

from clipless.native import checked, wave
from clipless.native.conv import ConvRows, Geometry, build


def _pairs(ours: ConvRows) -> Iterator[tuple[Tensor, Tensor]]:
    """For sizes that fill no block, more positions than are taken at a time, every kind of move, few channels and many."""
    for acts, grads, weight, how in (
        (wave(3, 1, 28, 28), wave(3, 9, 13, 13), (9, 1, 8, 8), Geometry((2, 2), (2, 2), (1, 1), 1)),
        (wave(2, 6, 9, 11), wave(2, 10, 4, 11), (10, 3, 3, 2), Geometry((0, 1), (2, 1), (1, 2), 2)),
        (wave(2, 40, 20, 19), wave(2, 17, 18, 17), (17, 40, 3, 3), Geometry((0, 0), (1, 1), (1, 1), 1)),
        (wave(2, 3, 40, 40), wave(2, 2, 36, 36), (2, 3, 3, 3), Geometry((0, 0), (1, 1), (2, 2), 1)),
        (wave(2, 5, 30), wave(2, 3, 30), (3, 5, 4), Geometry((3,), (1,), (2,), 1)),
        (wave(2, 18, 7, 7), wave(2, 4, 5, 5), (4, 18, 3, 3), Geometry((0, 0), (1, 1), (1, 1), 1)),
        (wave(2, 26, 9, 11), wave(2, 10, 4, 11), (10, 13, 2, 2), Geometry((0, 1), (2, 1), (1, 2), 2)),
        (wave(1, 16, 41, 20), wave(1, 3, 20, 18), (3, 16, 3, 3), Geometry((0, 0), (2, 1), (1, 1), 1)),
        (wave(2, 12, 9, 5), wave(2, 9, 5, 4), (9, 12, 3, 2), Geometry((0, 0), (1, 1), (2, 1), 1)),
        (wave(1, 16, 300), wave(1, 3, 300), (3, 16, 4), Geometry((3,), (1,), (2,), 1)),
    ):
        made, squares = ours(acts, grads, weight, how)
        expected = by_torch(acts, grads, weight, how)
        yield made, expected
        yield squares, expected.double().flatten(1).square().sum(1)


def by_torch(acts: Tensor, grads: Tensor, weight: tuple[int, ...], how: Geometry) -> Tensor:
    """The same, one record at a time."""
    moves = (how.stride, how.padding, how.dilation, False, [0] * len(how.padding), how.groups, [False, True, False])
    like, pairs = acts.new_empty(weight), zip(acts.split(1), grads.split(1), strict=True)
    return torch.stack([torch.ops.aten.convolution_backward(grad, one, like, None, *moves)[1] for one, grad in pairs])


compiled = checked(build, _pairs, rtol=1e-4, atol=1e-4)

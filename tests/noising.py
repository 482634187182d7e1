"""The noise of a seeded run, computed apart from it, and what a release with that noise must be."""

from collections.abc import Iterable

import torch
from torch import Tensor

from clipless.noise.adding import grid
from clipless.noise.keys import SeededKeys
from clipless.noise.normals import standard_normals


def seeded_normals(seed: int, stream: str, step: int, templates: Iterable[Tensor]) -> list[Tensor]:
    """The standard normals that a run with this seed adds in a step, shaped like the tensors that it adds them to."""
    wanted = list(templates)
    numbers = standard_normals(SeededKeys(seed).key(stream, step), sum(one.numel() for one in wanted))
    parts = torch.from_numpy(numbers).split([one.numel() for one in wanted])
    return [part.view(one.shape) for part, one in zip(parts, wanted, strict=True)]


def assert_on_grid(released: Tensor, exact: Tensor, stddev: float, within: float, divisor: float = 1.0) -> None:
    """What was released is the exact value rounded to the grid of the noise, then divided, if the value may be off by
    `within` before. Divided values are in float32."""
    step = grid(stddev)
    low, high = (((exact.double() + off) / step).round() * step for off in (-within, within))
    if divisor != 1:
        low, high = ((value * (1 / divisor)).float() for value in (low, high))
    assert ((low <= released) & (released <= high)).all(), (released, exact)

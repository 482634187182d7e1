"""Synthetic pictures of a fixed seed, from which features can learn what images are like without looking at anybody's."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COVERED = 0.995  # of a picture by leaves

CURVES = 3  # in a drawing, of which the second and the third may be missing
CHANCES = (1.0, 0.8, 0.5)
CORNERS = 3  # of a curve
POINTS = 16  # at which the distance to a curve is measured
SPREAD = 0.22  # of the corners about the middle, in sides of the picture
MARGIN = 0.12
THICK = 0.5  # the share of drawings with blobs instead of lines
TEXTURED = 0.4  # of those with blobs
AT_A_TIME = 500
MADE_OF = f"{COVERED}-{CURVES}-{CHANCES}-{CORNERS}-{POINTS}-{SPREAD}-{MARGIN}-{THICK}-{TEXTURED}"


def pictures(count: int, channels: int, side: int, seed: int) -> Tensor:
    """Pictures [count, channels, side, side] in [-1, 1] like those of a data set: drawings if it is grey, else dead leaves,
    each in eight positions, of which all are as likely."""
    if channels == 1:
        return drawings(count, side, seed)
    leaves = dead_leaves(-(-count // 8), side, channels, seed)
    turned = [torch.rot90(leaves, turns, (2, 3)) for turns in range(4)]
    return torch.cat([*turned, *(each.flip(3) for each in turned)])[:count]


def dead_leaves(count: int, side: int, channels: int, seed: int) -> Tensor:
    """Opaque shapes of all sizes that hide each other, whose small patches are distributed much like those of photographs:
    ellipses, rectangles and triangles, the nearest drawn first, with sizes of density r**-3, colours of their own and a
    gradient of light."""
    generator = np.random.default_rng(seed)
    made = np.stack([_leaves(side, channels, generator) for _ in range(count)])
    return torch.from_numpy(made.clip(-1, 1)).permute(0, 3, 1, 2)


def drawings(count: int, side: int, seed: int) -> Tensor:
    """Something bright in the middle of a dark picture: up to three curves, drawn as lines or as blobs."""
    generator = torch.Generator().manual_seed(seed)
    parts = [min(AT_A_TIME, count - start) for start in range(0, count, AT_A_TIME)]
    return torch.cat([_drawings(part, side, generator) for part in parts])


def _leaves(side: int, channels: int, generator: np.random.Generator) -> NDArray[np.float32]:
    y, x = np.mgrid[:side, :side].astype(np.float32)
    picture, free = np.zeros((side, side, channels), np.float32), np.ones((side, side), bool)
    while free.mean() > 1 - COVERED:
        radius = (1 - generator.random() * (1 - (side / 2) ** -2)) ** -0.5  # from 1 to side / 2
        centre, turn = generator.uniform(-0.1, 1.1, 2) * side, generator.uniform(0, np.pi)
        dx, dy = x - centre[0], y - centre[1]
        u = dx * np.cos(turn) + dy * np.sin(turn)
        v = (dy * np.cos(turn) - dx * np.sin(turn)) / generator.uniform(0.3, 1)
        shapes = (
            u**2 + v**2 < radius**2,
            np.maximum(abs(u), abs(v)) < radius,
            (v > -radius / 2) & (v < radius - 1.7 * abs(u)),
        )
        seen = shapes[generator.integers(3)] & free
        colour = generator.uniform(-1, 1) + 0.35 * generator.standard_normal(channels)
        light = generator.standard_normal(2) * generator.random() * 2 / side
        picture[seen] = colour.clip(-1, 1) + (light[0] * dx + light[1] * dy)[seen, None]
        free &= ~seen
    return picture


def _drawings(count: int, side: int, generator: torch.Generator) -> Tensor:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    thick = uniform(0, 1, 1, 1) < THICK
    width = torch.where(thick, uniform(0.06, 0.26, 1, CURVES), uniform(0.02, 0.06, 1, 1))
    brightness = torch.where(thick, uniform(0.2, 1, 1, CURVES), 1.0)
    there = uniform(0, 1, 1, CURVES) < torch.tensor(CHANCES)
    distance = _distances(_curves(count, generator), side)  # b picture, p pixel, c curve
    ink = ((width - distance) * side + 0.5).clamp(0, 1) * there
    picture = torch.zeros(count, side * side)
    for curve in range(CURVES):
        picture = picture.lerp(brightness[..., curve].expand_as(picture), ink[..., curve])
    rough = thick[..., 0] & (uniform(0, 1, 1) < TEXTURED)
    picture *= 1 + 0.3 * rough * torch.randn(picture.shape, generator=generator)
    return (2 * picture.clamp(0, 1) - 1).unflatten(1, (1, side, side))


def _curves(count: int, generator: torch.Generator) -> Tensor:
    """Points on quadratic Bézier curves, [count, curves, points, 2], in sides of the picture."""
    corners = 0.5 + SPREAD * torch.randn(count, CURVES, CORNERS, 2, generator=generator)
    along = torch.linspace(0, 1, POINTS)
    weights = torch.stack([(1 - along) ** 2, 2 * along * (1 - along), along**2], 1)
    return weights @ corners.clamp(MARGIN, 1 - MARGIN)


def _distances(curves: Tensor, side: int) -> Tensor:
    """From every pixel to every curve, [count, pixels, curves]."""
    place = torch.linspace(0, 1, side)
    pixels = torch.cartesian_prod(place, place).flip(1).expand(len(curves), -1, -1)
    return torch.cdist(pixels, curves.flatten(1, 2)).unflatten(2, curves.shape[1:3]).amin(-1)

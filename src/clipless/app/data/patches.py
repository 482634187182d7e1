"""Features of an image from its patches: how much each resembles the atoms of a fixed dictionary, averaged over parts of the
image (Coates and Ng 2011).

The dictionary is learned from synthetic pictures of a fixed seed, so it contains nothing of anybody's records.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from clipless.app.data.synthetic import dead_leaves
from clipless.errors import InvalidArgument

PATCH = 6  # pixels on a side
MARGIN = 2  # pixels added around the image
ATOMS = {1: 128, 3: 256}  # by number of channels
GRID = 4  # parts of the image on a side
THRESHOLD = 0.5  # below which a response does not count
CONTRAST = 0.01  # variance below which a patch counts as flat, with pixels in [-1, 1]
WHITENING = 0.1  # of the mean variance, added to every direction before whitening

PICTURES = 40
PICTURE_SIDE = 96
SAMPLE = 100_000
LEAST_STDDEV = 0.05  # of a patch the dictionary learns from
ROUNDS = 10
SEED = 0
MADE_OF = (
    f"{PATCH}-{MARGIN}-{ATOMS}-{GRID}-{THRESHOLD}-{CONTRAST}-{WHITENING}-{PICTURES}-{PICTURE_SIDE}-{ROUNDS}-{SEED}"
)


def patch_features(images: Tensor) -> Tensor:
    """(2 * atoms, GRID, GRID) features of each image with pixels in [-1, 1]: positive and negative responses, with mean 0
    and variance 1 within each record."""
    _refuse_unfit(images.shape[1:])
    atoms = dictionary(images.shape[1])
    padded = F.pad(images, (MARGIN,) * 4, value=-1.0 if images.shape[1] == 1 else 0.0)
    height, width = (side - PATCH + 1 for side in padded.shape[2:])
    responses = contrast_normalised(F.unfold(padded, PATCH).transpose(1, 2)) @ atoms  # b record, l place, a atom
    parts = _parts(height, width)
    found = [parts @ (sign * responses - THRESHOLD).clamp(min=0) for sign in (1, -1)]  # [b,g,a]
    features = torch.cat(found, 2).mT.unflatten(2, (GRID, GRID))
    return F.layer_norm(features, features.shape[1:])


def _refuse_unfit(shape: Sequence[int]) -> None:
    """Images without a patch for every part of the grid, and those of other channels than a dictionary is made for."""
    channels, *sides = shape
    least = GRID + PATCH - 1 - 2 * MARGIN
    if channels not in ATOMS or min(sides) < least:
        raise InvalidArgument(
            f"patches are features of grey or colour images with sides of at least {least} pixels, and these have the shape "
            f"{tuple(shape)}: leave +patches out."
        )


def contrast_normalised(patches: Tensor) -> Tensor:
    """Each patch, the last dimension, without its mean and with about unit variance; flat ones stay small."""
    centred = patches - patches.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + CONTRAST).sqrt()


@cache
def dictionary(channels: int) -> Tensor:
    """Filters [pixels, atoms]: whitening of natural patches, then atoms of unit length found by k-means up to sign."""
    generator = torch.Generator().manual_seed(SEED)
    patches = F.unfold(dead_leaves(PICTURES, PICTURE_SIDE, channels, SEED), PATCH).transpose(1, 2).flatten(0, 1)
    patches = patches[torch.randperm(len(patches), generator=generator)[: 2 * SAMPLE]]
    patches = contrast_normalised(patches[patches.std(1) > LEAST_STDDEV][:SAMPLE])
    whitening = _whitening(patches)
    return whitening @ _atoms(F.normalize(patches @ whitening), ATOMS[channels], generator).T


def _whitening(patches: Tensor) -> Tensor:
    variances, directions = torch.linalg.eigh((patches.T @ patches / len(patches)).double())
    scales = (variances.clamp(min=0) + WHITENING * variances.mean()).rsqrt()
    return (directions * scales @ directions.T).float()


def _atoms(patches: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """The mean directions of `count` clusters of patches of unit length; a patch and its negative are in one cluster."""
    atoms = patches[torch.randperm(len(patches), generator=generator)[:count]]
    for _ in range(ROUNDS):
        likeness = patches @ atoms.T
        nearest = likeness.abs().argmax(1)
        signs = likeness.gather(1, nearest[:, None]).sign()
        sums = torch.zeros_like(atoms).index_add_(0, nearest, patches * signs)
        atoms = torch.where(sums.norm(dim=1, keepdim=True) > 0, F.normalize(sums), atoms)
    return atoms


def _parts(height: int, width: int) -> Tensor:
    """[GRID * GRID, height * width]: a row averages the places of one part of the image."""
    rows, columns = (torch.arange(side) * GRID // side for side in (height, width))
    part = (rows[:, None] * GRID + columns).flatten()
    found = F.one_hot(part, GRID * GRID).T.float()
    return found / found.sum(1, keepdim=True)

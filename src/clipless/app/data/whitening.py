"""Whitening of features by what they are like on synthetic pictures: directions in which they vary little count as much as
those in which they vary a lot, so that a linear model learns all of them in few steps. It sees nobody's records."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PICTURES = 8_000
SEED = 1
MOST = 4_000  # directions that are kept
REGULARISATION = 1.0  # of the mean variance, added to every direction's
MADE_OF = f"{PICTURES}-{SEED}-{MOST}-{REGULARISATION}"


@dataclass(frozen=True)
class Whitening:
    """Minus a mean, times directions: [features], [features, kept]."""

    mean: Tensor
    directions: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Whitened features of records, each with mean square 1."""
        found = (features - self.mean) @ self.directions
        return F.normalize(found) * math.sqrt(found.shape[1])


def whitening_of(features: Tensor) -> Whitening:
    """The whitening of these features, [records, features], along the `MOST` directions in which they vary most."""
    mean = features.mean(0)
    centred = features - mean
    variances, records = torch.linalg.eigh(centred @ centred.T / len(centred))  # those of the covariance, without zeros
    added = REGULARISATION * variances.sum() / features.shape[1]
    kept = min(MOST, features.shape[1], len(features) - 1)
    variances, records = variances[-kept:].clamp(min=1e-6 * variances[-1]), records[:, -kept:]
    unit = centred.T @ records / (len(centred) * variances).sqrt()
    return Whitening(mean, unit / (variances + added).sqrt())

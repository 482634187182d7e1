"""The reliability diagram of a finished run, as the numbers from which it is drawn."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from clipless import reliability

BINS, PART = 15, 1024


@torch.no_grad()
def reliability_bins(model: nn.Module, test: TensorDataset) -> dict[str, Any] | None:
    """Confidence, accuracy and count of each bin on the test records, None in empty bins, and the calibration error. None
    for a model whose outputs are not finite. The model's mode is restored."""
    training = model.training
    model.eval()
    x, y = test.tensors
    probabilities = torch.cat([model(part).double().softmax(1) for part in x.split(PART)])
    model.train(training)
    if not probabilities.isfinite().all():
        return None
    bins = reliability.bins_of(probabilities, y, BINS)
    return {
        "confidence": _plain(bins.confidence),
        "accuracy": _plain(bins.accuracy),
        "counts": [int(count) for count in bins.counts],
        "ece": bins.ece(),
    }


def _plain(values: Any) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]

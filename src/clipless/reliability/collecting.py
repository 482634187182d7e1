"""The predictions of a model on a loader of test records."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from clipless.arrays import Floats
from clipless.errors import InvalidArgument, Misuse
from clipless.reliability.checks import Labels

if TYPE_CHECKING:
    from torch import nn


def predictions(model: "nn.Module", loader: Iterable[Any]) -> tuple[Floats, Labels]:
    """Probabilities [N, K] in float64, and labels [N], of a classifier over batches `(inputs, labels)` of test records.

    The model runs in evaluation mode without gradients, and is left in the mode it was in. Its outputs are taken for
    logits [B, K], or [B] or [B, 1] for one class against another.
    """
    import torch

    from clipless.sampling.loader import PrivateLoader

    if isinstance(loader, PrivateLoader):
        raise Misuse("this loader draws batches for private steps: give one over test records instead.")
    training = {module: module.training for module in model.modules()}
    place = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    shares, labels = [], []
    model.eval()
    try:
        with torch.no_grad():
            for batch in loader:
                if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                    raise InvalidArgument(
                        "the loader must give (inputs, labels); else compute the probabilities yourself."
                    )
                inputs, truth = batch
                shares.append(_probabilities(torch, model(inputs.to(place)).double()))
                labels.append(truth.flatten().cpu().numpy().astype(np.int64))
    finally:
        for module, mode in training.items():
            module.training = mode
    if not labels:
        raise InvalidArgument("the loader has no batches: there is nothing to judge.")
    return np.concatenate(shares), np.concatenate(labels)


def _probabilities(torch: Any, logits: Any) -> Floats:
    if logits.ndim == 1 or logits.shape[1] == 1:
        logits = torch.stack([torch.zeros_like(logits.flatten()), logits.flatten()], 1)
    if logits.ndim != 2:
        raise InvalidArgument(f"the model's output must be logits [B, K], got shape {tuple(logits.shape)}.")
    found: Floats = logits.softmax(1).cpu().numpy()
    return found

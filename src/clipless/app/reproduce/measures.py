"""What is measured of a run besides its score: how far its confidence can be trusted, and, in research mode, norms."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from clipless import reliability
from clipless.app.data import Data
from clipless.app.training import TASKS, TrainingProgress, TrainingSettings
from clipless.gradients.clipped_sum import clipped_sum
from clipless.thresholds.dc_e import expected_error

TIME = "CPU minutes"
SAMPLE = 512
PART = 1024
THRESHOLDS = np.logspace(-3, 2, 51)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 15


@torch.no_grad()
def confidence(model: nn.Module, data: Data) -> dict[str, Any]:
    """ECE, NLL and Brier score on the test records, and the bins of the reliability diagram."""
    x, y = data.test.tensors
    probabilities = torch.cat([model(part).softmax(1) for part in x.split(PART)])
    bins = reliability.bins_of(probabilities, y, BINS)
    true_class = probabilities[torch.arange(len(y)), y]
    return {
        "ECE": reliability.ece(probabilities, y),
        "NLL": reliability.nll(probabilities, y),
        "Brier": reliability.brier(probabilities, y),
        "reliability": {
            "confidence": _plain(bins.confidence),
            "accuracy": _plain(bins.accuracy),
            "counts": [int(count) for count in bins.counts],
            "true_class": np.histogram(true_class.numpy(), bins=20, range=(0, 1))[0].tolist(),
        },
    }


@dataclass
class NormWatch:
    """Norms of the per-sample gradients of a fixed sample of training records, over training.

    Not private: for public data only. `found` has for each look the step, quantiles of the norms, the share of records
    above the threshold, and the mean square of what clipping at each of `THRESHOLDS` would cut off.
    """

    data: Data
    settings: TrainingSettings
    found: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, model: nn.Module, progress: TrainingProgress) -> None:
        norms = self._norms(model)
        threshold = progress.threshold or 1.0
        ordered = np.quantile(norms, QUANTILES)
        self.found.append(
            {
                "step": progress.step,
                "threshold": threshold,
                "quantiles": ordered.tolist(),
                "above": float((norms > threshold).mean()),
                "cut": expected_error(THRESHOLDS, np.ones_like(norms), norms, cost=0.0).tolist(),
                "histogram": np.histogram(np.log10(norms + 1e-12), bins=40, range=(-4, 2))[0].tolist(),
            }
        )

    def _norms(self, model: nn.Module) -> Any:
        losses = TASKS[self.data.task].losses
        batch = tuple(tensor[:SAMPLE] for tensor in self.data.train.tensors)
        twin = copy.deepcopy(model)  # the hooks of a private run do nothing in a copy
        made = clipped_sum(twin, lambda m, b: losses(m(b[0]), b[1]), batch, clipping="abadi")
        return made.norms.flatten().double().numpy()


def watch(names: tuple[str, ...], data: Data, settings: TrainingSettings) -> NormWatch | None:
    """What looks at training records while a run goes on; None unless the experiment asks for it."""
    return NormWatch(data, settings) if "norms" in names else None


def measured(names: tuple[str, ...], model: nn.Module, data: Data, watching: NormWatch | None) -> dict[str, Any]:
    """The further numbers of a finished run."""
    extra: dict[str, Any] = {}
    for name in names:
        if name in AFTERWARDS:
            extra |= AFTERWARDS[name](model.eval(), data)
    return extra | ({} if watching is None else {"norms": watching.found})


AFTERWARDS: dict[str, Callable[[nn.Module, Data], dict[str, Any]]] = {"confidence": confidence}


def _plain(values: Any) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]

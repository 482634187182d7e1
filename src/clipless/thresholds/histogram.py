"""The histogram of gradient norms that the DC policies share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clipless import defaults
from clipless.arguments import positive
from clipless.errors import InvalidArgument, InvalidType
from clipless.thresholds.policy import Fixed, Setting, State


@dataclass(frozen=True)
class Histogram(Fixed):
    """Counts of norms in equal bins on [0, range], one histogram for each of G groups, with noise on every bin.

    A record hits one bin in each group: sensitivity √G. Norms above the range, or not finite, are in the last bin.
    `histogram_multiplier` is the noise multiplier of the whole statistic; None takes it from the step's, see `spread`.
    """

    bins: int = defaults.BINS
    start: float = defaults.THRESHOLD
    histogram_multiplier: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bins, bool) or not isinstance(self.bins, int):
            raise InvalidType(f"bins must be a whole number, got {self.bins!r}.")
        if self.bins < 2:
            raise InvalidArgument(f"bins must be at least 2, got {self.bins}.")
        positive("start", self.start)
        if self.histogram_multiplier is not None:
            positive("histogram_multiplier", self.histogram_multiplier)

    def thresholds(self, state: State) -> Tensor:
        return state["thresholds"]

    def statistic_multiplier(self, total: float, setting: Setting) -> float | None:
        return spread(total) if self.histogram_multiplier is None else self.histogram_multiplier

    def observe(self, state: State, norms: Tensor) -> Tensor | None:
        places = norms.double() * self.bins / state["range"].to(norms.device)
        bins = places.nan_to_num_(nan=self.bins, posinf=self.bins).clamp_(0, self.bins - 1).long()
        counts = torch.zeros(len(norms), self.bins, dtype=torch.float64, device=norms.device)
        counts.scatter_add_(1, bins, counts.new_ones(()).expand(bins.shape))
        return counts / len(norms) ** 0.5

    def counts(self, released: Tensor | None, setting: Setting) -> Tensor:
        """The noised counts, [G,bins], some of which may be negative."""
        assert released is not None
        return released.cpu() * setting.groups**0.5

    def middles(self, state: State) -> Tensor:
        """The middle of each bin, [G,bins]."""
        return (torch.arange(self.bins, dtype=torch.float64) + 0.5) * (state["range"] / self.bins)


def spread(total: float) -> float:
    """The histogram's multiplier for a step's multiplier: 5, 8 or 12, or twice the step's where these would cost too much.

    >>> [spread(total) for total in (1.0, 2.0, 3.0, 3.1, 35.0)]
    [5.0, 8.0, 8.0, 12.0, 70.0]
    """
    usual = 5.0 if total < 2 else 8.0 if total <= 3 else 12.0
    return usual if usual >= 1.2 * total else 2 * total

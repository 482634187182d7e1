"""A model whose gradients are its records, and the record that moves a release as far as is allowed."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipless.clipping import Clipping
from clipless.partition import Partition, partition

FAR = 1e12
_LADDER = torch.logspace(-3, 3, 4001, dtype=torch.float64)
# Rounding in the engine may move a norm at the cutoff above it.
BELOW_CUTOFF = 0.999


class CanaryModel(nn.Module):
    """Linear layers side by side: the gradient of a record's output in layer l is the record's l-th part."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(layers))

    def forward(self, records: Tensor) -> Tensor:
        parts = zip(self.layers, records.unbind(1), strict=True)
        return torch.stack([layer(part).squeeze(1) for layer, part in parts]).sum(0)

    def groups(self, clipping: Clipping) -> Partition:
        """How a clipping divides the layers."""
        return partition(clipping.groups, dict(self.named_parameters()))


def worst_norms(clipping: Clipping, thresholds: Tensor) -> list[float]:
    """For each group the norm whose clipped gradient is largest; the largest such norm if there are several.

    >>> from clipless.clipping import abadi, global_
    >>> worst_norms(abadi(), torch.tensor([[1.0]])), worst_norms(global_(), torch.tensor([[1.0]]))
    ([1000000000000.0], [0.999])
    """
    return [_worst_norm(clipping, thresholds, group) for group in range(len(thresholds))]


def _worst_norm(clipping: Clipping, thresholds: Tensor, group: int) -> float:
    norms = torch.cat([_LADDER * float(thresholds[group, 0]), torch.tensor([FAR], dtype=torch.float64)]).float()
    every = thresholds.expand(-1, len(norms)).clone()
    every[group] = norms
    share = (clipping.rule(every, thresholds)[group] * norms).double()
    best = int(share.argmax())
    return FAR if float(share[-1]) >= BELOW_CUTOFF * float(share[best]) else round(BELOW_CUTOFF * float(norms[best]), 6)


def along(groups: Partition, norms: Sequence[float]) -> Tensor:
    """The length of a canary in each layer that gives it these norms in the groups, [layers]."""
    layers = [group for group, members in enumerate(groups.members) for _ in members]
    shares = {name: norms[g] / len(groups.members[g]) ** 0.5 for name, g in groups.group_of.items()}
    assert len(shares) == len(layers)
    return torch.tensor([shares[name] for name in sorted(shares, key=_number)])


def _number(name: str) -> int:
    return int(name.split(".")[1])

"""What a policy has released so far, step by step: safe to show, store and plot."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clipless.thresholds.policy import State


class History:
    """The policy's state and the noised statistic after each step. Constant thresholds leave no history."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Tensor]] = {}

    def append(self, state: State, released: Tensor | None) -> None:
        """Note a step. Without a statistic nothing is learned, so only what changes by schedule is noted."""
        values = dict(state) if released is None else {**state, "statistic": released.cpu()}
        for name, value in values.items():
            self._rows.setdefault(name, []).append(value.clone())

    def __len__(self) -> int:
        return max((len(rows) for rows in self._rows.values()), default=0)

    def __getitem__(self, name: str) -> Tensor:
        """All values of one name, stacked, [steps, ...]: "thresholds", "range", "statistic"."""
        return torch.stack(self._rows[name])

    def names(self) -> list[str]:
        return list(self._rows)

    def to_dict(self) -> dict[str, Any]:
        """As plain lists, for files."""
        return {name: self[name].tolist() for name in self._rows}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: self[name] for name in self._rows}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "History":
        history = cls()
        history._rows = {name: list(values.unbind()) for name, values in state.items()}
        return history

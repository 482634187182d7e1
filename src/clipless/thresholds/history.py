"""What a policy has released, step by step: safe to show, store and plot."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clipless.thresholds.policy import State

# The most steps that are kept. When there are more, every second one is dropped, and from then on only every second step is
# added; the next time every fourth, and so on. So memory does not grow with the number of steps.
LENGTH = 4096


class History:
    """The policy's state and the noised statistic after each step: after every step of a run of at most LENGTH, else after
    steps that are evenly spaced. A value that a step's policy does not have is NaN."""

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}
        self._seen, self._kept, self._stride = 0, 0, 1

    def append(self, state: State, released: Tensor | None) -> None:
        """Add a step. Without a statistic, only values that change by schedule are added."""
        if self._seen % self._stride == 0:
            if self._kept == LENGTH:
                self._thin()
            for name, value in state.items():
                self._write(name, value)
            if released is not None:
                self._write("statistic", released)
            self._kept += 1
        self._seen += 1

    def __len__(self) -> int:
        """How many steps are kept."""
        return self._kept

    def __getitem__(self, name: str) -> Tensor:
        """All kept values of one name, [len(self), ...]: "thresholds", "range", "statistic"."""
        rows = self._rows[name][: self._kept]
        return torch.cat([rows, _unwritten((self._kept - len(rows), *rows.shape[1:]), rows)])

    @property
    def steps(self) -> Tensor:
        """The numbers of the steps that are kept, counted from 0."""
        return torch.arange(0, self._seen, self._stride)

    def names(self) -> list[str]:
        return list(self._rows)

    def to_dict(self) -> dict[str, Any]:
        """As plain lists, for files, with the numbers of the steps."""
        return {name: values.tolist() for name, values in self.state_dict().items() if name != "seen"}

    def state_dict(self) -> dict[str, Tensor]:
        return {"seen": torch.tensor(self._seen), "steps": self.steps} | {name: self[name] for name in self._rows}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "History":
        history = cls()
        history._rows = {name: values.clone() for name, values in state.items() if name not in ("seen", "steps")}
        history._seen, history._kept = int(state["seen"]), len(state["steps"])
        history._stride = int(state["steps"][1]) if history._kept > 1 else 1
        return history

    def _write(self, name: str, value: Tensor) -> None:
        """As the next row; the room for rows doubles when it is full."""
        rows = self._rows.get(name)
        if rows is None:
            rows = self._rows[name] = _unwritten((16, *value.shape), value)
        while len(rows) <= self._kept:
            rows = self._rows[name] = torch.cat([rows, _unwritten(rows.shape, rows)])
        rows[self._kept] = value

    def _thin(self) -> None:
        self._rows = {name: self[name][::2].clone() for name in self._rows}
        self._kept, self._stride = LENGTH // 2, 2 * self._stride


def _unwritten(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.full(tuple(shape), torch.nan, dtype=like.dtype)

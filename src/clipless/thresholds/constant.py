"""Constant thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipless import defaults
from clipless.arguments import positive
from clipless.errors import InvalidArgument
from clipless.thresholds.policy import Fixed, Setting, State, shared_out


@dataclass(frozen=True)
class Constant(Fixed):
    """One threshold R for the whole gradient, divided as R/√G over G groups, or one threshold for each group.

    Either way the sensitivity is the length of the threshold vector; with a single R it is R for any number of groups.

    >>> Constant(2.0).thresholds(Constant(2.0).init(Setting(groups=4))).flatten()
    tensor([1., 1., 1., 1.])
    """

    threshold: float | Sequence[float] = defaults.THRESHOLD

    def __post_init__(self) -> None:
        given = self.threshold
        many = isinstance(given, (list, tuple))
        checked = tuple(positive("threshold", r) for r in given) if many else positive("threshold", given)  # type: ignore[union-attr]
        object.__setattr__(self, "threshold", checked)

    def init(self, setting: Setting) -> State:
        if isinstance(self.threshold, float):
            return {"thresholds": shared_out(self.threshold, setting.groups)}
        values = tuple(self.threshold)
        if len(values) != setting.groups:
            raise InvalidArgument(
                f"{len(values)} thresholds for {setting.groups} groups: give one for each group, or a single "
                "number, which is shared out over the groups."
            )
        return {"thresholds": torch.tensor(values).unsqueeze(1)}

    def thresholds(self, state: State) -> Tensor:
        return state["thresholds"]

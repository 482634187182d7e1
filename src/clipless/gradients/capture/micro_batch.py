"""Records that go through one forward and backward pass together."""

from dataclasses import dataclass, field

from torch import Tensor

from clipless.gradients.checks.records import RecordsCheck


@dataclass
class MicroBatch:
    """Some records of a logical batch, and what their forward pass noted of them.

    `averaged` says that the loss divides by their number; the gradients that arrive are multiplied by `scale` to be those
    of each record's own loss. `due` asks for a check, which `check` makes; `routed` says that
    the rows of some tap are not the records. `modes` says
    which modules were in training mode. `uses` counts the taps that were made for each parameter; `late` is set when a
    part of the model runs again in the backward pass, where more of them may be made. `tapped` is the size of the
    tapped outputs in bytes: as many bytes of gradients come back. `broken` marks the records whose data are not finite,
    [b], if anybody looked. The receiver sets `begun` and `done` at the beginning and the end of the backward pass.
    """

    records: int
    averaged: bool = False
    scale: float = 1.0
    due: bool = False
    check: RecordsCheck | None = None
    routed: bool = False
    modes: list[bool] = field(default_factory=list)
    uses: dict[str, int] = field(default_factory=dict)
    late: bool = False
    tapped: int = 0
    broken: Tensor | None = None
    begun: bool = False
    done: bool = False

"""Records that go through one forward and backward pass together."""

from dataclasses import dataclass, field

from torch import Tensor

from clipless.gradients.checks.records import RecordsCheck
from clipless.gradients.checks.whole_step import WholeStep


@dataclass
class MicroBatch:
    """Some records of a logical batch, and what is known from their forward pass.

    `averaged`: the loss divides by the number of records, None if nobody has said; `scale` undoes that: gradients that
    arrive times `scale` are those of each record's own loss. `due`: the pass is to be checked; `check` does it.
    `routed`: the rows of some tap are not the records. `modes`: which modules were in training mode. `uses`: the number
    of taps for each parameter. `late`: a part of the model has run again in the backward pass, so further taps may
    follow. `tapped`: bytes of the tapped outputs, and so of the gradients that will arrive. `broken` [b]: records whose
    data are not finite, if that was checked. `begun` and `done` are set at the beginning and the end of the backward
    pass. `by_function`: the losses come from a function that clipless calls, whose check is `whole` if it is due.
    `anchors` are the leaves that the taps of its passes hang on.
    """

    records: int
    averaged: bool | None = False
    scale: float = 1.0
    due: bool = False
    check: RecordsCheck | None = None
    routed: bool = False
    modes: list[bool] = field(default_factory=list)
    uses: dict[str, int] = field(default_factory=dict)
    late: bool = False
    tapped: int = 0
    broken: Tensor | None = None
    by_function: bool = False
    whole: WholeStep | None = None
    anchors: list[Tensor] = field(default_factory=list)
    begun: bool = False
    done: bool = False

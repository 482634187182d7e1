"""Backward passes of which nothing is used for training: what arrives at the taps is noted, or added up without clipping."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from clipless.gradients.checks.passes import ForwardPass
from clipless.gradients.checks.seeds import sketch
from clipless.gradients.forms import Form, Routed
from clipless.gradients.shards import own_rows
from clipless.gradients.trees import Dims


class Heard(Protocol):
    """A tap whose gradient has arrived. `unsure` is set where nothing has told yet along which dimension records lie. With
    `rows` it has so many of them, in any order: seeds tell the `record` of each, [n]."""

    forward_pass: ForwardPass | None
    owner: str
    out_dims: Dims
    unsure: bool
    rows: int
    record: Tensor | None

    def settle(self, dims: Dims) -> None:
        """The records of the outputs lie along these dimensions."""


class Trial:
    """A backward pass of which nothing is used for training. `echoes` has what arrived at each tap, one after the other;
    `totals`, if it adds up, the sums over the `judged` records, or over all if that is None, of what arrived in the pass
    `adds_up`, or without one in all passes; for a sharded parameter this process's rows of the sum. Kept `whole`, or in
    a sketch. `unsure` if nothing had told at some tap where the records lie.
    """

    def __init__(
        self,
        adds_up: ForwardPass | None = None,
        whole: bool = False,
        totals: dict[str, Tensor] | None = None,
        judged: Tensor | None = None,
    ) -> None:
        self._whole = whole
        self.unsure = False
        self.echoes: dict[tuple[int, str], list[list[Tensor]]] = {}
        self.adds_up = adds_up
        self.totals = totals if adds_up is None else adds_up.totals
        self.judged = judged if adds_up is None else adds_up.judged

    def counts(self, forward_pass: ForwardPass | None) -> bool:
        """Whether what arrives in this pass is added up."""
        return self.adds_up is None or forward_pass in (None, self.adds_up)

    def hear(self, tap: Heard, grads: Sequence[Tensor]) -> None:
        pairs = zip(grads, tap.out_dims, strict=True)
        kept = [g.detach().clone() if tap.unsure or self._whole else tap_sketch(tap, g, dim) for g, dim in pairs]
        self.echoes.setdefault(tap_key(tap), []).append(kept)
        self.unsure |= tap.unsure

    def add(self, name: str, use: Form | Routed, like: Tensor) -> None:
        """Add what the judged records have in one use of a parameter."""
        assert self.totals is not None
        form, record = (use.rows, use.record) if isinstance(use, Routed) else (use, None)
        before, judged = self.totals.get(name), self.judged
        total, beta, sharded = before, 1, hasattr(like, "device_mesh")
        if total is None or sharded:
            kind = torch.promote_types(like.dtype, torch.float32)
            total, beta = torch.empty(like.shape, dtype=kind, device=like.device), 0
        if judged is None:
            weights = torch.ones(len(form), dtype=total.dtype, device=total.device)
        else:
            weights = judged.to(total)
            weights = weights if record is None else weights[record.clamp(min=0)]
        form.add_to(total, weights, beta=beta)
        if sharded:  # of the whole gradient no more is kept than of the parameter
            own = own_rows(total, like)
            total = own.clone() if before is None else before.add_(own)
        self.totals[name] = total

    def forget(self) -> None:
        """The pass begins anew."""
        self.echoes.clear()
        if self.totals is not None:
            self.totals.clear()


def tap_sketch(tap: Heard, grad: Tensor, dim: int | None) -> Tensor:
    """The sketch of a gradient at a tap. Where rows have no dimension the whole is one row."""
    return sketch(grad.unsqueeze(0) if tap.rows and dim is None else grad, dim or 0)


def tap_key(tap: Heard) -> tuple[int, str]:
    return 0 if tap.forward_pass is None else id(tap.forward_pass), tap.owner

"""Rows that belong to records in any order: positions flattened together with the records, or sent to experts.

Index legend: n row, b record, t position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipless.gradients.forms.dense import Instantiated, OuterProducts, kept
from clipless.gradients.forms.form import Form
from clipless.gradients.forms.rearranged import Rearranged
from clipless.gradients.forms.scattered import Scattered

# Rows whose gradients are written out together.
AT_ONCE = 4096


@dataclass(frozen=True)
class Routed:
    """A form with a row where others have a record, and the `record` of each row, [n], -1 for a row that adds nothing.
    Summed by record, the form has `records` records."""

    rows: Form
    record: Tensor
    records: int


def by_record(uses: Sequence[Form | Routed]) -> list[Form]:
    """The forms by record. Rows of the same kind and size are joined first.

    >>> rows = Instantiated(torch.tensor([[1.0], [2.0], [4.0]]))
    >>> by_record([Routed(rows, torch.tensor([1, 0, 1]), 2)])[0].per_record()
    tensor([[2.],
            [5.]])
    """
    forms: list[Form] = []
    alike: dict[object, list[Routed]] = {}
    for use in uses:
        if isinstance(use, Routed):
            alike.setdefault(_kind(use.rows), []).append(use)
        else:
            forms.append(use)
    return forms + [_taken_together(same) for same in alike.values()]


def _kind(form: Form) -> object:
    """A key for forms that can be joined."""
    if isinstance(form, Rearranged):
        return Rearranged, form.shape, form.order, _kind(form.matrix)
    if isinstance(form, OuterProducts):
        return OuterProducts, form.acts.shape[1:], form.grads.shape[1:], form.acts.dtype
    if isinstance(form, Scattered):
        return Scattered, form.grads.shape[1:], form.size, form.grads.dtype
    return Instantiated


def _taken_together(uses: list[Routed]) -> Form:
    record, records = torch.cat([use.record for use in uses]), uses[0].records
    return _together([use.rows for use in uses], _Places(record, records))


class _Places:
    """The place of each row in a tensor [b,t,...] with room for all rows of every record."""

    def __init__(self, record: Tensor, records: int) -> None:
        self.record, self.records = record, records
        counts = record[record >= 0].bincount(minlength=records)
        self._most = max(int(counts.max()), 1) if records else 1
        in_order = record.argsort(stable=True)
        self._order = in_order[record[in_order] >= 0]
        first = (counts.cumsum(0) - counts)[record[self._order]]
        place = torch.arange(len(self._order), device=record.device) - first
        self._slots = record[self._order] * self._most + place

    def put(self, parts: list[Tensor]) -> Tensor:
        """[n,t,...] as [b,t,...], padded with zeros for records with fewer rows."""
        rows = torch.cat(parts) if len(parts) > 1 else parts[0]
        placed = rows.new_zeros(self.records * self._most, *rows.shape[1:])
        placed[self._slots] = rows[self._order]
        return placed.view(self.records, self._most * rows.shape[1], *rows.shape[2:])

    def add(self, forms: list[Form]) -> Tensor:
        """The gradients of the rows, written out some at a time, summed by record, [b,...]."""
        total, begin = None, 0
        for form in forms:
            for first in range(0, len(form), AT_ONCE):
                part = form.rows(slice(first, min(first + AT_ONCE, len(form)))).per_record()
                record = self.record[begin + first : begin + first + len(part)]
                total = part.new_zeros(self.records, *part.shape[1:]) if total is None else total
                total.index_add_(0, record.clamp(min=0), kept(part, record >= 0))
            begin += len(form)
        assert total is not None
        return total


def _together(forms: list[Form], places: _Places) -> Form:
    """Forms of one kind, joined, as a form by record."""
    if all(isinstance(form, Rearranged) for form in forms):
        like = forms[0]
        assert isinstance(like, Rearranged)
        matrices = [form.matrix for form in forms if isinstance(form, Rearranged)]
        return Rearranged(_together(matrices, places), like.shape, like.order)
    if all(isinstance(form, OuterProducts) for form in forms):
        products = [form for form in forms if isinstance(form, OuterProducts)]
        return OuterProducts(
            places.put([form.acts for form in products]), places.put([form.grads for form in products])
        )
    if all(isinstance(form, Scattered) for form in forms):
        tables = [form for form in forms if isinstance(form, Scattered)]
        indices, grads = places.put([form.indices for form in tables]), places.put([form.grads for form in tables])
        return Scattered(indices, grads, tables[0].size)
    return Instantiated(places.add(forms))

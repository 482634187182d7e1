"""Dense per-sample gradients: written out, or as sums of outer products, as for the weight of a linear layer.

Those that are written out are read in one call for all parameters. Index legend: b record, t position, i in, o out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from clipless.gradients.forms.cancellation import never_too_small
from clipless.gradients.forms.form import Cost, Form, NoChoice
from clipless.native import gram
from clipless.native.by_torch import Product, Term, Weighted, widest
from clipless.native.rows import add_products, add_rows, squared_lengths, squares, written_out

FEW = 2**14
# How many numbers are written out at a time when norms are recomputed in float64.
AT_ONCE = 2**22


@dataclass(eq=False, repr=False)
class Instantiated(NoChoice):
    """Per-sample gradients written out, [b, *shape]."""

    grads: Tensor

    @classmethod
    def with_norms(cls, grads: Tensor, sq_norms: Tensor) -> "Instantiated":
        """Whose squared norms [b] are known already."""
        made = cls(grads)
        made.sq_norms = sq_norms
        return made

    def __len__(self) -> int:
        return self.grads.shape[0]

    @cached_property
    def sq_norms(self) -> Tensor:
        return sq_norm(self.grads)

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        add_rows([Weighted(total, _as_rows(self.grads), factors, beta)])

    def per_record(self) -> Tensor:
        return self.grads

    def keep(self, mask: Tensor) -> "Instantiated":
        return Instantiated(kept(self.grads, mask))

    def rows(self, some: slice) -> "Instantiated":
        return Instantiated(self.grads[some])


@lru_cache(maxsize=4096)
def product_methods(b: int, t: int, i: int, o: int, size: int) -> Mapping[str, Cost]:
    """The methods for sums of outer products, with numbers of `size` bytes. With one position there is only one."""
    sums = 2.0 * b * t * i * o
    if t == 1:
        return {"ghost": Cost(sums, float(size * b * (i + o)), calls=6, held=size * b * o)}
    grams = 2.0 * b * t * t * (i + o)
    moved = size * b * (4 * t * t + 2 * t * min(i, o))
    return {
        "ghost": Cost(grams + sums, moved, calls=16 + 2 * b, held=size * b * t * o),
        "written": Cost(sums, 3.0 * size * b * i * o, calls=4 + b, held=size * b * i * o),
    }


@dataclass(eq=False, repr=False)
class OuterProducts:
    """g_b = Σ_t grads[b,t]ᵀ acts[b,t]: norms from Gram matrices, or everything written out.

    What is given without positions, [b,i] and [b,o], has one: `acts` and `grads` always have three dimensions. A `twin` has
    the same grads, so that its norms are computed along with these. `summed` has the grads summed over positions, so that
    their norms are computed once.
    """

    given_acts: Tensor  # [b,t,i]
    given_grads: Tensor  # [b,t,o]
    twin: "OuterProducts | None" = None
    summed: Instantiated | None = None

    @cached_property
    def acts(self) -> Tensor:
        return _with_positions(self.given_acts)

    @cached_property
    def grads(self) -> Tensor:
        return _with_positions(self.given_grads)

    @property
    def is_single(self) -> bool:
        """Whether g_b is a single outer product, whose norm is the product of two norms."""
        return self.given_acts.dim() == 2 or self.given_acts.shape[1] == 1

    def __len__(self) -> int:
        return self.given_acts.shape[0]

    @property
    def terms(self) -> int:
        return 1 if self.is_single else self.given_acts.shape[1]

    @cached_property
    def sq_norms(self) -> Tensor:
        if self.is_single:
            return sq_norm(self.acts) * (sq_norm(self.grads) if self.summed is None else self.summed.sq_norms)
        squares, lengths, lost = self.ghost
        return never_too_small(squares, lengths, self.acts.dtype, self._exact, lost)

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        add_products([self.product(total, factors, beta)])

    def product(self, total: Tensor, factors: Tensor, beta: int) -> Product:
        """The sum that `add_to` makes."""
        if self.is_single:
            return Product(total, self.given_grads, self.given_acts, factors, beta)
        grads, acts, weights = self.grads, self.acts, factors.to(self.grads.dtype).unsqueeze(1)
        if grads.stride(0) < grads.stride(1):  # positions first in memory: this order needs no copy
            grads, acts, weights = grads.transpose(0, 1), acts.transpose(0, 1), weights.mT
        rows = weights.expand(grads.shape[:2]).flatten()
        return Product(total, grads.flatten(0, 1).contiguous(), acts.flatten(0, 1).contiguous(), rows, beta)

    def per_record(self) -> Tensor:
        return written_out(self.grads, self.acts)[0]  # [b,o,i]

    def keep(self, mask: Tensor) -> "OuterProducts":
        return OuterProducts(kept(self.acts, mask), kept(self.grads, mask))

    def rows(self, some: slice) -> "OuterProducts":
        return OuterProducts(self.acts[some], self.grads[some])

    def methods(self) -> Mapping[str, Cost]:
        if self.is_single:
            return {}
        return product_methods(*self.acts.shape, self.grads.shape[2], self.acts.element_size())

    def by(self, method: str) -> Form:
        return self if method == "ghost" else Instantiated.with_norms(*written_out(self.grads, self.acts))

    @cached_property
    def ghost(self) -> tuple[Tensor, Tensor, Tensor]:
        """Squared norms from two Gram matrices, T×T; the sum of the positions' lengths; and where underflow may have lost
        digits. All [b]."""
        both = [self] if self.twin is None or "ghost" in vars(self.twin) else [self, self.twin]
        inputs, grads = [form.acts for form in both], self.grads
        fast = gram.compiled() if gram.fit(inputs, grads) else None
        each = gram.by_torch(inputs, grads) if fast is None else fast(inputs, grads)
        for form, found in zip(both[1:], each[1:], strict=True):
            form.ghost = form._ghost_of(found)
        return self._ghost_of(each[0])

    def _ghost_of(self, found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the four numbers of every record, [b,4]."""
        squares, lengths, most_a, most_g = found.unbind(1)
        _, t, i = self.acts.shape
        error = torch.finfo(self.acts.dtype).tiny * t * t * max(i, self.grads.shape[2]) * (most_a + most_g)
        lost = squares < 1e4 * error
        if lost.any():
            # Positions without an input or a gradient lose none.
            lost &= ((self.acts != 0).any(2) & (self.grads != 0).any(2)).any(1)
        return squares, lengths, lost

    def _exact(self, which: Tensor) -> Tensor:
        """Squared norms of some records, from their gradients in float64."""
        some, wide = which.nonzero().flatten(), widest(self.acts.device)
        size = max(1, AT_ONCE // (self.acts.shape[2] * self.grads.shape[2]))
        return torch.cat([sq_norm(self.grads[few].to(wide).mT @ self.acts[few].to(wide)) for few in some.split(size)])


class Addend(NamedTuple):
    """A form, the sum it is added to (times beta), and the factors of its records."""

    form: Form
    total: Tensor
    factors: Tensor  # [b]
    beta: int


def can_wait(form: Form, size: int) -> bool:
    """Whether the norms come from tensors of less than `size` bytes, which are faster to read in one call with others."""
    if isinstance(form, Instantiated):
        return form.grads.nbytes < size
    if isinstance(form, OuterProducts) and form.is_single:
        return form.given_acts.nbytes < size and form.given_grads.nbytes < size
    return False


def squares_of(forms: Sequence[tuple[int, Form]], groups: int, records: int) -> Tensor:
    """‖g_b‖² added up over the forms of each group, [g,b], from (number of the group, form). Norms of forms that are written
    out, or single outer products, are computed in one call; those of gradients that occur in both once."""
    rows: list[Tensor] = []
    terms: list[Term] = []
    known: list[Tensor] = []
    places: dict[int, int] = {}
    where: list[int] = []
    for group, form in forms:
        if "sq_norms" not in vars(form) and isinstance(form, Instantiated):
            terms.append((group, _row(id(form), form.grads, places, rows), -1))
        elif "sq_norms" not in vars(form) and isinstance(form, OuterProducts) and form.is_single:
            key = id(form if form.summed is None else form.summed)
            terms.append((group, _row(key, form.given_grads.contiguous(), places, rows), len(rows)))
            rows.append(form.given_acts)
        else:
            where.append(group)
            known.append(form.sq_norms)
    if not known and terms:
        return squares(rows, terms, groups)
    found = squares(rows, terms, groups) if terms else known[0].new_zeros(groups, records)
    return found.index_add_(0, torch.tensor(where, device=found.device), torch.stack(known))


def _row(key: int, grads: Tensor, places: dict[int, int], rows: list[Tensor]) -> int:
    """The place of gradients among the rows, to which they are added unless they are there."""
    place = places.setdefault(key, len(rows))
    if place == len(rows):
        rows.append(_as_rows(grads))
    return place


def add_all(addends: Iterable[Addend], scale: float = 1.0) -> None:
    """Add every form to its total, with all factors times a scale. All totals are different tensors."""
    written: list[Weighted] = []
    products: list[Product] = []
    last: Tensor | None = None
    for form, total, factors, beta in addends:
        if isinstance(form, Instantiated):
            written.append(Weighted(total, _as_rows(form.grads), factors, beta))
        elif isinstance(form, OuterProducts):
            products.append(form.product(total, factors, beta))
        else:
            if factors is not last:  # one tensor for all forms of a group
                last, weights = factors, factors if scale == 1.0 else factors * scale
            form.add_to(total, weights, beta)
    if written:
        add_rows(written, scale)
    if products:
        add_products(products, scale)


def weighted_sum(form: Form, factors: Tensor, like: Tensor) -> Tensor:
    """Σ_b factors[b]·g_b as a new tensor, shaped like the parameter."""
    total = torch.empty(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    form.add_to(total, factors, beta=0)
    return total


def sq_norm(rows: Tensor) -> Tensor:
    """Squared norm of each row, [b], in float64; by torch where that is faster, for few numbers."""
    flat = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    if flat.numel() <= FEW:
        return torch.linalg.vector_norm(flat, dim=1, dtype=widest(flat.device)).square()
    return squared_lengths([flat])[0]


def _with_positions(rows: Tensor) -> Tensor:
    """[b,i] as [b,1,i]."""
    return rows.unsqueeze(1) if rows.dim() == 2 else rows


def _as_rows(grads: Tensor) -> Tensor:
    """The numbers of each record one after the other, as the compiled functions take them."""
    return grads if grads.dim() == 2 else grads.contiguous()


def kept(rows: Tensor, mask: Tensor) -> Tensor:
    """The rows, with zeros for those outside the mask, also where they are not finite."""
    return torch.where(mask.view(-1, *[1] * (rows.dim() - 1)), rows, 0)


def scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Every row times its factor."""
    return rows * factors.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))

"""A matrix whose rows were scaled, centred or normalised before it was used: weight standardisation, weight norm.

With W_o = scale_o·(V_o - mean)/std or scale_o·V_o/‖V_o‖, the gradient h of a row of W gives that of V as
c·(h - 1·mean(h) - u·(u·h)), c and u from V alone. Norms and sums of V follow from those of c·h and a few products, so
nothing has to be written out. Index legend: b record, t position, o row, n column.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clipless.gradients.forms.cancellation import never_too_small
from clipless.gradients.forms.dense import Instantiated, OuterProducts, kept, sq_norm
from clipless.gradients.forms.form import Cost, Form, NoChoice
from clipless.gradients.forms.rearranged import Rearranged
from clipless.native.rows import widest


@dataclass(frozen=True)
class Standardisation:
    """How the gradient of every row of a matrix follows from the one after standardisation: `direction` is u, shaped like
    the parameter, `scale` is c, [o]; `centred` tells whether the mean is subtracted."""

    direction: Tensor
    scale: Tensor
    centred: bool

    def applied(self, grads: Tensor) -> Tensor:
        """Gradients c·h [..., *shape], with mean and direction removed, as a new tensor."""
        shape = self.direction.shape
        rows = grads.reshape(-1, len(self.scale), shape[1:].numel())  # [b,o,n]
        u = self.direction.flatten(1).to(rows.dtype)
        left = rows - rows.mean(2, keepdim=True) if self.centred else rows.clone()
        return left.sub_(_along(rows, u).unsqueeze(2) * u).view(grads.shape)


class Products:
    """The products u·c·h [b,o] of every record, once they are known: the form that needs them first computes them."""

    value: Tensor | None = None


class Standardised:
    """The form of V, from the `scaled` form of c·h."""

    def __init__(self, scaled: Form, how: Standardisation, products: Products) -> None:
        self.scaled, self.how, self.products = scaled, how, products

    def __len__(self) -> int:
        return len(self.scaled)

    @cached_property
    def sq_norms(self) -> Tensor:
        whole, along, sums = self.scaled.sq_norms, self.along, self._sums()
        wide, u = whole.dtype, self.how.direction.flatten(1)
        lost = (2 - u.to(wide).square().sum(1)) * along.to(wide).square()
        if sums is not None:
            lost = lost + sums.to(wide).square() / u.shape[1]
        return never_too_small(whole - lost.sum(1), whole.sqrt(), u.dtype, self._exact)

    @property
    def along(self) -> Tensor:
        """u·c·h of every row, [b,o]."""
        if self.products.value is None:
            self.products.value = self._products()
        return self.products.value

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        sums = torch.empty_like(total)
        self.scaled.add_to(sums, factors, beta=0)
        ours = self.how.applied(sums)
        total.mul_(beta).add_(ours) if beta else total.copy_(ours)

    def per_record(self) -> Tensor:
        return self.how.applied(self.scaled.per_record())

    def keep(self, mask: Tensor) -> "Standardised":
        return Standardised(self.scaled.keep(mask), self.how, Products())

    def rows(self, some: slice) -> "Standardised":
        return Standardised(self.scaled.rows(some), self.how, Products())

    def methods(self) -> Mapping[str, Cost]:
        return self.scaled.methods()

    def by(self, method: str) -> "Standardised":
        return Standardised(self.scaled.by(method), self.how, self.products)

    def _products(self) -> Tensor:
        form, u = self._as_matrix()
        if isinstance(form, OuterProducts):
            return torch.linalg.vecdot(form.grads.mT, (form.acts @ u.to(form.acts.dtype).mT).mT)
        return _along(form.per_record().flatten(2), u)

    def _sums(self) -> Tensor | None:
        """The sum of c·h over every row, [b,o]; None if it is not needed."""
        if not self.how.centred:
            return None
        form, _ = self._as_matrix()
        if isinstance(form, OuterProducts):
            return (form.grads.mT @ form.acts.sum(2).unsqueeze(2)).squeeze(2)
        return form.per_record().flatten(2).sum(2)

    def _as_matrix(self) -> tuple[Form, Tensor]:
        """The form as one of a matrix, and the direction in the same order, [o,n]."""
        form, u = self.scaled, self.how.direction
        if isinstance(form, Rearranged):
            inverse = [form.order.index(k) for k in range(len(form.order))]
            return form.matrix, u.permute(inverse).flatten(1)
        return form, u.flatten(1)

    def _exact(self, which: Tensor) -> Tensor:
        """Squared norms of some records, from their gradients in float64, one record at a time."""
        wide = widest(which.device)
        found = [self._wide(record).to(wide) for record in which.nonzero().flatten().tolist()]
        return torch.cat([sq_norm(self.how.applied(row)) for row in found])

    def _wide(self, record: int) -> Tensor:
        """c·h of one record, computed from what the sum is computed from."""
        wide, one = widest(self.how.direction.device), self.scaled.rows(slice(record, record + 1))
        matrix = one.matrix if isinstance(one, Rearranged) else one
        if not isinstance(matrix, OuterProducts):
            return one.per_record()
        products: Form = OuterProducts(matrix.acts.to(wide), matrix.grads.to(wide))
        return (Rearranged(products, one.shape, one.order) if isinstance(one, Rearranged) else products).per_record()


class Scales(NoChoice):
    """The form of what the scales of the rows were computed from: `pulled` of the scales' gradients weight·(u·c·h), [b,o],
    from the products of the rows' own form."""

    def __init__(self, rows: Standardised, weight: Tensor, pulled: Callable[[Tensor], Tensor]) -> None:
        self._rows, self._weight, self._pulled = rows, weight, pulled

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def _written(self) -> Instantiated:
        return Instantiated(self._pulled(self._rows.along * self._weight))

    @property
    def sq_norms(self) -> Tensor:
        return self._written.sq_norms

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        self._written.add_to(total, factors, beta)

    def per_record(self) -> Tensor:
        return self._written.grads

    def keep(self, mask: Tensor) -> Instantiated:
        return Instantiated(kept(self._written.grads, mask))

    def rows(self, some: slice) -> Instantiated:
        return self._written.rows(some)


def _along(rows: Tensor, u: Tensor) -> Tensor:
    """The products of the rows [b,o,n] with those of u [o,n], [b,o]."""
    return torch.bmm(rows.transpose(0, 1), u.unsqueeze(2)).squeeze(2).mT


def scaled_rows(form: Any, scale: Tensor) -> Form | None:
    """The form of c·h for h in this form; None if that is not known for its kind."""
    if isinstance(form, OuterProducts):
        return OuterProducts(form.acts, form.grads * scale.to(form.grads.dtype))
    if isinstance(form, Instantiated):
        return Instantiated(form.grads * scale.view(-1, *[1] * (form.grads.dim() - 2)).to(form.grads.dtype))
    known = getattr(form, "scaled_rows", None)
    return None if known is None else known(scale)

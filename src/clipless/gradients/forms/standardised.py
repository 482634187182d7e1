"""A matrix whose rows were scaled, centred or normalised before it was used: weight standardisation, weight norm.

With W_o = scale_o·(V_o - mean)/std or scale_o·V_o/‖V_o‖, the gradient h of a row of W gives that of V as
c·(h - 1·mean(h) - u·(u·h)), c and u from V alone. Norms and sums of V follow from those of c·h and a few products, so
nothing has to be written out. Index legend: b record, t position, o row, n column.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from clipless.gradients.forms.cancellation import never_too_small
from clipless.gradients.forms.dense import Instantiated, OuterProducts, kept, scaled, sq_norm
from clipless.gradients.forms.form import Cost, Form, NoChoice
from clipless.gradients.forms.rearranged import Rearranged
from clipless.native.by_torch import widest


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
    """The products u·h of every row and record, [b,o], computed when they are first needed; then `form` is dropped."""

    def __init__(self, form: Form | None, direction: Tensor) -> None:
        self._form, self._direction = form, direction

    @cached_property
    def value(self) -> Tensor:
        assert self._form is not None
        value, self._form = self._of(self._form), None
        return value

    def weighted(self, factors: Tensor) -> Tensor:
        """The sum of every record's products times its factor, [o]; from the sum of h if they are not known yet."""
        if self._form is None:
            wide = self.value.to(widest(factors.device))
            return _product(factors.to(wide).unsqueeze(0), wide).squeeze(0).to(self.value)
        sums = torch.empty(self._direction.shape, dtype=self._direction.dtype, device=self._direction.device)
        self._form.add_to(sums, factors, beta=0)
        return torch.linalg.vecdot(sums.flatten(1), self._direction.flatten(1))

    def _of(self, form: Form) -> Tensor:
        """The products with the gradients h in this form."""
        matrix, u = _as_matrix(form, self._direction)
        if isinstance(matrix, OuterProducts):
            return torch.linalg.vecdot(matrix.grads.mT, _product(matrix.acts, u.to(matrix.acts.dtype).mT).mT)
        return _along(matrix.per_record().flatten(2), u)

    def learn(self, form: Form) -> None:
        """Compute them now, from another form of the same gradients."""
        self._form = form if self._form is not None else None


class Standardised:
    """The form of V, from the form of h (`raw`), or of c·h (`scaled`) once the products are known."""

    def __init__(self, raw: Form | None, how: Standardisation, products: Products, scaled: Form | None = None) -> None:
        self._raw, self._how, self._products, self._known = raw, how, products, scaled

    def __len__(self) -> int:
        form = self._known if self._raw is None else self._raw
        assert form is not None
        return len(form)

    @property
    def terms(self) -> int:
        form = self._known if self._raw is None else self._raw
        assert form is not None
        return form.terms

    @property
    def _scaled(self) -> Form:
        if self._known is None:
            assert self._raw is not None
            self._products.value  # noqa: B018
            self._known, self._raw = scaled_rows(self._raw, self._how.scale), None
        assert self._known is not None
        return self._known

    @cached_property
    def sq_norms(self) -> Tensor:
        whole, sums = self._scaled.sq_norms, self._sums()
        wide, u = whole.dtype, self._how.direction.flatten(1)
        along = self._products.value.to(wide) * self._how.scale.to(wide)
        lost = (2 - u.to(wide).square().sum(1)) * along.square()
        if sums is not None:
            lost = lost + sums.to(wide).square() / u.shape[1]
        return never_too_small(whole - lost.sum(1), whole.sqrt(), u.dtype, self._exact)

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        sums = torch.empty_like(total)
        if self._raw is None:
            self._scaled.add_to(sums, factors, beta=0)
            wide = sums.to(
                widest(sums.device)
            )  # a rounding error of all records together would be many times one record's
        else:
            self._raw.add_to(sums, factors, beta=0)
            wide = scaled(sums.to(widest(sums.device)), self._how.scale)
        ours = self._how.applied(wide)
        total.mul_(beta).add_(ours) if beta else total.copy_(ours)

    def per_record(self) -> Tensor:
        return self._how.applied(self._scaled.per_record())

    def keep(self, mask: Tensor) -> "Standardised":
        return Standardised(None, self._how, self._products, self._scaled.keep(mask))

    def rows(self, some: slice) -> "Standardised":
        if self._raw is None:
            return Standardised(None, self._how, self._products, self._scaled.rows(some))
        few = self._raw.rows(some)
        return Standardised(few, self._how, Products(few, self._how.direction))

    def methods(self) -> Mapping[str, Cost]:
        return {} if self._raw is None else self._raw.methods()

    def by(self, method: str) -> "Standardised":
        assert self._raw is not None
        form = self._raw.by(method)
        self._products.learn(form)
        return Standardised(form, self._how, self._products)

    def _sums(self) -> Tensor | None:
        """The sum of c·h over every row, [b,o]; None if it is not needed."""
        if not self._how.centred:
            return None
        form, _ = _as_matrix(self._scaled, self._how.direction)
        if isinstance(form, OuterProducts):
            return _product(form.grads.mT, form.acts.sum(2).unsqueeze(2)).squeeze(2)
        return form.per_record().flatten(2).sum(2)

    def _exact(self, which: Tensor) -> Tensor:
        """Squared norms of some records, from their gradients in float64, one record at a time."""
        wide = widest(which.device)
        found = [self._wide(record).to(wide) for record in which.nonzero().flatten().tolist()]
        return torch.cat([sq_norm(self._how.applied(row)) for row in found])

    def _wide(self, record: int) -> Tensor:
        """c·h of one record, computed from what the sum is computed from."""
        wide, one = widest(self._how.direction.device), self._scaled.rows(slice(record, record + 1))
        matrix = one.matrix if isinstance(one, Rearranged) else one
        if not isinstance(matrix, OuterProducts):
            return one.per_record()
        products: Form = OuterProducts(matrix.acts.to(wide), matrix.grads.to(wide))
        return (Rearranged(products, one.shape, one.order) if isinstance(one, Rearranged) else products).per_record()


class Scales(NoChoice):
    """The form of what the scales of the rows were computed from: `pulled` of the gradients weight·(u·h) of the scales."""

    def __init__(self, products: Products, weight: float, records: int, pulled: Callable[[Tensor], Tensor]) -> None:
        self._products, self._weight, self._records, self._pulled = products, weight, records, pulled

    def __len__(self) -> int:
        return self._records

    @cached_property
    def _written(self) -> Instantiated:
        return Instantiated(self._pulled(self._products.value * self._weight))

    @property
    def sq_norms(self) -> Tensor:
        return self._written.sq_norms

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        if "_written" in vars(self):
            self._written.add_to(total, factors, beta)
            return
        ours = self._pulled(self._products.weighted(factors).unsqueeze(0) * self._weight)[0].to(total.dtype)
        total.mul_(beta).add_(ours) if beta else total.copy_(ours)

    def per_record(self) -> Tensor:
        return self._written.grads

    def keep(self, mask: Tensor) -> Instantiated:
        return Instantiated(kept(self._written.grads, mask))

    def rows(self, some: slice) -> Instantiated:
        return self._written.rows(some)


def _as_matrix(form: Form, direction: Tensor) -> tuple[Form, Tensor]:
    """The form as one of a matrix, and the direction in the same order, [o,n]."""
    if isinstance(form, Rearranged):
        inverse = [form.order.index(k) for k in range(len(form.order))]
        return form.matrix, direction.permute(inverse).flatten(1)
    return form, direction.flatten(1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product in the tensors' own type, under autocast as well."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def _along(rows: Tensor, u: Tensor) -> Tensor:
    """The products of the rows [b,o,n] with those of u [o,n], [b,o]."""
    return _product(rows.transpose(0, 1), u.unsqueeze(2)).squeeze(2).mT


class RowScaled(Protocol):
    """A form of another kind whose rows can be scaled."""

    def scaled_rows(self, scale: Tensor) -> Form:
        """The form of c·h."""


def can_be_scaled(form: Any) -> bool:
    """Whether `scaled_rows` knows the form."""
    return isinstance(form, OuterProducts | Instantiated) or callable(getattr(form, "scaled_rows", None))


def scaled_rows(form: Any, scale: Tensor) -> Form:
    """The form of c·h for h in this form."""
    if isinstance(form, OuterProducts):
        return OuterProducts(form.acts, form.grads * scale.to(form.grads.dtype))
    if isinstance(form, Instantiated):
        return Instantiated(form.grads * scale.view(-1, *[1] * (form.grads.dim() - 2)).to(form.grads.dtype))
    if isinstance(form, Rearranged):
        return Rearranged(scaled_rows(form.matrix, scale), form.shape, form.order)
    known: RowScaled = form
    return known.scaled_rows(scale)

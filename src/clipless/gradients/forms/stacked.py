"""A parameter that is a stack of matrices, such as the experts of a mixture, with a form for each matrix."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from clipless.gradients.forms.dense import OuterProducts
from clipless.gradients.forms.form import Form, NoChoice


class Stacked(NoChoice):
    """g_b consists of `size` slices along the first dimension: slice k is parts[k], or zeros without such a part."""

    def __init__(self, parts: Mapping[int, Form], size: int) -> None:
        self.parts, self.size = parts, size

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    @property
    def terms(self) -> int:
        return max(part.terms for part in self.parts.values())

    @cached_property
    def sq_norms(self) -> Tensor:
        return torch.stack([part.sq_norms for part in self.parts.values()]).sum(0)

    def add_to(self, total: Tensor, factors: Tensor, beta: int) -> None:
        if beta == 0:
            total.zero_()
        for number, part in self.parts.items():
            part.add_to(total[number], factors, beta=1)

    def per_record(self) -> Tensor:
        written = {number: part.per_record() for number, part in self.parts.items()}
        like = next(iter(written.values()))
        whole = like.new_zeros(len(like), self.size, *like.shape[1:])
        for number, part in written.items():
            whole[:, number] = part
        return whole

    def keep(self, mask: Tensor) -> "Stacked":
        return Stacked({number: part.keep(mask) for number, part in self.parts.items()}, self.size)

    def rows(self, some: slice) -> "Stacked":
        return Stacked({number: part.rows(some) for number, part in self.parts.items()}, self.size)


def transposed(form: Form) -> Form | None:
    """The form of the transposed matrix, or of a stack of them; None if it would have to be written out."""
    if isinstance(form, OuterProducts):
        return OuterProducts(form.grads, form.acts)
    if isinstance(form, Stacked):
        parts = {number: transposed(part) for number, part in form.parts.items()}
        turned = {number: part for number, part in parts.items() if part is not None}
        return Stacked(turned, form.size) if len(turned) == len(parts) else None
    return None

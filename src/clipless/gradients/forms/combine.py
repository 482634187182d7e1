"""One form for a parameter that was used several times."""

from functools import reduce

import torch

from clipless.gradients.forms.dense import Instantiated, OuterProducts
from clipless.gradients.forms.form import Form
from clipless.gradients.forms.scattered import Scattered
from clipless.gradients.forms.stacked import Stacked
from clipless.gradients.forms.tied import Tied


def combine(uses: list[Form]) -> Form:
    """The sum over the uses, as one form.

    Uses of one kind are joined along the positions; a table used as an embedding and as a matrix is `Tied`; anything else
    is written out.
    """
    if len(uses) == 1:
        return uses[0]
    stacks = [use for use in uses if isinstance(use, Stacked)]
    if len(stacks) == len(uses):
        return _one_stack(stacks)
    matrices = [use for use in uses if isinstance(use, OuterProducts)]
    tables = [use for use in uses if isinstance(use, Scattered)]
    if len(matrices) + len(tables) < len(uses):
        return Instantiated(reduce(torch.add, (use.per_record() for use in uses)))
    if not tables:
        return _longer_product(matrices)
    if not matrices:
        return _longer_table(tables)
    return Tied(_longer_table(tables), _longer_product(matrices))


def _one_stack(uses: list[Stacked]) -> Stacked:
    numbers = {number for use in uses for number in use.parts}
    parts = {number: combine([use.parts[number] for use in uses if number in use.parts]) for number in sorted(numbers)}
    return Stacked(parts, uses[0].size)


def _longer_product(uses: list[OuterProducts]) -> OuterProducts:
    if len(uses) == 1:
        return uses[0]
    return OuterProducts(torch.cat([use.acts for use in uses], 1), torch.cat([use.grads for use in uses], 1))


def _longer_table(uses: list[Scattered]) -> Scattered:
    if len(uses) == 1:
        return uses[0]
    indices, grads = torch.cat([use.indices for use in uses], 1), torch.cat([use.grads for use in uses], 1)
    return Scattered(indices, grads, uses[0].size)

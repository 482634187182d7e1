"""Rows that were standardised before they were used: in closed form against gradients that are written out."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipless.gradients.forms import (
    Form,
    Instantiated,
    OuterProducts,
    Products,
    Scales,
    Standardisation,
    Standardised,
)
from clipless.gradients.layers.conv import Correlation

B, T, N, ROWS = 5, 7, 12, 4
KIND = torch.float64


def products(scale: float = 1.0) -> Form:
    return OuterProducts(torch.randn(B, T, N, dtype=KIND), scale * torch.randn(B, T, ROWS, dtype=KIND))


def correlation(groups: int = 1) -> Form:
    conv = nn.Conv2d(3 * groups, ROWS, 2, groups=groups, dtype=KIND)
    return Correlation(
        conv, torch.randn(B, 3 * groups, 4, 4, dtype=KIND), torch.randn(B, ROWS, 3, 3, dtype=KIND), [0, 0]
    )


FORMS: dict[str, Callable[[], Form]] = {
    "products": products,
    "one position": lambda: OuterProducts(torch.randn(B, 1, N, dtype=KIND), torch.randn(B, 1, ROWS, dtype=KIND)),
    "written out": lambda: Instantiated(torch.randn(B, ROWS, N, dtype=KIND)),
    "convolution": correlation,
    "grouped convolution": partial(correlation, 2),
}


def standardised(centred: bool, shape: torch.Size, zero: bool) -> tuple[Tensor, Standardisation, Tensor]:
    """V, how its rows were standardised, and their scales."""
    v, scale = torch.randn(shape, dtype=KIND), torch.randn(shape[0], dtype=KIND)
    scale[0] *= not zero
    rows = v.flatten(1)
    if centred:
        std = (rows.var(1, correction=0) + 1e-5).sqrt()
        u = (rows - rows.mean(1, keepdim=True)) / std.unsqueeze(1) / rows.shape[1] ** 0.5
    else:
        std = rows.norm(dim=1)
        u = rows / std.unsqueeze(1)
    return v, Standardisation(u.view(shape), scale / std, centred), scale


def used(v: Tensor, scale: Tensor, centred: bool) -> Tensor:
    """W, by torch."""
    rows = v.flatten(1)
    if centred:
        return F.batch_norm(rows.unsqueeze(0), None, None, weight=scale, training=True).view(v.shape)
    return (scale.unsqueeze(1) * rows / rows.norm(dim=1, keepdim=True)).view(v.shape)


@pytest.mark.parametrize("zero", [False, True], ids=["", "a scale of zero"])
@pytest.mark.parametrize("centred", [False, True], ids=["normalised", "standardised"])
@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_agrees_with_gradients_that_are_written_out(make: Callable[[], Form], centred: bool, zero: bool) -> None:
    torch.manual_seed(0)
    form = make()
    written = form.per_record()
    v, how, scale = standardised(centred, written.shape[1:], zero)
    v.requires_grad_(), scale.requires_grad_()
    w = used(v, scale, centred)
    whole, gains = torch.autograd.grad([w], [v, scale], [written], is_grads_batched=True)
    factors, total = torch.rand(B, dtype=KIND), torch.randn(v.shape, dtype=KIND)
    for method in form.methods() or [None]:
        known = Products(form, how.direction)
        rows = Standardised(form, how, known)
        scales = Scales(known, v[0].numel() ** 0.5 if centred else 1.0, B, lambda grads: grads)
        before = torch.empty_like(scale)
        scales.add_to(before, factors, beta=0)  # as in a checked pass, where no norms are needed
        torch.testing.assert_close(before, factors @ gains)
        for unnormed in (rows, rows.rows(slice(0, B))):
            sums = total.clone()
            unnormed.add_to(sums, factors, beta=1)
            torch.testing.assert_close(sums, total + torch.tensordot(factors, whole, 1))
        rows = rows if method is None else rows.by(method)
        torch.testing.assert_close(rows.sq_norms, whole.flatten(1).square().sum(1))
        torch.testing.assert_close(scales.sq_norms, gains.square().sum(1))
        for some in (rows, rows.rows(slice(0, B))):
            sums = total.clone()
            some.add_to(sums, factors, beta=0)
            torch.testing.assert_close(sums, torch.tensordot(factors, whole, 1))
        torch.testing.assert_close(rows.per_record(), whole)
        mask = torch.arange(B) != 2
        torch.testing.assert_close(rows.keep(mask).per_record(), whole * mask.view(-1, *[1] * v.dim()))
        torch.testing.assert_close(scales.keep(mask).per_record(), gains * mask.unsqueeze(1))


@pytest.mark.parametrize("method", ["ghost", "written"])
def test_a_norm_is_not_too_small_where_all_but_the_direction_cancels(method: str) -> None:
    """Gradients along W leave rounding errors alone in V: a record's share of the sum must not exceed its norm."""
    torch.manual_seed(0)
    v = torch.randn(ROWS, N)
    how = Standardisation(v / v.norm(dim=1, keepdim=True), torch.ones(ROWS), centred=False)
    acts, grads = torch.randn(B, T, N), torch.zeros(B, T, ROWS)
    grads[:, :, 1] = 1.0
    acts[:, :] = v[1] + 1e-6 * torch.randn(B, T, N)
    form = OuterProducts(acts, grads)
    rows = Standardised(form, how, Products(form, how.direction)).by(method)
    for record in range(B):
        total, one = torch.empty(ROWS, N), torch.eye(B)[record]
        rows.add_to(total, one, beta=0)
        assert total.norm() <= rows.sq_norms[record].sqrt() * (1 + 1e-5)
    exact = [g.double().mT @ a.double() for a, g in zip(acts, grads, strict=True)]
    true = torch.stack([how.applied(one).norm() for one in exact])
    assert torch.all(rows.sq_norms.sqrt() >= true * (1 - 1e-4))
    assert torch.all(rows.sq_norms.sqrt() <= true + 1e-4 * v[1].norm() * T)

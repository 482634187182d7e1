"""Norms of many forms at once are those of each by itself, whatever they share and in whatever order they come."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clipless.gradients.forms import (
    Addend,
    Form,
    Instantiated,
    OuterProducts,
    Scattered,
    add_all,
    can_wait,
    squares_of,
)

KINDS = ("written", "product", "product with bias", "long product", "table", "known", "known product")


def made(kind: str, records: int, dtype: torch.dtype, width: int) -> list[Form]:
    """Forms of one layer, the last one its weight."""
    acts, grads = torch.randn(records, 1, width, dtype=dtype), torch.randn(records, 1, width + 1, dtype=dtype)
    written = Instantiated(grads.squeeze(1))
    if kind in ("known", "known product"):
        known: list[Form] = [written, OuterProducts(acts, grads, summed=written)]
        known[kind == "known product"].sq_norms
        return known
    if kind == "long product":
        return [OuterProducts(torch.randn(records, 3, width, dtype=dtype), torch.randn(records, 3, 2, dtype=dtype))]
    if kind == "table":
        return [Scattered(torch.randint(5, (records, 2)), torch.randn(records, 2, width, dtype=dtype), 5)]
    products: dict[str, list[Form]] = {
        "written": [Instantiated(torch.randn(records, 2, width, dtype=dtype))],
        "product": [OuterProducts(acts, grads)],
        "product with bias": [written, OuterProducts(acts, grads, summed=written)],
    }
    return products[kind]


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    records=st.integers(1, 5),
    double=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_norms_of_many_are_those_of_each(kinds: list[str], records: int, double: bool, order: object) -> None:
    torch.manual_seed(len(kinds))
    dtype = torch.float64 if double else torch.float32
    forms = [form for number, kind in enumerate(kinds) for form in made(kind, records, dtype, number + 1)]
    order.shuffle(forms)  # type: ignore[attr-defined]
    expected = [form.per_record().flatten(1).double().square().sum(1) for form in forms]
    found = squares_of(list(enumerate(forms)), len(forms), records)
    for form, norms, exact in zip(forms, found, expected, strict=True):
        assert torch.allclose(norms.double(), exact, rtol=1e-4), type(form)
    groups = [number % 2 for number in range(len(forms))]
    together = squares_of(list(zip(groups, forms, strict=True)), 2, records).double()
    for group in range(2):
        own = [exact for number, exact in enumerate(expected) if groups[number] == group]
        assert torch.allclose(together[group], sum(own, torch.zeros(records)).double(), rtol=1e-4)


def test_a_record_that_is_not_finite_spoils_no_other() -> None:
    acts, grads = torch.ones(3, 1, 4), torch.ones(3, 1, 2)
    grads[1, 0, 0] = torch.nan
    bias = Instantiated(grads.squeeze(1))
    found = squares_of([(0, bias), (1, OuterProducts(acts, grads, summed=bias))], 2, records=3)
    assert found[:, [0, 2]].tolist() == [[2.0, 2.0], [8.0, 8.0]]
    assert found[:, 1].isnan().all()


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
def test_gradients_that_are_the_same_for_all_records_are_rows_too(shape: tuple[int, ...]) -> None:
    """Their memory holds one record, whatever the shape of the parameter."""
    grads = torch.full(shape, 2.0).expand(4, *shape)
    found = squares_of([(0, Instantiated(grads))], 1, records=4)
    assert found.tolist() == [pytest.approx([4.0 * grads[0].numel()] * 4)]
    total = torch.zeros(shape)
    add_all([Addend(Instantiated(grads), total, torch.ones(4), 1)])
    assert bool((total == 8.0).all())


@pytest.mark.parametrize(
    ("form", "waits"),
    [
        (Instantiated(torch.zeros(4, 8)), True),
        (Instantiated(torch.zeros(4, 9)), False),
        (OuterProducts(torch.zeros(4, 1, 8), torch.zeros(4, 1, 8)), True),
        (OuterProducts(torch.zeros(4, 1, 9), torch.zeros(4, 1, 8)), False),
        (OuterProducts(torch.zeros(4, 1, 8), torch.zeros(4, 1, 9)), False),
        (OuterProducts(torch.zeros(4, 2, 1), torch.zeros(4, 2, 1)), False),
        (Scattered(torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, 1, 1), 3), False),
    ],
    ids=["written", "written-large", "product", "product-wide", "product-tall", "positions", "scattered"],
)
def test_small_ones_wait_for_others(form: Form, waits: bool) -> None:
    assert can_wait(form, size=4 * 8 * 4 + 1) == waits


def test_every_form_is_added_with_its_own_factors_times_the_scale() -> None:
    """Written out, single products with and without a dimension of positions, and sums of products, in two groups."""
    torch.manual_seed(0)
    b, i, o = 6, 5, 4
    kinds: list[Callable[[], Form]] = [
        lambda: Instantiated(torch.randn(b, o, i)),
        lambda: OuterProducts(torch.randn(b, i), torch.randn(b, o)),
        lambda: OuterProducts(torch.randn(b, 1, i), torch.randn(b, 1, o)),
        lambda: OuterProducts(torch.randn(b, 3, i), torch.randn(b, 3, o)),
    ]
    addends = [Addend(kind(), torch.full((o, i), torch.nan), torch.rand(b), 0) for _ in range(2) for kind in kinds]
    add_all(addends, scale=3.0)
    for form, total, factors, _ in addends:
        torch.testing.assert_close(total, torch.einsum("b,boi->oi", 3 * factors, form.per_record()))

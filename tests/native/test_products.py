"""Sums of outer products and their ghost norms: compiled and by torch, against float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clipless.gradients.forms import OuterProducts
from clipless.native import LIBRARY, gram, rows
from clipless.native.by_torch import Product
from clipless.native.rows import add_products, written_out
from compiling import loaded, needs_library

SIZES = st.sampled_from([1, 7, 8, 9, 16, 17, 40])


@pytest.fixture(params=["compiled", "torch"], autouse=True, scope="module")
def way(request: pytest.FixtureRequest) -> object:
    """Every test here with and without the library."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(rows, "compiled", lambda: None)
            patch.setattr(gram, "compiled", lambda: None)
        else:
            loaded(rows)
            loaded(gram)
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=3), st.integers(0, 150), st.integers(0, 1))
def test_sums(sizes: list[tuple[int, int]], records: int, beta: int) -> None:
    sums, expected = [], []
    for k, (outputs, width) in enumerate(sizes):
        left, right, factors = (
            numbers(records, outputs, seed=k),
            numbers(records, width, seed=k + 9),
            numbers(records).abs(),
        )
        before = numbers(outputs, width) if beta else torch.full((outputs, width), torch.nan)
        sums.append(Product(before.clone(), left, right, factors, beta))
        exact = torch.einsum("b,bo,bi->oi", factors.double(), left.double(), right.double())
        expected.append(exact + before.double() if beta else exact)
    add_products(sums)
    for made, exact in zip(sums, expected, strict=True):
        torch.testing.assert_close(made.total.double(), exact, rtol=1e-4, atol=1e-4)


def test_a_sum_of_equal_records_is_off_by_a_small_part_of_one() -> None:
    """A chain of 2,048 float32 additions would be off by a tenth of a record."""
    total = torch.empty(1, 1)
    add_products([Product(total, torch.full((2048, 1), 0.1), torch.ones(2048, 1), torch.ones(2048), beta=0)])
    one = float(torch.tensor(0.1))
    assert abs(float(total) - 2048 * one) < 0.05 * one


def test_other_types_and_tensors_with_gaps_are_torchs() -> None:
    left, right = numbers(5, 3).double(), numbers(5, 4).double()
    total = torch.zeros(3, 4, dtype=torch.float64)
    add_products([Product(total, left, right, torch.ones(5), beta=0)])
    torch.testing.assert_close(total, left.mT @ right)
    gaps = torch.zeros(6, 4)[::2]
    add_products([Product(gaps, numbers(5, 3), numbers(4, 5).mT, torch.ones(5), beta=0)])
    torch.testing.assert_close(gaps, numbers(5, 3).mT @ numbers(4, 5).mT, rtol=1e-5, atol=1e-5)


def laid_out(tensor: Tensor, way: int) -> Tensor:
    """The same numbers side by side, turned, with gaps, or with positions first."""
    if way == 0:
        return tensor
    if way == 1:
        return tensor.mT.contiguous().mT
    if way == 2:
        return torch.cat([tensor, tensor + 1], -1)[..., : tensor.shape[-1]]
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


WAYS = st.integers(0, 3)
WIDE = st.sampled_from([1, 7, 16, 33, 140])


@given(st.integers(0, 5), st.sampled_from([1, 3, 90]), WIDE, WIDE, WAYS, WAYS, st.integers(0, 1))
def test_a_weighted_sum_of_outer_products(
    b: int, t: int, inside: int, outside: int, way: int, other: int, beta: int
) -> None:
    acts, grads = laid_out(numbers(b, t, inside), other), laid_out(numbers(b, t, outside, seed=1), way)
    total, factors = numbers(outside, inside, seed=3), numbers(b, seed=2)
    expected = torch.einsum("b,bto,bti->oi", factors.double(), grads.double(), acts.double()) + beta * total.double()
    if not beta:
        total.fill_(torch.nan)
    OuterProducts(acts, grads).add_to(total, factors, beta)
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "outside", "inside"), [(600, 300, 200), (300, 200, 520), (257, 1, 300), (10, 300, 129)]
)
def test_sums_of_more_than_is_taken_at_a_time(rows: int, outside: int, inside: int) -> None:
    left, right, factors = numbers(rows, outside), numbers(rows, inside, seed=1), numbers(rows, seed=2)
    total = torch.full((outside, inside), torch.nan)
    add_products([Product(total, left, right, factors, beta=0)], 0.5)
    exact = 0.5 * (left.double() * factors.double()[:, None]).mT @ right.double()
    torch.testing.assert_close(total.double(), exact, rtol=1e-4, atol=1e-3)


@given(st.integers(0, 4), st.sampled_from([1, 2, 9, 300]), WIDE, WIDE, WAYS, WAYS)
def test_a_product_for_every_record(b: int, t: int, outside: int, inside: int, way: int, other: int) -> None:
    left, right = laid_out(numbers(b, t, outside), way), laid_out(numbers(b, t, inside, seed=1), other)
    made, squares = written_out(left, right)
    exact = left.double().mT @ right.double()
    torch.testing.assert_close(made.double(), exact, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(squares, exact.square().sum((1, 2)), rtol=1e-4, atol=1e-6)


def test_no_record_changes_what_is_written_out_of_another() -> None:
    left, right = numbers(3, 20, 40), numbers(3, 20, 30, seed=1)
    whole, squares = written_out(left, right)
    left[1, 0, 0], right[2, 3, 1] = math.nan, math.inf
    made, found = written_out(left, right)
    assert torch.equal(made[0], whole[0])
    assert found[0] == squares[0]
    assert not found[1:].isfinite().any()


@needs_library
@pytest.mark.parametrize("threads", [2, 3, 7, 40])
def test_every_number_is_computed_however_many_threads_there_are(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what one thread computes, for totals that are tall, wide and small."""
    fast = rows.build(LIBRARY)
    assert fast is not None
    found = []
    for count in (1, threads):
        monkeypatch.setattr(rows, "_workers", lambda work, count=count: count)
        sums = [
            Product(torch.full((o, i), torch.nan), numbers(300, o), numbers(300, i), numbers(300), 0)
            for o, i in ((270, 200), (9, 300), (1, 1), (200, 40))
        ]
        assert fast.add_products(sums, 1.0)
        written = fast.write_products(numbers(5, 20, 150), numbers(5, 20, 140))
        assert written is not None
        found.append([*(each.total for each in sums), *written])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_one_sum_that_does_not_fit_leaves_the_others_compiled() -> None:
    """A total with gaps, one in float64, and one that is ordinary."""
    left, right, factors = numbers(5, 3), numbers(5, 4, seed=1), numbers(5, seed=2)
    sums = [
        Product(torch.zeros(6, 4)[::2], left, right, factors, 0),
        Product(torch.zeros(3, 4), left, right, factors, 0),
        Product(torch.zeros(3, 4, dtype=torch.float64), left.double(), right.double(), factors, 0),
    ]
    add_products(sums, 0.5)
    for each in sums:
        torch.testing.assert_close(each.total.float(), 0.5 * (left * factors[:, None]).mT @ right, rtol=1e-5, atol=1e-5)


def test_autocast_leaves_sums_alone() -> None:
    acts, grads, total = numbers(3, 4, 5), numbers(3, 4, 6, seed=1), torch.zeros(6, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        OuterProducts(acts, grads).add_to(total, torch.ones(3), 0)
        written = OuterProducts(acts, grads).per_record()
    assert written.dtype is torch.float32
    torch.testing.assert_close(total, torch.einsum("bto,bti->oi", grads, acts))
    torch.testing.assert_close(written, grads.mT @ acts)


@given(st.integers(1, 3), st.integers(1, 70), SIZES, st.sampled_from([1, 33, 300]), st.booleans(), st.booleans())
def test_ghost_norms(records: int, positions: int, inside: int, outside: int, first: bool, twins: bool) -> None:
    grads = numbers(positions, records, outside).transpose(0, 1) if first else numbers(records, positions, outside)
    twin = OuterProducts(numbers(records, positions, 7).add_(1), grads) if twins else None
    form = OuterProducts(numbers(records, positions, inside), grads, twin)
    for each in [form] if twin is None else [form, twin]:
        acts = each.acts.double()
        exact = (grads.double().mT @ acts).square().sum((1, 2))
        lengths = (acts.norm(dim=2) * grads.double().norm(dim=2)).sum(1)
        squares, found, lost = each.ghost
        torch.testing.assert_close(squares, exact, rtol=1e-4, atol=1e-5 * float(lengths.max()) ** 2)
        torch.testing.assert_close(found, lengths, rtol=1e-5, atol=1e-6)
        assert not lost.any()


@pytest.mark.parametrize("positions", [5, 40])
def test_norms_of_twins_are_computed_once(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, or each alone if the twin's came first: the same numbers."""
    calls = []
    for name in ("by_torch", "compiled"):
        plain = getattr(gram, name)
        fast = plain if name == "by_torch" else plain()
        if fast is None:
            continue

        def counted(inputs: list[Tensor], grads: Tensor, run: Callable[..., Tensor] = fast) -> Tensor:
            calls.append(len(inputs))
            return run(inputs, grads)

        monkeypatch.setattr(gram, name, counted if name == "by_torch" else lambda found=counted: found)
    acts, other, grads = numbers(3, positions, 4), numbers(3, positions, 6), numbers(3, positions, 5)
    alone = [OuterProducts(rows, grads).ghost for rows in (acts, other)]
    for order in (1, -1):
        twin = OuterProducts(acts, grads)
        forms = [twin, OuterProducts(other, grads, twin)]
        calls.clear()
        for form in forms[::order]:
            assert form.ghost is not None
        assert calls == ([1, 1] if order == 1 else [2])
        for form, expected in zip(forms, alone, strict=True):
            assert all(torch.equal(*pair) for pair in zip(form.ghost, expected, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25])
def test_a_ghost_norm_is_not_finite_where_its_record_is_not(bad: float) -> None:
    acts, grads = numbers(3, 40, 5), numbers(3, 40, 6)
    grads[1, 39, 2] = bad
    norms = OuterProducts(acts, grads).sq_norms.float()
    assert norms.isfinite().tolist() == [True, False, True]


def test_only_what_has_lost_digits_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record without gradients, one without inputs, one whose inputs have no gradients, and one that is too small."""
    acts, grads = numbers(5, 40, 3), numbers(5, 40, 6)
    grads[0], acts[1], acts[2, 20:], grads[2, :20] = 0, 0, 0, 0
    acts[3] *= 1e-21
    grads[3] *= 1e-21
    again: list[Tensor] = []
    exact = OuterProducts._exact

    def watched(form: OuterProducts, which: Tensor) -> Tensor:
        again.append(which)
        return exact(form, which)

    monkeypatch.setattr(OuterProducts, "_exact", watched)
    norms = OuterProducts(acts, grads).sq_norms.sqrt()
    assert [which.nonzero().flatten().tolist() for which in again] == [[3]]
    expected = (grads.double().mT @ acts.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, expected, rtol=1e-3, atol=0)


def test_positions_that_cancel_are_computed_exactly() -> None:
    """A ghost norm of what cancels is rounding error: too small by any factor, and the record would add too much."""
    acts, grads = numbers(2, 20, 5).repeat(1, 2, 1), numbers(2, 20, 6)
    grads = torch.cat([grads, -grads * (1 + 1e-6)], 1)
    exact = (grads.double().mT @ acts.double()).square().sum((1, 2))
    assert (OuterProducts(acts, grads).sq_norms >= exact).all()


@needs_library
def test_sizes_that_do_not_fit_together_are_refused() -> None:
    norms = gram.build(LIBRARY)
    assert norms is not None
    for others in ([numbers(2, 40, 3)], [numbers(2, 41, 3), numbers(1, 41, 3)]):
        with pytest.raises(ValueError, match="do not fit"):
            norms(others, numbers(2, 41, 3))

"""Rows of many tensors in one call, and normalisations in one pass: compiled and by torch, against float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clipless.gradients.forms import Addend, Instantiated, OuterProducts, add_all, squares_of
from clipless.gradients.layers import norm_sums
from clipless.gradients.layers.norm_sums import compiled as compiled_sums
from clipless.native import LIBRARY, rows
from clipless.native.by_torch import Product, Weighted
from clipless.native.rows import add_rows, norms, squared_lengths
from compiling import loaded, needs_library

WIDTHS = st.lists(st.one_of(st.integers(0, 40), st.sampled_from([2047, 2048, 2049, 9000])), min_size=1, max_size=5)


@pytest.fixture(params=["compiled", "torch"], autouse=True, scope="module")
def way(request: pytest.FixtureRequest) -> object:
    """Every test here with and without the library."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(rows, "compiled", lambda: None)
            patch.setattr(norm_sums, "compiled", lambda: None)
        else:
            loaded(rows)
            loaded(norm_sums)
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_library
def test_ordinary_tensors_are_left_to_nobody_else() -> None:
    """Each compiled function takes float32 tensors in main memory, and torch does no part of it."""
    fast, one = rows.build(LIBRARY), numbers(3, 4)
    assert fast is not None
    assert fast.squares([one], [(0, 0, -1)], 1) is not None
    assert fast.norms(one.double().square(), torch.float32, 1.0, 0.0) is not None
    assert fast.add_rows([Weighted(torch.zeros(4), one, torch.ones(3), 0)], 1.0)
    assert fast.add_products([Product(torch.zeros(4, 4), one, one, torch.ones(3), 0)], 1.0)
    assert fast.write_products(numbers(2, 3, 4), numbers(2, 3, 5)) is not None


@given(WIDTHS, st.integers(0, 9), st.integers(0, 10**6))
def test_lengths(widths: list[int], records: int, seed: int) -> None:
    tensors = [numbers(records, width, seed=seed + k) for k, width in enumerate(widths)]
    exact = torch.stack([tensor.double().square().sum(1) for tensor in tensors])
    torch.testing.assert_close(squared_lengths(tensors), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("size", [1e-36, 1e-20, 1e-15, 1e15])
def test_lengths_of_tiny_and_of_huge_numbers_lose_nothing(size: float) -> None:
    """Where squares underflow in float32: beside a huge gradient such an input has a norm that counts."""
    tensor = numbers(3, 200).mul_(size)
    exact = tensor.double().square().sum(1, keepdim=True).mT
    torch.testing.assert_close(squared_lengths([tensor]), exact, rtol=2e-6, atol=0)


@given(WIDTHS, st.integers(0, 9), st.integers(0, 1), st.integers(0, 10**6))
def test_sums(widths: list[int], records: int, beta: int, seed: int) -> None:
    tensors = [numbers(records, width, seed=seed + k) for k, width in enumerate(widths)]
    factors = numbers(records, seed=seed).abs()
    before = [numbers(width) if beta else torch.full((width,), torch.nan) for width in widths]
    totals = [total.clone() for total in before]
    add_rows([Weighted(total, tensor, factors, beta) for total, tensor in zip(totals, tensors, strict=True)])
    for total, tensor, old in zip(totals, tensors, before, strict=True):
        exact = factors.double() @ tensor.double() + (old.double() if beta else 0)
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_that_are_no_numbers_are_infinite_and_small_ones_zero(dtype: torch.dtype) -> None:
    squared = torch.tensor([[9.0, 0.0, 1e-31, 1.1e-30, math.nan, math.inf, -1.0]], dtype=torch.float64)
    found, usual = norms(squared.clone(), dtype, 2.0, 1e-15)
    expected = torch.tensor([[6.0, 0.0, 0.0, 2 * 1.1e-30**0.5, math.inf, math.inf, math.inf]], dtype=dtype)
    torch.testing.assert_close(found, expected)
    assert not usual
    for k in range(squared.shape[1]):
        assert norms(squared[:, k : k + 1].clone(), dtype, 2.0, 1e-15)[1] == (k in (0, 3))
    assert norms(squared[:, :0].clone(), dtype, 2.0, 1e-15)[1]


def test_a_square_beyond_float32_is_infinite_there() -> None:
    squared = torch.tensor([[1e39]], dtype=torch.float64)
    assert norms(squared.clone(), torch.float32, 1.0, 1e-15) == (torch.tensor([[math.inf]]), False)
    assert norms(squared.clone(), torch.float64, 1.0, 1e-15)[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("place", [0, 15, 16, 36])
def test_a_length_is_never_finite_where_the_row_is_not(bad: float, place: int) -> None:
    tensor = torch.ones(3, 37)
    tensor[1, place] = bad
    found = squared_lengths([tensor])[0].float()
    assert found.isfinite().tolist() == [True, False, True]


def test_columns_of_a_kind_of_their_own_are_torchs() -> None:
    double, gaps = numbers(3, 5).double(), numbers(5, 3).mT
    assert squared_lengths([double]).dtype == torch.float64
    torch.testing.assert_close(squared_lengths([gaps])[0], gaps.double().square().sum(1), rtol=1e-6, atol=0)
    total = torch.zeros(10)[::2]
    add_rows([Weighted(total, gaps, torch.ones(3), beta=1)])
    torch.testing.assert_close(total, gaps.sum(0))


@pytest.mark.parametrize(("total", "rows", "factors"), [((4,), (3, 5), (3,)), ((5,), (3, 5), (2,))], ids=str)
def test_sizes_that_do_not_fit_are_refused_and_nothing_beyond_is_touched(
    total: tuple[int, ...], rows: tuple[int, ...], factors: tuple[int, ...]
) -> None:
    good = Weighted(torch.zeros(5), torch.ones(3, 5), torch.ones(3), beta=1)
    with pytest.raises(RuntimeError):
        add_rows([good, Weighted(torch.zeros(total), torch.ones(rows), torch.ones(factors), beta=1)])
    with pytest.raises(RuntimeError):
        squared_lengths([torch.ones(3, 5), torch.ones(2, 5)])


def test_pieces_of_every_kind_together() -> None:
    """Norms known or not, written out or not: as from each form alone, each in its place."""
    small, large = Instantiated(numbers(4, 3, 2)), Instantiated(numbers(4, 300, 300))
    product = OuterProducts(numbers(4, 5, 6), numbers(4, 5, 7, seed=1))
    known = Instantiated(numbers(4, 9))
    known.sq_norms
    forms = [product, small, known, large]
    exact = [form.per_record().double().flatten(1).square().sum(1) for form in forms]
    found = squares_of(list(enumerate(forms)), 4, records=4)
    torch.testing.assert_close(found, torch.stack(exact), rtol=1e-5, atol=0)
    together = squares_of(list(zip((1, 0, 1, 0), forms, strict=True)), 3, records=4)
    sums = torch.stack([exact[1] + exact[3], exact[0] + exact[2], torch.zeros(4)])
    torch.testing.assert_close(together, sums.double(), rtol=1e-5, atol=0)
    factors = torch.linspace(0, 1, 4)
    totals = [torch.zeros(form.per_record().shape[1:]) for form in forms]
    add_all(Addend(form, total, factors, 0) for form, total in zip(forms, totals, strict=True))
    for form, total in zip(forms, totals, strict=True):
        torch.testing.assert_close(total, torch.tensordot(factors, form.per_record(), 1), rtol=1e-5, atol=1e-5)


# Normalisations along the last dimensions.


def exact_sums(x: Tensor, grad: Tensor, trailing: int, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    x, grad = x.double(), grad.double()
    dims = tuple(range(x.dim() - trailing, x.dim()))
    mean = x.mean(dims, keepdim=True) if centred else 0
    normalised = (x - mean) / ((x - mean).square().mean(dims, keepdim=True) + eps).sqrt()
    between = tuple(range(1, x.dim() - trailing))
    return tuple(part.sum(between) if between else part for part in (grad * normalised, grad))  # type: ignore[return-value]


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from([1e-5, 1e-2]),
    st.integers(0, 10**6),
)
def test_normalisations(shape: list[int], trailing: int, centred: bool, eps: float, seed: int) -> None:
    trailing = min(trailing, len(shape) - 1)
    x, grad = 3 * numbers(*shape, seed=seed) + 1, numbers(*shape, seed=seed + 1)
    found = norm_sums.norm_sums(x, grad, trailing, eps, centred)
    for one, exact in zip(found, exact_sums(x, grad, trailing, eps, centred), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("width", [norm_sums.WIDEST, norm_sums.WIDEST + 1])
@pytest.mark.parametrize("centred", [True, False])
def test_wide_rows_and_long_sequences(width: int, centred: bool) -> None:
    x, grad = numbers(2, 300, width) + 5, numbers(2, 300, width, seed=1)
    found = norm_sums.norm_sums(x, grad, 1, 1e-5, centred)
    for one, exact in zip(found, exact_sums(x, grad, 1, 1e-5, centred), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-4, atol=1e-3)


def test_other_types_and_tensors_with_gaps_are_torchs() -> None:
    x, grad = numbers(5, 4, 3).double(), numbers(5, 4, 3, seed=1).double()
    for one, exact in zip(norm_sums.norm_sums(x, grad, 1, 1e-5, True), exact_sums(x, grad, 1, 1e-5, True), strict=True):
        torch.testing.assert_close(one, exact)
    x, grad = numbers(4, 5, 3).transpose(0, 1), numbers(5, 4, 3)
    for one, exact in zip(norm_sums.norm_sums(x, grad, 1, 1e-5, True), exact_sums(x, grad, 1, 1e-5, True), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_record_that_is_not_finite_stays_so_and_alone(bad: float) -> None:
    x, grad = numbers(3, 4, 20), numbers(3, 4, 20, seed=1)
    x[1, 2, 7] = bad
    scale, _ = norm_sums.norm_sums(x, grad, 1, 1e-5, centred=True)
    assert scale.isfinite().all(1).tolist() == [True, False, True]


@needs_library
def test_the_compiled_form_is_as_exact_as_torchs() -> None:
    fast = compiled_sums()
    assert fast is not None
    x, grad = 10 * numbers(2, 2000, 64) + 100, numbers(2, 2000, 64, seed=1)
    (scale, shift), (exact, total) = fast(x, grad, 1e-5, True), exact_sums(x, grad, 1, 1e-5, True)
    by_torch = (grad * F.layer_norm(x, [64], eps=1e-5)).sum(1)
    assert (scale - exact).abs().max() <= 3 * (by_torch - exact).abs().max()
    assert (shift - total).abs().max() <= 1e-4

"""Matrix products by either of torch's libraries, against float64: however the factors lie in memory, in every form."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import clipless
from clipless import oracle
from clipless.gradients.layers import conv_rows
from clipless.gradients.recurrent import matrix_products as products
from clipless.native.conv import Geometry
from clipless.processor import AMD, Processor, processor_of

PREFERS = products.prefers_onednn  # which the tests replace
SIZES = st.sampled_from([1, 3, 16, 40, 65])


@pytest.fixture(params=["onednn", "mkl"], autouse=True, scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test here with each, whatever this processor takes, and for the smallest products too."""
    if request.param != "mkl" and products.by_onednn() is None:
        pytest.skip("this torch has no products by oneDNN")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(products, "prefers_onednn", lambda _: request.param != "mkl")
        patch.setattr(products, "WORTH_IT", 0)
        yield request.param


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def laid_out(tensor: Tensor, way: int) -> Tensor:
    """The same numbers side by side, turned, or with gaps."""
    if way == 0:
        return tensor
    if way == 1:
        return tensor.mT.contiguous().mT
    return torch.cat([tensor, tensor + 1], -1)[..., : tensor.shape[-1]]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


WAYS = st.integers(0, 2)


@given(SIZES, SIZES, SIZES, WAYS, WAYS)
def test_a_product(m: int, k: int, n: int, left_way: int, right_way: int) -> None:
    left, right, bias = laid_out(numbers(m, k), left_way), laid_out(numbers(k, n, seed=1), right_way), numbers(n)
    exact = left.double() @ right.double()
    close(products.product(left, right), exact)
    close(products.product(left, right, bias), exact + bias.double())
    total = numbers(m, n, seed=2)
    before = total.double()
    assert products.add_product(total, left, right) is total
    close(total, before + exact)
    forgotten = torch.full((m, n), torch.nan)
    close(products.add_product(forgotten, left, right, beta=0), exact)


def test_other_types_are_left_to_torch() -> None:
    left, right = numbers(3, 4).double(), numbers(4, 5).double()
    assert torch.equal(products.product(left, right), left @ right)
    half = numbers(3, 4).bfloat16()
    assert products.product(half, half.mT.contiguous()).dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(6, 9), (4, 6)),
        (nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)), (4, 7, 6)),
        (nn.Conv2d(3, 5, 3), (4, 3, 9, 9)),
        (nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True), (4, 7, 6)),
        (nn.GRU(6, 5), (7, 4, 6)),
        (nn.RNN(6, 5, batch_first=True), (4, 7, 6)),
        (nn.LSTM(6, 5, proj_size=3, batch_first=True), (4, 7, 6)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
@pytest.mark.parametrize("memory_cap", [0, None])
def test_clipped_sums_are_those_of_single_records(
    module: nn.Module, shape: tuple[int, ...], memory_cap: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every method: without room for gradients written out, and with it."""
    monkeypatch.setattr("clipless.gradients.kernels.MEMORY_CAP", 2**28 if memory_cap is None else memory_cap)
    records = 1 if isinstance(module, nn.GRU) else 0

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        found = model(x.transpose(0, records))
        output = found[0] if isinstance(found, tuple) else found
        return output.transpose(0, records).flatten(1).square().sum(1)

    batch = numbers(*shape).transpose(0, records)
    with torch.enable_grad():
        fast = clipless.clipped_sum(module, losses, batch)
        slow = oracle.clipped_sum(module, losses, batch)
    for name, gradient in slow.grads.items():
        torch.testing.assert_close(fast.grads[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023


def test_what_torch_makes_by_default_changes_nothing() -> None:
    """Types and autocast that are set before the first product, or between two."""
    acts, grads = numbers(2, 3, 9, 9), numbers(2, 4, 7, 7, seed=1)
    fast, how = conv_rows.compiled(), Geometry((0, 0), (1, 1), (1, 1), 1)
    torch.set_default_dtype(torch.float64)
    try:
        if fast is not None:
            made, _ = fast(acts, grads, (4, 3, 3, 3), how)
            assert made.dtype is torch.float32
            torch.testing.assert_close(made, conv_rows.by_torch(acts, grads, (4, 3, 3, 3), how), rtol=1e-4, atol=1e-4)
        known = products.by_onednn() is not None
        products.by_onednn.cache_clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (products.by_onednn() is not None) == known
    finally:
        torch.set_default_dtype(torch.float32)
        products.by_onednn.cache_clear()


def test_which_processors_take_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    PREFERS.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert PREFERS(Processor(AMD, 26, 2))
    assert not any(map(PREFERS, (Processor(AMD, 25, 17), Processor("GenuineIntel", 6, 207), None)))
    PREFERS.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")  # as a user may have limited it
    assert not PREFERS(Processor(AMD, 26, 2))
    PREFERS.cache_clear()


@pytest.mark.parametrize(
    "text", ["", "processor : 0\nCPU part : 0xd40\n", "vendor_id : X\ncpu family : six\nmodel : 1\n"]
)
def test_a_processor_that_is_not_told_is_none(text: str) -> None:
    assert processor_of(text) is None

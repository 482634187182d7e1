"""The compiled LSTM cell: the same as torch's operations, used where it fits, done without where it does not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import clipless
from clipless import oracle
from clipless.gradients.recurrent import compiled_lstm
from clipless.gradients.recurrent.cells import CELLS, Cell, StepGradients, TimeStep, Weights
from clipless.gradients.recurrent.recurrence import forward
from clipless.native import lstm
from clipless.preflight import relative_error
from compiling import needs_compiler, needs_library
from gradients.recurrent.test_recurrent import PROBLEMS
from problems import losses

pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]
LSTMS = [name for name in PROBLEMS if "lstm" in name]
SPECIAL = [math.inf, -math.inf, math.nan, 1e30, -1e30, 1e-30, 88.0, -88.0, 104.0, 0.0]


def both_ways(cell: Cell, sums: Tensor, c: Tensor, of_h: Tensor, of_c: Tensor) -> list[Tensor]:
    """One position forward and back, from the sums of the gates [b,4,o] and a cell state [b,o]."""
    b, width = c.shape
    weights = cell.prepared(Weights(torch.eye(4 * width), torch.zeros(4 * width, width), None, None, None))
    gates = sums.flatten(1).clone() * weights.ih.diagonal()
    new_h, new_c, extra, of_c = torch.empty(b, width), torch.empty(b, width), torch.empty(b, width), of_c.clone()
    at = TimeStep(gates, extra, torch.zeros(b, width), c, new_h, new_c)
    cell.step(weights, at)
    cell.back(at, StepGradients(gates, of_h.clone(), of_c))
    return [new_h, new_c, gates, of_c]


@needs_library
@given(st.integers(0, 5), st.integers(1, 40), st.sampled_from([0.1, 1.0, 10.0]), st.integers(0, 10**6), st.data())
def test_it_does_what_torch_does(b: int, width: int, size: float, seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    sums, c, of_h, of_c = (
        size * torch.randn(shape, generator=generator) for shape in ((b, 4, width), *[(b, width)] * 3)
    )
    for _ in range(data.draw(st.integers(0, 3)) if b else 0):
        place = [data.draw(st.integers(0, n - 1)) for n in sums.shape]
        sums[tuple(place)] = data.draw(st.sampled_from(SPECIAL))
    cell = compiled_lstm.compiled()
    assert cell is not None
    for found, expected in zip(
        both_ways(cell, sums, c, of_h, of_c), both_ways(CELLS["lstm"], sums, c, of_h, of_c), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6 * max(size, 1), equal_nan=True)


@needs_library
@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("b", [1, 2, 5, 7, 16])
def test_every_row_is_computed_however_many_threads_there_are(
    b: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what one thread computes, the last row included."""
    generator = torch.Generator().manual_seed(b)
    sums, c, of_h, of_c = (torch.randn(shape, generator=generator) for shape in ((b, 4, 9), *[(b, 9)] * 3))
    cell = compiled_lstm.compiled()
    assert cell is not None
    monkeypatch.setattr(lstm, "threads", lambda work: 1)
    alone = both_ways(cell, sums, c, of_h, of_c)
    by_torch = both_ways(CELLS["lstm"], sums, c, of_h, of_c)
    monkeypatch.setattr(lstm, "threads", lambda work: count)
    for one, many, torchs in zip(alone, both_ways(cell, sums, c, of_h, of_c), by_torch, strict=True):
        assert torch.equal(one, many)
        torch.testing.assert_close(many, torchs, rtol=1e-5, atol=2e-6)


@needs_library
def test_it_is_as_exact_as_float32_is() -> None:
    sums = torch.linspace(-20, 20, 4 * 5000).view(50, 4, 100)
    c, of_h, of_c = (torch.linspace(-3, 3, 5000).view(50, 100).roll(shift) for shift in (0, 1000, 3000))
    cell = compiled_lstm.compiled()
    assert cell is not None
    found = both_ways(cell, sums, c, of_h, of_c)
    leaves = [part.double().requires_grad_() for part in (*sums.unbind(1), c)]
    write, forget, value, show, before = leaves
    new_c = forget.sigmoid() * before + write.sigmoid() * value.tanh()
    new_h = show.sigmoid() * new_c.tanh()
    grads = torch.autograd.grad([new_h, new_c], leaves, [of_h.double(), of_c.double()])
    for one, exact in zip(found, (new_h, new_c, torch.cat(grads[:4], 1), grads[4]), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", LSTMS)
def test_without_it_the_engine_agrees_with_the_oracle_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_lstm, "compiled", lambda: None)
    model, batch = PROBLEMS[name].model(), PROBLEMS[name].batch(5)
    fast, slow = (which.clipped_sum(model, losses, batch, "auto-s") for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-4


@pytest.mark.parametrize(
    ("kind", "dtype", "is_it"),
    [
        pytest.param("lstm", torch.float32, True, marks=needs_library),
        ("lstm", torch.float64, False),
        ("gru", torch.float32, False),
    ],
)
def test_it_is_used_where_it_fits(kind: str, dtype: torch.dtype, is_it: bool) -> None:
    module = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](3, 4, dtype=dtype)
    weights = Weights(*(p.detach() for p in module.parameters()), None)  # type: ignore[arg-type]
    state = tuple(torch.zeros(1, 2, 4, dtype=dtype) for _ in range(2 if kind == "lstm" else 1))
    result = forward(CELLS[kind], [[weights]], torch.ones(5, 2, 3, dtype=dtype), state, [2] * 5)
    used = result.traces[0].cell
    assert (used is compiled_lstm.compiled()) == is_it
    assert (used is CELLS[kind]) != is_it

"""The compiled LSTM: the same as torch's operations, used where it fits, done without where it does not."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import clipless
from clipless import oracle
from clipless.gradients.recurrent import compiled_lstm
from clipless.gradients.recurrent.cells import CELLS, Weights
from clipless.gradients.recurrent.recurrence import forward
from clipless.gradients.recurrent.through_time import Trace, back_by_steps, forward_by_steps
from clipless.native import lstm
from clipless.native.lstm import Passes
from clipless.preflight import relative_error
from compiling import loaded, needs_compiler, needs_library
from gradients.recurrent.test_recurrent import PROBLEMS
from problems import losses

pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]
LSTMS = [name for name in PROBLEMS if "lstm" in name]
SPECIAL = [math.inf, -math.inf, math.nan, 1e30, -1e30, 1e-30, 88.0, -88.0, 104.0, 0.0]


class Given:
    """A layer of random numbers: sums of the gates [t,b,4o], weights, initial states, gradients of output and states."""

    def __init__(self, t: int, b: int, width: int, size: float = 1.0, seed: int = 0, reverse: bool = False) -> None:
        self.generator, self.reverse, self.sizes = torch.Generator().manual_seed(seed), reverse, [b] * t
        self.sums, self.h, self.c = (
            self.numbers(size, t, b, 4 * width),
            self.numbers(1, b, width),
            self.numbers(size, b, width),
        )
        self.weights = self.numbers(width**-0.5, 4 * width, width)
        self.grad: Tensor | None = self.numbers(size, t, b, width)
        self.of_h, self.of_c = self.numbers(size, b, width), self.numbers(size, b, width)

    def numbers(self, size: float, *shape: int) -> Tensor:
        return size * torch.randn(shape, generator=self.generator)

    def results(self, passes: Passes | None, to_state: bool = True) -> dict[str, Tensor]:
        """Forward and back by the passes, or by torch's operations one time step after the other."""
        cell, (t, b, width) = CELLS["lstm"], (*self.sums.shape[:2], self.h.shape[1])
        weights = Weights(torch.eye(4 * width), self.weights, None, None, None)
        prepared = weights if passes else cell.prepared(weights)
        hidden, cells, extra = torch.zeros(t + 1, b, width), torch.zeros(t + 1, b, width), torch.zeros(t, b, width)
        hidden[-1 if self.reverse else 0], cells[-1 if self.reverse else 0] = self.h, self.c
        gates = self.sums * prepared.ih.diagonal()
        trace = Trace(cell, weights, self.sums, gates, hidden, cells, extra, None, self.reverse)
        state = self.of_h.clone(), self.of_c.clone()
        if passes is None:
            forward_by_steps(trace, prepared, self.sizes)
        else:
            passes.forward(trace.saved_steps(self.sizes), self.weights)
        found = {"hidden": hidden.clone(), "cells": cells.clone()}
        if passes is None:
            back_by_steps(trace, self.grad, state, self.sizes, to_state)
        else:
            passes.back(trace.saved_steps(self.sizes), self.weights, self.grad, state, to_state)
        return found | {"gates": gates, "c": state[1]} | ({"h": state[0]} if to_state else {})


def passes() -> Passes:
    return loaded(compiled_lstm)


@needs_library
@given(
    *(st.integers(1, 4), st.integers(0, 20), st.integers(1, 40)),
    *(st.sampled_from([0.1, 1.0, 10.0]), st.integers(0, 10**6), st.booleans(), st.booleans(), st.data()),
)
def test_it_does_what_torch_does(
    t: int, b: int, width: int, size: float, seed: int, reverse: bool, to_state: bool, data: st.DataObject
) -> None:
    layer = Given(t, b, width, size, seed, reverse)
    layer.sizes = sorted((data.draw(st.integers(0, b)) for _ in range(t)), reverse=True)
    if data.draw(st.booleans()):
        layer.grad = None
    for _ in range(data.draw(st.integers(0, 3)) if b else 0):
        place = [data.draw(st.integers(0, n - 1)) for n in layer.sums.shape]
        layer.sums[tuple(place)] = data.draw(st.sampled_from(SPECIAL))
    ours, theirs = layer.results(passes(), to_state), layer.results(None, to_state)
    for name, found in ours.items():
        torch.testing.assert_close(found, theirs[name], rtol=1e-4, atol=1e-5 * max(size, 1), equal_nan=True)


@needs_library
@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("b", [1, 2, 7, 16, 150])
def test_every_row_is_computed_however_many_threads_there_are(
    b: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what one thread computes, the last row included."""
    layer = Given(2, b, 9, seed=b)
    monkeypatch.setattr(lstm, "threads", lambda work: 1)
    alone, by_torch = layer.results(passes()), layer.results(None)
    monkeypatch.setattr(lstm, "threads", lambda work: count)
    for name, many in layer.results(passes()).items():
        assert torch.equal(alone[name], many)
        torch.testing.assert_close(many, by_torch[name], rtol=1e-5, atol=2e-6)


@needs_library
def test_no_record_changes_what_another_becomes() -> None:
    """Bit for bit, whatever numbers the other has: in the same tile, in another, and none."""
    layer = Given(3, 70, 20)
    whole = layer.results(passes())
    layer.sums[:, 1], layer.h[2], layer.of_c[66] = math.nan, math.inf, -math.inf
    spoilt = layer.results(passes())
    others = [k for k in range(70) if k not in (1, 2, 66)]
    for name, numbers in whole.items():
        assert torch.equal(numbers[..., others, :], spoilt[name][..., others, :])
    assert spoilt["hidden"][1:, 1].isnan().all()
    for name in ("sums", "h", "c", "grad", "of_h", "of_c"):
        setattr(layer, name, getattr(layer, name)[..., 5:6, :].contiguous())
    layer.sizes = [1] * 3
    for name, numbers in layer.results(passes()).items():
        assert torch.equal(numbers, whole[name][..., 5:6, :])


@needs_library
@pytest.mark.parametrize("t", [1, 12])
def test_it_is_as_exact_as_float32_is(t: int) -> None:
    layer = Given(t, 50, 100)
    layer.sums = torch.linspace(-20, 20, t * 50 * 400).view(50, t, 400).transpose(0, 1).contiguous()
    layer.c = torch.linspace(-3, 3, 5000).view(50, 100)
    found = layer.results(passes())
    assert layer.grad is not None
    leaves = [part.double().requires_grad_() for part in (layer.sums, layer.h, layer.c)]
    sums, h, c = leaves
    outputs = []
    for position in range(t):
        write, forget, value, show = (sums[position] + h @ layer.weights.double().mT).chunk(4, 1)
        c = forget.sigmoid() * c + write.sigmoid() * value.tanh()
        h = show.sigmoid() * c.tanh()
        outputs.append(h)
    grads = torch.autograd.grad(
        [torch.stack(outputs), h, c], leaves, [layer.grad.double(), layer.of_h.double(), layer.of_c.double()]
    )
    assert relative(found["hidden"][1:], torch.stack(outputs)) < 2e-6
    for name, exact in zip(("gates", "h", "c"), grads, strict=True):
        assert relative(found[name], exact) < 2e-6, name


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.detach()).norm() / exact.detach().norm())


@needs_library
@pytest.mark.parametrize(
    "spoil",
    [
        lambda layer: layer.sizes.append(2),
        lambda layer: layer.sizes.__setitem__(0, 3),
        lambda layer: layer.sizes.__setitem__(0, -1),
        lambda layer: setattr(layer, "weights", layer.weights[:-1]),
        lambda layer: setattr(layer, "weights", layer.weights.mT.contiguous().mT),
        lambda layer: setattr(layer, "grad", layer.grad[:, :, :-1]),
        lambda layer: setattr(layer, "grad", layer.grad[:1]),
        lambda layer: setattr(layer, "of_h", layer.of_h[:1]),
        lambda layer: setattr(layer, "of_c", layer.of_c[:, :-1]),
    ],
)
def test_sizes_that_do_not_fit_are_refused(spoil: Callable[[Given], None]) -> None:
    """The compiled code would read and write past the end of a tensor."""
    layer = Given(2, 2, 5)
    layer.results(passes())
    spoil(layer)
    with pytest.raises(ValueError, match=r"fit|without gaps|more records"):
        layer.results(passes())


@pytest.mark.parametrize("name", LSTMS)
def test_without_it_the_engine_agrees_with_the_oracle_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_lstm, "compiled", lambda: None)
    model, batch = PROBLEMS[name].model(), PROBLEMS[name].batch(5)
    fast, slow = (which.clipped_sum(model, losses, batch, "auto-s") for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-4


@pytest.mark.parametrize(
    ("kind", "dtype", "width", "is_it"),
    [
        pytest.param("lstm", torch.float32, 4, True, marks=needs_library),
        pytest.param("lstm", torch.float32, 300, False, id="few records, large weights"),
        ("lstm", torch.float64, 4, False),
        ("gru", torch.float32, 4, False),
    ],
)
def test_it_is_used_where_it_fits(kind: str, dtype: torch.dtype, width: int, is_it: bool) -> None:
    module = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](3, width, dtype=dtype)
    weights = Weights(*(p.detach() for p in module.parameters()), None)  # type: ignore[arg-type]
    state = tuple(torch.zeros(1, 2, width, dtype=dtype) for _ in range(2 if kind == "lstm" else 1))
    result = forward(CELLS[kind], [[weights]], torch.ones(5, 2, 3, dtype=dtype), state, [2] * 5)
    assert (result.traces[0].passes is not None) == is_it

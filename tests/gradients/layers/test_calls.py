"""Every way to call a layer that takes several tensors: all records at once, in slices, one record without a batch
dimension, positions flattened together with the records; by position and by name. Each against single records."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipless
from clipless import oracle
from clipless.preflight import relative_error
from self_checking import self_checked

T, D, H, CLASSES = 3, 4, 5, 3
Batch = tuple[Tensor, Tensor]
# Calls a layer on the tensors of some rows, and returns one tensor.
Call = Callable[[Any, Tensor, Tensor], Tensor]


class Calling(nn.Module):
    """`call(inner, x, h)` with features x and a state h for each row, for all rows or for one after another."""

    def __init__(self, inner: nn.Module, call: Call, rows: str, sequences: bool) -> None:
        super().__init__()
        self.inner, self.call, self.rows, self.sequences = inner, call, rows, sequences
        self.features, self.state = nn.Linear(D, D), nn.Linear(D, H)
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([x, x.flip(1)], 2).flatten(0, 1) if self.rows == "flattened" else x  # [bt,2,d] or [b,t,d]
        x, h = self.features(rows), self.state(rows[:, 1]).tanh()
        if not self.sequences:
            x = x[:, 0]
        return self.head(self.called(x, h).reshape(len(rows) // (T if self.rows == "flattened" else 1), -1))

    def called(self, x: Tensor, h: Tensor) -> Tensor:
        if self.rows == "one by one":
            return torch.stack([self.call(self.inner, x[b], h[b]) for b in range(len(x))])
        if self.rows == "sliced":
            return torch.cat([self.call(self.inner, x[b : b + 1], h[b : b + 1]) for b in range(len(x))])
        return self.call(self.inner, x, h)


ROWS = ("together", "sliced", "one by one", "flattened")


def state_of(inner: nn.Module, h: Tensor) -> Any:
    """The state that the layer takes; one tensor, or two for LSTMs, with a row for each layer of it."""
    if isinstance(inner, nn.RNNBase):
        h = torch.stack([h] * inner.num_layers)
    return (h, h / 2) if isinstance(inner, nn.LSTM | nn.LSTMCell) else h


def joined(output: Any) -> Tensor:
    """The numbers of all outputs of a row next to each other."""
    return torch.cat(output, -1) if isinstance(output, tuple) else output


def cell_call(spelling: str) -> Call:
    def call(inner: Any, x: Tensor, h: Tensor) -> Tensor:
        state = state_of(inner, h)
        if spelling == "by position":
            return joined(inner(x, state))
        if spelling == "mixed":
            return joined(inner(x, hx=state))
        return joined(inner(hx=state, input=x) if spelling == "by name" else inner(x))

    return call


def layer_call(spelling: str) -> Call:
    def call(inner: Any, x: Tensor, h: Tensor) -> Tensor:
        swaps = x.dim() == 3 and not inner.batch_first
        x, state = x.transpose(0, 1) if swaps else x, state_of(inner, h)
        if spelling == "by position":
            output, last = inner(x, state)
        elif spelling == "mixed":
            output, last = inner(x, hx=state)
        else:
            output, last = inner(hx=state, input=x) if spelling == "by name" else inner(x)
        output = output.transpose(0, 1) if swaps else output
        last = last[0] + last[1] if isinstance(last, tuple) else last
        return torch.cat([output.flatten(-2), last.sum(0)], -1)

    return call


def bilinear_call(spelling: str) -> Call:
    def call(inner: Any, x: Tensor, h: Tensor) -> Tensor:
        if spelling == "by position":
            return inner(x, h)
        return inner(x, input2=h) if spelling == "mixed" else inner(input2=h, input1=x)

    return call


def attention_call(spelling: str) -> Call:
    def call(inner: Any, x: Tensor, h: Tensor) -> Tensor:
        other = x.tanh()
        if spelling == "by position":
            return inner(x, other, other)[0]
        if spelling == "mixed":
            return inner(x, value=other, key=other)[0]
        return inner(value=other, key=other, query=x, need_weights=False)[0]

    return call


def bag_call(spelling: str) -> Call:
    """Bags of the same indices for every record, as rows, or in one line with offsets; with weights where they are named."""

    def call(inner: Any, x: Tensor, h: Tensor) -> Tensor:
        indices = (x.detach().abs() * 3).long().clamp(max=6)
        if x.dim() == 1:
            return inner(indices, torch.zeros(1, dtype=torch.long))[0]
        if spelling == "by position":
            return inner(indices)
        line, offsets = indices.flatten(), torch.arange(0, indices.numel(), D)
        if spelling == "mixed":
            return inner(line, offsets=offsets)
        weights = torch.linspace(0.5, 1.5, D).repeat(len(x))
        return inner(per_sample_weights=weights, offsets=offsets, input=line)

    return call


SPELLINGS = ("by position", "mixed", "by name")
CELLS = {kind.__name__: kind for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)}
LAYERS = {kind.__name__: kind for kind in (nn.RNN, nn.GRU, nn.LSTM)}


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], Callable[[str], Call], tuple[str, ...], bool]]:
    """A name, the layer, its call, how that can be written, and whether it takes sequences."""
    for name, cell in CELLS.items():
        yield name, lambda cell=cell: cell(D, H), cell_call, (*SPELLINGS, "without a state"), False
    for name, layer in LAYERS.items():
        for how in ({"batch_first": True}, {"num_layers": 2}):
            made = lambda layer=layer, how=how: layer(D, H, **how)  # noqa: E731
            yield f"{name} {next(iter(how))}", made, layer_call, (*SPELLINGS, "without a state"), True
    yield "Bilinear", lambda: nn.Bilinear(D, H, D), bilinear_call, SPELLINGS, False
    yield "MultiheadAttention", lambda: nn.MultiheadAttention(D, 2, batch_first=True), attention_call, SPELLINGS, True
    yield "EmbeddingBag", lambda: nn.EmbeddingBag(7, D, mode="sum"), bag_call, SPELLINGS, False


CASES = [
    pytest.param(make, call(spelling), rows, sequences, id=f"{name}, {rows}, {spelling}")
    for name, make, call, spellings, sequences in cases()
    for rows in ROWS
    for spelling in spellings
]


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch_of(records: int) -> Batch:
    return torch.randn(records, T, D), torch.arange(records) % CLASSES


def built(make: Callable[[], nn.Module], call: Call, rows: str, sequences: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Calling(make(), call, rows, sequences)
    model(batch_of(2)[0])  # its head learns how many numbers it gets
    return model


@pytest.mark.parametrize(("make", "call", "rows", "sequences"), CASES)
def test_agrees_with_single_records(make: Callable[[], nn.Module], call: Call, rows: str, sequences: bool) -> None:
    """One record, as many as positions, as features, and others."""
    model, how = built(make, call, rows, sequences), clipless.abadi(threshold=0.1)
    for records in (1, T, D, 6):
        batch = batch_of(records)
        fast, slow = (which.clipped_sum(model, losses, batch, how) for which in (clipless, oracle))
        torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-5, atol=1e-6)
        assert relative_error(fast, slow) <= 1e-5


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["RNNCell", "GRUCell", "LSTMCell", "LSTM num_layers", "Bilinear"])
def test_removing_a_record_moves_the_sum_by_the_threshold_at_most(name: str, rows: str) -> None:
    make, call, sequences = next((make, call, long) for case, make, call, _, long in cases() if case == name)
    model, (x, y) = built(make, call("by position"), rows, sequences), batch_of(5)
    x[2] *= 100
    how = clipless.abadi(threshold=0.1)
    whole = clipless.clipped_sum(model, losses, (x, y), how)
    for b in range(5):
        rest = [k for k in range(5) if k != b]
        less = clipless.clipped_sum(model, losses, (x[rest], y[rest]), how)
        moved = sum(float((whole.grads[key] - less.grads[key]).square().sum()) for key in whole.grads) ** 0.5
        assert moved <= 0.1 * (1 + 1e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["GRUCell", "LSTMCell", "LSTM num_layers", "Bilinear", "EmbeddingBag"])
def test_a_run_finds_no_fault(name: str, rows: str) -> None:
    make, call, sequences = next((make, call, long) for case, make, call, _, long in cases() if case == name)
    model, batch = built(make, call("by name"), rows, sequences), batch_of(6)
    found = self_checked(model, losses, batch, 6, per_record=True)
    model.zero_grad()
    losses(model, batch).sum().backward()
    for key, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[key], expected, rtol=1e-4, atol=1e-6)

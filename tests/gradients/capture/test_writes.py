"""Parameters written into other tensors, by index or in place, against the oracle."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipless
from clipless import oracle
from clipless.gradients.capture.writes import by_record
from clipless.preflight import relative_error
from problems import losses

T, D = 4, 6


class Writer(nn.Module):
    """`write(self, x, h)` writes its parameters into h [b,t,d], computed from x, and returns what is used of it."""

    def __init__(self, write: Callable[["Writer", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.write, self.inner, self.head = write, nn.Linear(D, D), nn.Linear(D, 3)
        self.row, self.column = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(T))
        self.matrix, self.number = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.write(self, x, self.inner(x)).tanh().mean(1))


def mask(x: Tensor) -> Tensor:
    return x.sum(2) > 0


def place(x: Tensor) -> Tensor:
    return x.sum((1, 2)).long() % T


def by_mask(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    h[mask(x)] = m.row.to(h.dtype)
    return h


def by_slice(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    h[:, 0] = m.row
    h[..., 1] = m.column
    return h


def by_many_ones(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    h[:, 1] = m.row[None, None, None]
    return h


def everywhere(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    h[:] = m.row
    return h + x


def numbers(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    h[:, 1:3, 2] = m.column[1:3] * m.number
    h[mask(x)] *= m.number
    return h


def by_place(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    h[torch.arange(len(x)), place(x)] = m.row
    h[torch.arange(len(x)), place(x)] += m.row
    return h


def time_major(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    h = h.transpose(0, 1) * 1
    h[0] = m.row
    h[mask(x).T] = m.row * 2
    return h.transpose(0, 1)


def into_data(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    x = x.clone()
    x[mask(x)] = m.row
    return x


def record_by_record(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    for b in range(len(x)):
        h[b, 0] = m.row
    return h


def index_put(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    h.index_put_((mask(x),), m.row)
    return h.index_put_((torch.arange(len(x)), place(x)), m.row, accumulate=True)


def masked_fill(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    return h.masked_fill_(mask(x).unsqueeze(2), m.number)


def fill_and_copy(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    h[:, 1].fill_(m.number)
    h[:, 2].copy_(m.row)
    return h


def scatter(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    return h.scatter_(1, place(x).view(-1, 1, 1).expand(-1, 1, D), m.row.expand(len(x), 1, D))


def index_fill(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    return h.index_fill_(1, torch.tensor([1]), m.number)


def lower_triangle(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    """As the linear layers of normalising flows are built."""
    lower, (i, j) = h.new_zeros(D, D), torch.tril_indices(D, D, -1)
    lower[i, j] = m.matrix[i, j]
    lower[range(D), range(D)] = F.softplus(m.row)
    return F.linear(h, lower)


def row_of_zeros(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    w = h.new_zeros(D, D)
    w[:, 0] = m.row
    w[1] += m.row
    w.diagonal().add_(m.row)
    return h @ w


def into_shared(m: Writer, x: Tensor, h: Tensor) -> Tensor:
    w = m.matrix * 1
    w[1] = m.row
    w[2] = 0.0
    w[3] += m.row
    return h @ w


WRITES = [by_mask, by_slice, by_many_ones, everywhere, numbers, by_place, time_major, into_data, record_by_record]
WRITES += [index_put, masked_fill, fill_and_copy, scatter, index_fill, lower_triangle, row_of_zeros, into_shared]


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_agrees_with_the_oracle(write: Callable[..., Tensor], groups: str) -> None:
    """Also for as many records as positions, T = 4, and as features, D = 6."""
    torch.manual_seed(0)
    model, how = Writer(write), clipless.abadi(groups=groups)
    for records in (0, 1, 2, T, D):
        batch = torch.randn(records, T, D), torch.arange(records) % 3
        fast, slow = (which.clipped_sum(model, losses, batch, how) for which in (clipless, oracle))
        torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-3, atol=1e-6)
        assert relative_error(fast, slow) <= 1e-3


@pytest.mark.parametrize("draw", [lambda shape: torch.rand(shape).numpy(), np.random.random_sample])
@pytest.mark.parametrize("write", ["__setitem__", "index_put_", "masked_fill_"])
def test_places_drawn_at_random_are_those_of_the_forward_pass(draw: Callable[..., np.ndarray], write: str) -> None:
    def at_random(m: Writer, x: Tensor, h: Tensor) -> Tensor:
        chosen = torch.from_numpy(draw(x.shape[:2]) < 0.5)
        if write == "__setitem__":
            h[chosen] = m.row
        elif write == "index_put_":
            h.index_put_((chosen,), m.row)
        else:
            h.masked_fill_(chosen.unsqueeze(2), m.number)
        return h

    torch.manual_seed(0)
    model, batch = Writer(at_random), (torch.randn(5, T, D), torch.arange(5) % 3)
    parameters = dict(model.named_parameters())

    def again() -> Tensor:
        torch.manual_seed(7)
        np.random.seed(7)
        return losses(model, batch)

    rows = [torch.autograd.grad(again()[b], list(parameters.values()), allow_unused=True) for b in range(5)]
    torch.manual_seed(7)
    np.random.seed(7)
    found = clipless.clipped_sum(model, losses, batch, clipless.auto_v())
    for k, (name, parameter) in enumerate(parameters.items()):
        each = [torch.zeros_like(parameter) if row[k] is None else row[k] for row in rows]
        expected = sum(grad / norm for grad, norm in zip(each, found.norms[0], strict=True))
        torch.testing.assert_close(found.grads[name], expected, rtol=1e-4, atol=1e-5)


def test_a_table_written_into_a_tensor_without_records_is_refused_by_name() -> None:
    """The table alone cannot be taken as a whole: what it is called with has no records."""

    class Table(Writer):
        def __init__(self) -> None:
            super().__init__(lambda m, x, h: h)
            self.table = nn.Embedding(T, D)

        def forward(self, x: Tensor) -> Tensor:
            bias = x.new_zeros(T, D)
            bias[1:] = self.table(torch.arange(1, T))
            return self.head((x + bias).tanh().mean(1))

    with pytest.raises(clipless.UnsupportedModule, match="at module 'table'"):
        clipless.clipped_sum(Table(), losses, (torch.randn(5, T, D), torch.arange(5) % 3))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("index", [..., 1, (slice(None), 1), (..., 0), ([0, 2], [1, 0]), torch.eye(3, 3).bool()])
def test_written_numbers_come_from_the_record_they_are_written_to(dim: int, index: object) -> None:
    target = torch.zeros(3, 3, 2)
    copies = torch.arange(1.0, 4.0).view(3, 1, 1).expand(3, 1, 1)
    target[index] = by_record(copies, target, dim, index)
    records = torch.arange(1.0, 4.0).view((3, 1, 1) if dim == 0 else (1, 3, 1)).expand(3, 3, 2)
    written = torch.zeros_like(target, dtype=torch.bool)
    written[index] = True
    torch.testing.assert_close(target, torch.where(written, records, 0.0))

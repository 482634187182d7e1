"""Which records a probe is given, and what stands for the records of an empty batch."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import clipless
from clipless import oracle
from clipless.gradients.capture.layout import signature
from clipless.gradients.capture.stand_ins import stand_in
from clipless.gradients.records import needed_records, readings, resized, unused_sizes
from clipless.preflight import relative_error

T, D = 4, 6


class Biased(nn.Module):
    """A bias for attention that has records only where a mask leaves something out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(T, D), nn.Linear(D, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        bias = self.table(torch.arange(T))
        if not bool(mask.all()):
            bias = bias * mask.unsqueeze(2)
        return self.head((x + bias * 2).tanh().mean(1))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[1]), batch[2], reduction="none")


@pytest.mark.parametrize("kind", [torch.bool, torch.long])
@pytest.mark.parametrize("short", [(), (0,), (2,), (4,), (1, 3), (0, 1, 2, 3, 4)])
def test_a_mask_of_ones_alone_may_be_left_out(short: tuple[int, ...], kind: torch.dtype) -> None:
    torch.manual_seed(0)
    mask = torch.ones(5, T, dtype=kind)
    mask[list(short), 2:] = 0
    batch = torch.randn(5, T, D), mask, torch.arange(5) % 3
    model = Biased()
    fast, slow = (which.clipped_sum(model, losses, batch) for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-4


def test_masks_that_come_and_go_are_learned_each_way() -> None:
    torch.manual_seed(0)
    model = Biased()
    mask = torch.ones(12, T, dtype=torch.long)
    mask[0, 2:] = mask[7, 1:] = 0
    data = torch.utils.data.TensorDataset(torch.randn(12, T, D), mask, torch.arange(12) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = clipless.make_private(
        model,
        optimizer,
        data,
        noise_multiplier=1e-9,
        delta=1e-5,
        batch_size=4,
        steps=8,
        seed=1,
        clipping="abadi",
        loss_reduction="mean",
    )
    seen = set()
    for x, some, y in private.loader:
        F.cross_entropy(model(x, some), y).backward()
        optimizer.step()
        seen.add(bool(some.all()))
        truth = oracle.clipped_sum(copy.deepcopy(model), losses, (x, some, y), "abadi")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad * 4, truth.grads[name], rtol=1e-4, atol=1e-5)
    assert seen == {True, False}
    private.detach()


def test_a_probe_has_every_kind_of_record_of_every_mask() -> None:
    one, other = torch.ones(9, T, dtype=torch.bool), torch.zeros(9, T, dtype=torch.long)
    one[5, 0], other[7, 1] = False, 1
    values, module = (torch.randn(9, T), one, other), nn.Linear(2, 2)
    reading = next(readings(values, 9))
    needed = needed_records(values, reading)
    for size in unused_sizes(values, module, 9, len(needed)):
        _, first, second = resized(values, reading, size, needed)
        assert len(first) == size
        assert not first.all()
        assert first.any()
        assert second.any()
        assert not second.all()
        assert signature(module, (values[0][:size], first, second)) == signature(module, values)


def test_a_stand_in_is_zero_but_where_told() -> None:
    values = torch.randn(0, 2), torch.zeros(0, 2, dtype=torch.long), torch.zeros(2, 0, dtype=torch.bool), torch.ones(3)
    made = stand_in(values, next(readings(values, 0)), 1, True)
    assert [tensor.tolist() for tensor in made] == [[[0, 0]], [[1, 1]], [[True], [True]], [1, 1, 1]]


class Masked(nn.Module):
    """Refuses a mask that leaves the first position out, as conditional random fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not mask[:, 0].all():
            raise ValueError("mask of the first timestep must all be on")
        return self.head((x * mask.unsqueeze(2)).mean(1))


class Packed(nn.Module):
    """Packs by the lengths, which must not be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(D, D, batch_first=True), nn.Linear(D, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, mask[:, 0].cpu(), batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0].sum(1))


@pytest.mark.parametrize(
    ("make", "mask"),
    [
        (Masked, torch.ones(20, T, dtype=torch.bool)),
        (Masked, torch.ones(20, T, dtype=torch.long)),
        (Masked, torch.ones(20, T, dtype=torch.uint8)),
        (Packed, torch.full((20, 1), 3)),
    ],
)
def test_an_empty_batch_is_stepped_where_zeros_are_refused(make: Callable[[], nn.Module], mask: Tensor) -> None:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(20, T, D), mask, torch.arange(20) % 3)
    private = clipless.make_private(
        model, optimizer, data, noise_multiplier=1.0, batch_size=1, steps=8, seed=2, loss_reduction="mean"
    )
    sizes = []
    for x, some, y in private.loader:
        state = torch.get_rng_state()
        output = model(x, some)
        assert torch.equal(torch.get_rng_state(), state)
        assert output.shape == (len(x), 3)
        F.cross_entropy(output, y).backward()
        optimizer.step()
        sizes.append(len(x))
    assert 0 in sizes
    private.detach()


def test_a_model_that_takes_no_stand_in_shows_its_own_error() -> None:
    class Never(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            if not x.any():
                raise ValueError("an empty picture")
            return self.head(x.mean(1))

    model = Never()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(20, T, D), torch.ones(20, T).bool(), torch.arange(20) % 3)
    private = clipless.make_private(
        model, optimizer, data, noise_multiplier=1.0, batch_size=1, steps=8, seed=2, loss_reduction="mean"
    )

    def train() -> None:
        for x, mask, y in private.loader:
            F.cross_entropy(model(x, mask), y).backward()
            optimizer.step()

    with pytest.raises(ValueError, match="an empty picture"):
        train()
    private.detach()

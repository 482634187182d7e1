"""Packed sequences against the oracle: records of different lengths, sorted or not."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import clipless
from clipless import oracle
from clipless.clipping import CLIPPINGS
from clipless.preflight import relative_error
from problems import CLASSES, losses
from self_checking import MODES, self_checked

KINDS = {
    "rnn": lambda **k: nn.RNN(5, 4, **k),
    "lstm": lambda **k: nn.LSTM(5, 4, **k),
    "gru": lambda **k: nn.GRU(5, 4, **k),
    "lstm-projected": lambda **k: nn.LSTM(5, 4, proj_size=2, **k),
}
VARIANTS = {"plain": {}, "batch-first": {"batch_first": True}, "deep-two-way": {"num_layers": 2, "bidirectional": True}}

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


class Packing(nn.Module):
    """Packs x [b,t,3] by its lengths [b]; looks at the padded output and at the final states."""

    def __init__(self, layer: nn.RNNBase, enforce_sorted: bool = False, total: bool = False) -> None:
        super().__init__()
        self.first, self.layer, self.enforce_sorted, self.total = nn.Linear(3, 5), layer, enforce_sorted, total
        pattern, width = 2 if layer.bidirectional else 1, layer.proj_size or layer.hidden_size
        self.each, self.head = nn.Linear(width * pattern, 3), nn.Linear(3 + layer.num_layers * pattern * width, CLASSES)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, lengths = inputs
        packed = pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=self.enforce_sorted)
        output, state = self.layer(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1] if self.total else None)
        there = torch.arange(padded.shape[1]) < lengths.unsqueeze(1)
        read = (self.each(padded).tanh() * there.unsqueeze(2)).sum(1)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.head(torch.cat([read, hidden.transpose(0, 1).flatten(1)], 1))


def batch_of(lengths: list[int]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(len(lengths))
    b = len(lengths)
    return (torch.randn(b, 6, 3), torch.tensor(lengths, dtype=torch.int64)), torch.arange(b) % CLASSES


LENGTHS = [[], [4], [2, 5], [1, 6, 3, 3, 5, 2, 4], [1, 1, 1]]


@pytest.mark.parametrize(
    ("groups", "total"), [("flat", False), ("per-layer", True)], ids=["flat-longest", "per-layer-total-length"]
)
@pytest.mark.parametrize("enforce_sorted", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_packed_sequences_agree_with_the_oracle(
    kind: Callable[..., nn.RNNBase], variant: dict[str, object], groups: str, enforce_sorted: bool, total: bool
) -> None:
    torch.manual_seed(0)
    model, how = Packing(kind(**variant), enforce_sorted, total), CLIPPINGS["auto-s"](groups=groups)
    for lengths in LENGTHS:
        batch = batch_of(sorted(lengths, reverse=True) if enforce_sorted else lengths)
        fast, slow = (which.clipped_sum(model, losses, batch, how) for which in (clipless, oracle))
        torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-4, atol=1e-7)
        assert relative_error(fast, slow) <= 1e-4


@pytest.mark.parametrize("enforce_sorted", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_run_finds_no_fault_with_them(
    kind: Callable[..., nn.RNNBase], variant: dict[str, object], enforce_sorted: bool
) -> None:
    torch.manual_seed(0)
    model = Packing(kind(**variant), enforce_sorted, True)
    for lengths in filter(None, LENGTHS):
        batch = batch_of(sorted(lengths, reverse=True) if enforce_sorted else lengths)
        for per_record in MODES.values():
            assert self_checked(model, losses, batch, len(lengths), per_record)


def test_initial_states_go_with_their_records() -> None:
    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(3, CLASSES), nn.GRU(3, CLASSES)

        def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
            x, lengths = inputs
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.layer(packed, self.first(x.mean(1)).tanh().unsqueeze(0))[1][0]

    model, batch = Started(), batch_of([1, 6, 3, 3, 5, 2, 4])
    fast, slow = (which.clipped_sum(model, losses, batch, "abadi") for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-4


def test_a_non_finite_record_contributes_nothing_and_changes_nothing() -> None:
    model = Packing(nn.LSTM(5, 4, num_layers=2, bidirectional=True))
    (x, lengths), y = batch_of([2, 6, 3, 4])
    clean = clipless.clipped_sum(model, losses, ((x[1:], lengths[1:]), y[1:]))
    x[0, 1] = torch.nan
    dirty = clipless.clipped_sum(model, losses, ((x, lengths), y))
    for key, grad in dirty.grads.items():
        torch.testing.assert_close(grad, clean.grads[key], rtol=1e-5, atol=1e-6)


def test_what_lies_beyond_a_records_end_does_not_matter() -> None:
    model = Packing(nn.LSTM(5, 4, bidirectional=True))
    (x, lengths), y = batch_of([2, 6, 3, 4])
    before = clipless.clipped_sum(model, losses, ((x, lengths), y))
    x[0, 2:] = 1e6
    after = clipless.clipped_sum(model, losses, ((x, lengths), y))
    for key, grad in after.grads.items():
        torch.testing.assert_close(grad, before.grads[key])


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_nothing_is_read_that_was_not_written(kind: Callable[..., nn.RNNBase]) -> None:
    torch.manual_seed(0)
    assert torch.empty(3).isnan().all()
    model, batch = Packing(kind(num_layers=2, bidirectional=True)), batch_of([1, 6, 3, 3, 5, 2, 4])
    fast, slow = (which.clipped_sum(model, losses, batch) for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-4


class Inside(nn.Module):
    """Packs its input and hands it to a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed), True)[0].sum(1)


class OnData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return packed._replace(data=packed.data * self.scale)


class LinearOnData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return packed._replace(data=self.inner(packed.data))


@pytest.mark.parametrize("lengths", [(4, 4, 4, 4, 4), (2, 4, 1, 3, 4)], ids=["equal", "unequal"])
@pytest.mark.parametrize("layer", [OnData, LinearOnData])
def test_other_layers_on_packed_data_agree_with_single_records(
    layer: type[nn.Module], lengths: tuple[int, ...]
) -> None:
    """Rows are in the order of the positions, and some records have more of them than others."""

    def inside(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[2]), batch[1], reduction="none")

    torch.manual_seed(0)
    batch = torch.randn(5, 4, 3), torch.arange(5) % CLASSES, torch.tensor(lengths)
    model = Inside(layer())
    fast, slow = (which.clipped_sum(model, inside, batch) for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-4


def test_a_packed_batch_is_refused_with_the_remedy() -> None:
    def loss(layer: nn.Module, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        return layer(pack_padded_sequence(x, lengths, batch_first=True))[1][0].sum(1)

    with pytest.raises(clipless.UnsupportedModule, match="pack them in its forward"):
        clipless.clipped_sum(nn.GRU(3, 2), loss, torch.randn(4, 5, 3))

"""Parameters that are used outside their module's forward, in the rest of the model."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipless
from clipless import oracle
from clipless.preflight import relative_error
from self_checking import MODES, self_checked

T, D, CLASSES = 3, 4, 3


class Borrowed(nn.Module):
    """A layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, D), nn.Linear(T * D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.inner.weight, self.inner.bias).tanh().flatten(1))


class Tied(nn.Module):
    """A layer that is called, and whose weight is used once more, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, 5), nn.Linear(T * D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.inner(x).tanh() @ self.inner.weight).flatten(1))


class TiedTable(nn.Module):
    """An embedding that is the output head as well, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, D)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.table((x[:, :, 0] > 0).long()).sum(1) + x.sum(1), self.table.weight)


class Joined(nn.Module):
    """Biases of several layers put together, as in BEiT."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(D, 3 * D, bias=False), nn.Linear(3 * T * D, CLASSES)
        self.q, self.v = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.register_buffer("k", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.q, self.k, self.v])
        return self.head(F.linear(x, self.qkv.weight, bias).tanh().flatten(1))


class Flattened(nn.Module):
    """Both at once: another layer's weight, on rows that are not the records."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, D), nn.Linear(T * D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.linear(x.transpose(0, 1).flatten(0, 1), self.inner.weight)
        return self.head(rows.unflatten(0, (T, len(x))).transpose(0, 1).flatten(1))


class OldWeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.utils.weight_norm(nn.Conv1d(T, T, 3, padding=1))
        self.inner = torch.nn.utils.weight_norm(nn.Linear(D, D))
        self.head = nn.Linear(T * D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.conv(x).tanh()).flatten(1))


class Bags(nn.Module):
    """Bags of any length in one line."""

    def __init__(self, mode: str, last: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(7, D, mode=mode, include_last_offset=last, padding_idx=3)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        indices = (x.flatten(1) * 3).abs().long() % 7
        starts = torch.arange(len(x) + self.table.include_last_offset) * indices.shape[1]
        return self.head(self.table(indices.flatten(), starts))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "borrowed": Borrowed,
    "tied": Tied,
    "tied table": TiedTable,
    "joined": Joined,
    "flattened": Flattened,
    "old weight norm": OldWeightNorm,
    **{
        f"bags, {mode}, {last}": lambda mode=mode, last=last: Bags(mode, last)
        for mode in ("sum", "mean", "max")
        for last in (False, True)
    },
}


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch_of(records: int) -> tuple[Tensor, Tensor]:
    return torch.randn(records, T, D), torch.arange(records) % CLASSES


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_single_records(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    for records in (1, 4, 7):
        for groups in ("flat", "per-layer"):
            how, batch = clipless.abadi(groups=groups, threshold=0.1), batch_of(records)
            fast, slow = (which.clipped_sum(model, losses, batch, how) for which in (clipless, oracle))
            torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-3, atol=1e-5)
            assert relative_error(fast, slow) <= 1e-3
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("per_record", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_run_finds_no_fault_with_it(name: str, per_record: bool) -> None:
    torch.manual_seed(1)
    assert self_checked(MODELS[name](), losses, batch_of(6), 6, per_record)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("seed", [35, 5], ids=["empty first", "empty later"])
@pytest.mark.parametrize("name", MODELS)
def test_private_steps_with_empty_batches(name: str, seed: int) -> None:
    torch.manual_seed(2)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(*batch_of(3))
    private = clipless.make_private(
        model, optimizer, data, noise_multiplier=1.0, delta=1e-5, batch_size=2, steps=5, seed=seed
    )
    sizes = []
    for x, y in private.loader:
        sizes.append(len(x))
        optimizer.zero_grad()
        private.backward(losses(model, (x, y)))
        optimizer.step()
    private.detach()
    assert 0 in sizes
    assert private.ledger.steps == 5
    assert all(parameter.requires_grad for parameter in model.parameters())

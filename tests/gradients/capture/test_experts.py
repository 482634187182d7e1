"""Mixtures of experts written by hand: which expert takes a record, and how many it gets, must decide nothing else."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless import oracle
from clipless.clipped import ClippedSum
from clipless.gradients import Engine, Kernels
from clipless.partition import partition
from clipless.preflight import relative_error
from self_checking import self_checked

D, CLASSES, EXPERTS = 4, 3, 4
Routing = Callable[["Mixture", Tensor, Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


class Mixture(nn.Module):
    """Column 0 of a record, if it is not negative, names its first expert; otherwise a linear gate chooses."""

    def __init__(self, routing: Routing, top: int, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(D, EXPERTS), nn.Linear(D, CLASSES)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))
        self.routing, self.top = routing, top

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(1)
        named = F.one_hot(x[:, 0].long().clamp(min=0), EXPERTS) * 2.0
        chosen = (p.detach() + named * (x[:, :1] >= 0)).topk(self.top, dim=1).indices
        return self.head(x + self.routing(self, x, p, chosen))


class Own(nn.Module):
    """An expert with parameters in no known layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias)


class Branches(nn.Module):
    """As `Own`; its operations depend on the data, in place, so that it is taken as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for k, row in enumerate(x):
            out[k] = row @ self.weight if float(row.detach().sum()) > 0 else row - self.weight[0]
        return out


def added(self: Mixture, x: Tensor, p: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for i in range(self.top):
        for k, expert in enumerate(self.experts):
            j = (chosen[:, i] == k).nonzero()[:, 0]
            y = y.index_add(0, j, expert(x[j]) * p[j, k, None])
    return y


def skipping(self: Mixture, x: Tensor, p: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for k, expert in enumerate(self.experts):
        j, _ = torch.where(chosen == k)
        if j.numel() > 0:
            y = y.index_add(0, j, expert(x[j]) * p[j, k].unsqueeze(1))
    return y


def masked(self: Mixture, x: Tensor, p: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for k, expert in enumerate(self.experts):
        mask = (chosen == k).any(1)
        if mask.any():
            y[mask] = y[mask] + expert(x[mask]) * p[mask, k].unsqueeze(1)
    return y


def in_order_of_experts(self: Mixture, x: Tensor, p: Tensor, chosen: Tensor) -> Tensor:
    """Sorted so that records with the same expert come in descending order, and split by counts."""
    flat, source = chosen.flatten(), torch.arange(len(x)).repeat_interleave(self.top)
    order = (flat * len(flat) - torch.arange(len(flat))).argsort()
    rows, counts = source[order], flat.bincount(minlength=EXPERTS).tolist()
    parts = [expert(part) for expert, part in zip(self.experts, x[rows].split(counts), strict=True) if len(part)]
    return torch.zeros_like(x).index_add(0, rows, torch.cat(parts) * p[rows, flat[order]].unsqueeze(1))


def one_after_another(self: Mixture, x: Tensor, p: Tensor, chosen: Tensor) -> Tensor:
    rows = []
    for b, own in enumerate(chosen.tolist()):
        rows.append(torch.stack([self.experts[k](x[b : b + 1])[0] * p[b, k] for k in own]).sum(0))
    return torch.stack(rows)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, D))


ROUTINGS = {
    "added": added,
    "skipping": skipping,
    "masked": masked,
    "sorted": in_order_of_experts,
    "one by one": one_after_another,
}
KINDS = {"mlp": mlp, "own": Own, "branches": Branches}
HOW = clipless.abadi(threshold=0.1)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch_of(records: int, first: Callable[[int], int] | None = None) -> Batch:
    """`first(b)` is the first expert of record b; without it the gate chooses."""
    x = torch.randn(records, D)
    x[:, 0] = -1.0 if first is None else torch.tensor([float(first(b)) for b in range(records)])
    return x, torch.arange(records) % CLASSES


def agrees(model: nn.Module, batch: Batch) -> None:
    fast, slow = (which.clipped_sum(model, losses, batch, HOW) for which in (clipless, oracle))
    torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-5, atol=1e-6)
    assert relative_error(fast, slow) <= 1e-5


FIRST: tuple[Callable[[int], int] | None, ...] = (
    *(lambda b: 0, lambda b: 3, lambda b: int(b == 0), lambda b: 2 * int(b > 0)),
    None,
)


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize(
    ("name", "kind"), [(name, "mlp") for name in ROUTINGS] + [("added", "own"), ("skipping", "own")]
)
def test_agrees_with_single_records_for_every_division_among_the_experts(name: str, kind: str, top: int) -> None:
    """An expert gets no record, one, all, all but one; then the gate chooses."""
    for records in (1, 2, 3, 4, 7, 33):
        for number, first in enumerate(FIRST):
            torch.manual_seed(records + 100 * number)
            agrees(Mixture(ROUTINGS[name], top, KINDS[kind]), batch_of(records, first))


@pytest.mark.parametrize("kind", ["own", "branches"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_without_a_rule(name: str, kind: str) -> None:
    for records, first in ((1, FIRST[0]), (3, FIRST[1]), (3, FIRST[2]), (4, FIRST[3]), (5, None)):
        torch.manual_seed(records)
        agrees(Mixture(ROUTINGS[name], 2, KINDS[kind]), batch_of(records, first))


class Literal(nn.Module):
    """As people write it."""

    def __init__(self, top: int) -> None:
        super().__init__()
        self.gate, self.top = nn.Linear(D, EXPERTS), top
        self.experts = nn.ModuleList(mlp() for _ in range(EXPERTS))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        y = torch.zeros_like(x)
        for i in p.topk(self.top, -1).indices.unbind(1):
            for k, e in enumerate(self.experts):
                j = (i == k).nonzero()[:, 0]
                y = y.index_add(0, j, e(x[j]) * p[j, k, None])
        return self.head(y)


@pytest.mark.parametrize("top", [1, 2])
def test_forty_seeds_agree_and_train(top: int) -> None:
    """Neither chance nor the number of records decides."""
    for seed in range(40):
        torch.manual_seed(seed)
        model, records = Literal(top), seed % 33 + 1
        agrees(model, batch_of(records))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        private = clipless.make_private(
            model, optimizer, TensorDataset(*batch_of(40)), noise_multiplier=1.0, batch_size=1 + seed % 8, steps=5
        )
        for batch in private.loader:
            private.step(losses, batch)
        assert private.spent().steps == 5


@pytest.mark.parametrize("name", ROUTINGS)
def test_what_one_batch_taught_holds_for_the_next(name: str) -> None:
    """Whatever division the first batch has, sums and norms of all others are those of single records."""
    for begin in range(len(FIRST)):
        torch.manual_seed(begin)
        model = Mixture(ROUTINGS[name], 1, mlp)
        norms: list[Tensor] = []
        engine = Engine(model, partition("flat", dict(model.named_parameters())), once, norms.append, Kernels(), True)
        engine.attach()
        for number in range(begin, begin + len(FIRST) + 2):
            batch = batch_of(2 + number, FIRST[number % len(FIRST)])
            engine.clear()
            engine.open(2 + number, averaged=None)
            engine.run(losses, batch, None)
            engine.refuse_unsound()
            slow = oracle.clipped_sum(copy.deepcopy(model), losses, batch, clipless.abadi(threshold=1e9))
            torch.testing.assert_close(norms[-1], slow.norms, rtol=1e-5, atol=1e-6)
            assert relative_error(ClippedSum(engine.complete(), norms[-1]), slow) <= 1e-5
        engine.detach()


def once(norms: Tensor, groups: Sequence[int]) -> Tensor:
    return torch.ones_like(norms)


@pytest.mark.parametrize("name", ROUTINGS)
def test_removing_a_record_moves_the_sum_by_the_threshold_at_most(name: str) -> None:
    torch.manual_seed(1)
    model, (x, y) = Mixture(ROUTINGS[name], 2, mlp), batch_of(5)
    x[2, 1:] *= 100
    whole = clipless.clipped_sum(model, losses, (x, y), HOW)
    for b in range(5):
        rest = [k for k in range(5) if k != b]
        less = clipless.clipped_sum(model, losses, (x[rest], y[rest]), HOW)
        moved = sum(float((whole.grads[key] - less.grads[key]).square().sum()) for key in whole.grads) ** 0.5
        assert moved <= 0.1 * (1 + 1e-5)


def test_experts_that_see_each_other_are_refused() -> None:
    """An expert's rows are centred among themselves."""

    def centred(self: Mixture, x: Tensor, p: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            j = (chosen[:, 0] == k).nonzero()[:, 0]
            out = expert(x[j])
            y = y.index_add(0, j, out - out.mean(0))
        return y

    torch.manual_seed(2)
    model = Mixture(centred, 1, mlp)
    with pytest.raises(clipless.UnsupportedModule, match="another|depends on"):
        self_checked(model, losses, batch_of(9), 9, per_record=True)

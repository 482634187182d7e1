"""Rows that are not the records: flattened, in windows, routed, one record at a time, in any order."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clipless
from clipless import oracle
from clipless.preflight import relative_error
from self_checking import MODES, self_checked

T, D, CLASSES = 3, 4, 3
Body = Callable[["Rows", Tensor], Tensor]


class Rows(nn.Module):
    """Something between [b,t,d] and the logits, in which rows are not the records."""

    def __init__(self, body: Body, **parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.head, self.body = nn.ModuleDict(parts), nn.Linear(T * D, CLASSES), body

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self, x).reshape(len(x), -1))

    def __getattr__(self, name: str) -> nn.Module:
        parts = self.__dict__["_modules"].get("parts")
        return parts[name] if parts is not None and name in parts else super().__getattr__(name)


class Scale(nn.Module):
    """Parameters in no known layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.rand(D)), nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale @ self.weight


class Branching(nn.Module):
    """Data decide on the operations, in place, so that it can only be taken as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for k, row in enumerate(x):
            out[k] = row * self.scale if float(row.detach().sum()) > 0 else row - self.scale
        return out


class Experts(nn.Module):
    """Every row goes to the expert of its largest feature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D, D))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = x.detach().argmax(1), torch.zeros_like(x)
        for expert in chosen.unique():
            (rows,) = torch.where(chosen == expert)
            out = out.index_add(0, rows, F.linear(x[rows], self.weight[expert]).to(x.dtype))
        return out


def flat(self: Rows, x: Tensor) -> Tensor:
    return self.inner(x.flatten(0, 1)).tanh()


def interleaved(self: Rows, x: Tensor) -> Tensor:
    return self.inner(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (T, len(x))).transpose(0, 1)


def one_by_one(self: Rows, x: Tensor) -> Tensor:
    return torch.stack([self.inner(record) for record in x]).tanh()


def single_rows(self: Rows, x: Tensor) -> Tensor:
    return torch.stack([self.inner(row) for row in x.flatten(0, 1)]).tanh()


def reversed_rows(self: Rows, x: Tensor) -> Tensor:
    return self.inner(x.flatten(0, 1).flip(0)).flip(0)


def routed(self: Rows, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    (chosen,) = torch.where(rows.detach()[:, 0] > 0)
    chosen = chosen[rows.detach()[chosen, 1].argsort()]
    return rows.index_add(0, chosen, self.inner(rows[chosen]).to(rows.dtype))


def masked(self: Rows, x: Tensor) -> Tensor:
    chosen = x.detach().sum(2) > 0
    out = x.clone()
    out[chosen] = self.inner(x[chosen]).to(out.dtype)
    return out


def images(self: Rows, x: Tensor) -> Tensor:
    return self.inner(x.flatten(0, 1).view(-1, 1, 2, 2))


def single_images(self: Rows, x: Tensor) -> Tensor:
    return torch.stack([self.inner(record.view(T, 2, 2)) for record in x])


def windows(self: Rows, x: Tensor) -> Tensor:
    return self.inner(x.flatten(0, 1).view(-1, 2, 2))[0]


def checkpointed(self: Rows, x: Tensor) -> Tensor:
    return checkpoint(lambda h: self.inner(h.flatten(0, 1)).tanh(), self.first(x), use_reentrant=False)


def tokens(self: Rows, x: Tensor) -> Tensor:
    return self.inner((x.flatten(0, 1) > 0).long().sum(1))


MODELS: dict[str, Callable[[], Rows]] = {
    "linear": lambda: Rows(flat, inner=nn.Linear(D, D)),
    "layer norm": lambda: Rows(flat, inner=nn.LayerNorm(D)),
    "prelu": lambda: Rows(flat, inner=nn.PReLU(D)),
    "embedding": lambda: Rows(tokens, inner=nn.Embedding(D + 1, D)),
    "operations": lambda: Rows(flat, inner=Scale()),
    "as a whole": lambda: Rows(flat, inner=Branching()),
    "experts": lambda: Rows(flat, inner=Experts()),
    "weight norm": lambda: Rows(flat, inner=nn.utils.parametrizations.weight_norm(nn.Linear(D, D))),
    "interleaved": lambda: Rows(interleaved, inner=nn.Linear(D, D)),
    "interleaved operations": lambda: Rows(interleaved, inner=Scale()),
    "one by one": lambda: Rows(one_by_one, inner=nn.Linear(D, D)),
    "norm one by one": lambda: Rows(one_by_one, inner=nn.LayerNorm((T, D))),
    "single rows": lambda: Rows(single_rows, inner=nn.Linear(D, D)),
    "reversed": lambda: Rows(reversed_rows, inner=nn.Linear(D, D)),
    "routed": lambda: Rows(routed, inner=nn.Linear(D, D)),
    "masked": lambda: Rows(masked, inner=nn.Linear(D, D)),
    "convolution": lambda: Rows(images, inner=nn.Conv2d(1, 1, 3, padding=1)),
    "group norm": lambda: Rows(images, inner=nn.Sequential(nn.Conv2d(1, 2, 1), nn.GroupNorm(1, 2), nn.Conv2d(2, 1, 1))),
    "convolution one by one": lambda: Rows(single_images, inner=nn.Conv2d(T, T, 3, padding=1)),
    "lstm": lambda: Rows(windows, inner=nn.LSTM(2, 2, batch_first=True)),
    "gru, time first": lambda: Rows(
        lambda self, x: self.inner(x.flatten(0, 1).view(-1, 2, 2).transpose(0, 1))[0].transpose(0, 1),
        inner=nn.GRU(2, 2),
    ),
    "checkpoint": lambda: Rows(checkpointed, first=nn.Linear(D, D), inner=nn.Linear(D, D)),
}


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch_of(records: int) -> tuple[Tensor, Tensor]:
    return torch.randn(records, T, D), torch.arange(records) % CLASSES


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_single_records(name: str) -> None:
    """For one record, for as many as positions, for more than one pass of seeds can tell apart; groups of one and of all."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for records, groups in (
        (1, "per-layer"),
        (2, "flat"),
        (T, "flat"),
        (T, "per-layer"),
        (7, "per-layer"),
        (40, "flat"),
    ):
        torch.manual_seed(records)  # not a batch in which by chance as many rows are chosen as there are records
        how, batch = clipless.abadi(groups=groups, threshold=0.1), batch_of(records)
        fast, slow = (which.clipped_sum(model, losses, batch, how) for which in (clipless, oracle))
        torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-3, atol=1e-5)
        assert relative_error(fast, slow) <= 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_removing_a_record_moves_the_sum_by_its_share_at_most(name: str) -> None:
    torch.manual_seed(1)
    model, (x, y) = MODELS[name](), batch_of(5)
    x[2] *= 100
    how = clipless.abadi(threshold=0.1)
    whole = clipless.clipped_sum(model, losses, (x, y), how)
    for b in range(5):
        rest = [k for k in range(5) if k != b]
        less = clipless.clipped_sum(model, losses, (x[rest], y[rest]), how)
        moved = sum(float((whole.grads[key] - less.grads[key]).square().sum()) for key in whole.grads) ** 0.5
        assert moved <= 0.1 * (1 + 1e-4)


@pytest.mark.parametrize("per_record", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_run_finds_no_fault_with_it(name: str, per_record: bool) -> None:
    torch.manual_seed(2)
    model, batch = MODELS[name](), batch_of(6)
    found = self_checked(model, losses, batch, 6, per_record)
    model.zero_grad()
    losses(model, batch).sum().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "experts", "operations", "routed", "convolution"])
def test_under_autocast(name: str) -> None:
    torch.manual_seed(3)
    model, batch = MODELS[name](), batch_of(6)

    def half(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[0])
        return F.cross_entropy(logits.float(), batch[1], reduction="none")

    fast, slow = (which.clipped_sum(model, half, batch) for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 5e-2
    assert self_checked(model, half, batch, 6, per_record=True)


def test_a_record_that_is_not_finite_adds_nothing() -> None:
    torch.manual_seed(4)
    model, (x, y) = MODELS["linear"](), batch_of(5)
    x[3, 1, 0] = torch.nan
    rest = [0, 1, 2, 4]
    for groups in ("flat", "per-layer"):
        broken = clipless.clipped_sum(model, losses, (x, y), clipless.abadi(groups=groups))
        less = clipless.clipped_sum(model, losses, (x[rest], y[rest]), clipless.abadi(groups=groups))
        for key, grad in less.grads.items():
            torch.testing.assert_close(broken.grads[key], grad)


class Mixing(nn.Module):
    """Rows of flattened records: each holds two records, or meets its neighbour afterwards."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.head, self.how = nn.Linear(2 * D if how == "pairs" else D, D), nn.Linear(T * D, CLASSES), how

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        if self.how == "pairs":
            rows = torch.cat([rows, rows.roll(T, 0)], 1)
        if self.how == "average":
            return self.head((self.inner(rows) + self.inner(rows).mean(0)).view(len(x), -1))
        if self.how == "neighbour":
            return self.head((rows + self.inner(rows).roll(1, 0)).view(len(x), -1))
        return self.head(self.inner(rows).view(len(x), -1))


@pytest.mark.parametrize("per_record", MODES.values(), ids=MODES)
@pytest.mark.parametrize("how", ["pairs", "average", "neighbour"])
def test_records_that_meet_are_refused(how: str, per_record: bool) -> None:
    """By the seeds where a gradient shows it, else because outputs change with other records."""
    torch.manual_seed(5)
    with pytest.raises(clipless.CliplessError, match="another|depends on the other records"):
        self_checked(Mixing(how), losses, batch_of(6), 6, per_record)


def test_flattened_outputs_need_one_loss_per_record() -> None:
    """From rows in an order that nothing tells, a sum of losses cannot be taken apart."""

    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(D, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(0, 1).flatten(0, 1))

    def spread(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0]).unflatten(0, (T, len(batch[0]))).sum(0)
        return F.cross_entropy(logits, batch[1], reduction="none")

    torch.manual_seed(6)
    model, batch = Flattened(), batch_of(6)
    with pytest.raises(clipless.Misuse, match="not in the order of the records. Compute one loss per record"):
        self_checked(model, spread, batch, 6, per_record=False)
    found = self_checked(model, spread, batch, 6, per_record=True)
    spread(model, batch).sum().backward()
    torch.testing.assert_close(found["inner.weight"], model.inner.weight.grad)


def test_a_model_that_returns_its_loss_is_refused_with_the_remedy() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MODELS["linear"]()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.inner(x), y, reduction="sum")

    with pytest.raises(clipless.CliplessError, match="one loss per record"):
        self_checked(Loss(), lambda model, batch: model(*batch), batch_of(6), 6, per_record=False)


@pytest.mark.parametrize("name", ["linear", "experts", "operations", "routed", "lstm"])
def test_private_steps_with_empty_and_full_batches(name: str) -> None:
    """Micro-batches of two give what one batch gives, with the same noise."""
    sums = []
    for micro in (False, True):
        torch.manual_seed(7)
        model, data = MODELS[name](), torch.utils.data.TensorDataset(*batch_of(12))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = clipless.make_private(
            model, optimizer, data, noise_multiplier=1.0, batch_size=3, steps=6, seed=3, loss_reduction="mean"
        )
        sizes = []
        for parts in private.loader.microbatches(2) if micro else ([batch] for batch in private.loader):
            optimizer.zero_grad()
            sizes.append(0)
            for part in parts:
                private.backward(losses(model, part))
                sizes[-1] += len(part[1])
            optimizer.step()
        private.detach()
        sums.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert len(set(sizes)) > 1
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)

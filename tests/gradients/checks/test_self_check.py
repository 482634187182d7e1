"""A run checks itself on the user's own model, loss and batch: no false alarm on anything that keeps its records apart, and
every mixing, every lost gradient found before anything is released."""

import copy
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import clipless
from clipless import CliplessError, Misuse, UnsupportedModule
from clipless.gradients.checks.records import Trial
from clipless.gradients.checks.seeds import IMPURE, impurity, named_records, seed_passes, sketch
from clipless.gradients.checks.self_check import CheckSchedule
from clipless.gradients.forms import Form, Instantiated
from problems import PROBLEMS, Problem, losses
from self_checking import self_checked

RECORDS, CLASSES = 6, 3


def run(
    model: nn.Module,
    data: tuple[Tensor, ...],
    *,
    per_record: bool,
    steps: int = 2,
    batch_size: int | None = None,
    context: Callable[[], Any] = torch.enable_grad,
    losses: Callable[[Tensor, Tensor], Tensor] = lambda out, y: F.cross_entropy(out, y, reduction="none"),
    clipping: Any = "auto-s",
) -> clipless.Private:
    """Some steps with all records in every batch, by `private.backward` or by `loss.backward()` on the sum."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    size = len(data[0])
    private = clipless.make_private(
        model, optimizer, TensorDataset(*data), noise_multiplier=1.0, delta=1e-5, accountant="rdp", steps=steps, seed=1,
        batch_size=batch_size or size, loss_reduction="sum", clipping=clipping,
    )  # fmt: skip
    try:
        for x, y in private.loader:
            optimizer.zero_grad()
            with context():
                found = losses(model(x), y)
            private.backward(found) if per_record else found.sum().backward()
            optimizer.step()
    finally:
        private.detach()
    return private


MODES = pytest.mark.parametrize("per_record", [True, False], ids=["losses", "loss"])


@MODES
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_false_alarm(name: str, per_record: bool) -> None:
    problem = PROBLEMS[name]
    assert run(problem.model(), problem.batch(RECORDS), per_record=per_record).ledger.steps == 2


class Recomputed(nn.Module):
    """A checkpointed model with a layer after it."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.last, self.reentrant = inner, nn.Linear(CLASSES, CLASSES), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point() and self.reentrant:
            x = x.detach().requires_grad_()
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


OFTEN_USED = [
    "linear-2d",
    "linear-3d-ghost",
    "conv2d",
    "embedding",
    "layer-norm-3d",
    "generic-own-and-child",
    "reused-linear",
]
SETTINGS: dict[str, tuple[Callable[[Problem], nn.Module], Callable[[], Any], int]] = {
    "autocast": (Problem.model, autocast, RECORDS),
    "dropout": (lambda p: nn.Sequential(p.model(), nn.Dropout(0.5), nn.Linear(3, 3)), torch.enable_grad, RECORDS),
    "checkpoint": (lambda p: Recomputed(p.model(), False), torch.enable_grad, RECORDS),
    "checkpoint-reentrant": (lambda p: Recomputed(p.model(), True), torch.enable_grad, RECORDS),
    "one record": (Problem.model, torch.enable_grad, 1),
    "many records": (Problem.model, torch.enable_grad, 70),
}


# Reentrant checkpoints need an input with a gradient, and hide operations on bare parameters.
UNSUPPORTED = [(name, "checkpoint-reentrant") for name in ("embedding", "generic-own-and-child")]


@MODES
@pytest.mark.parametrize(
    ("name", "setting"), [pair for pair in product(OFTEN_USED, SETTINGS) if pair not in UNSUPPORTED]
)
def test_no_false_alarm_in_other_settings(name: str, setting: str, per_record: bool) -> None:
    make, context, records = SETTINGS[setting]
    model, data = make(PROBLEMS[name]), PROBLEMS[name].batch(records)
    assert run(model, data, per_record=per_record, context=context).ledger.steps == 2


@MODES
def test_no_false_alarm_in_empty_and_small_batches(per_record: bool) -> None:
    problem = PROBLEMS["linear-3d-ghost"]
    private = run(problem.model(), problem.batch(RECORDS), per_record=per_record, steps=40, batch_size=1)
    assert private.ledger.steps == 40


@MODES
def test_no_false_alarm_for_numbers_of_any_size(per_record: bool) -> None:
    for scale in (1e-12, 1e-4, 1e4, 1e12):
        x, y = PROBLEMS["linear-2d"].batch(RECORDS)
        assert run(PROBLEMS["linear-2d"].model(), (x * scale, y), per_record=per_record).ledger.steps == 2


@MODES
def test_a_record_that_is_not_finite_is_no_alarm(per_record: bool) -> None:
    x, y = PROBLEMS["linear-2d"].batch(RECORDS)
    x[1], x[2, 0] = torch.nan, torch.inf
    assert run(PROBLEMS["linear-2d"].model(), (x, y), per_record=per_record).ledger.steps == 2


class Attends(nn.Module):
    """Attention across the records."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.softmax(h @ h.T, -1) @ h)


class Permutes(Attends):
    """Sorted by a number of theirs, and back: rows of the first layer are not in the order of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.b(self.a(x[order]).tanh()[order.argsort()])


class CentredData(Attends):
    """A statistic of the batch without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a((x - x.mean(0)) / x.std(0)).tanh())


class CentredActivations(Attends):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h - h.mean(0))


class CentredConstants(Attends):
    """The same, detached: only the values of other records enter."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h - h.mean(0).detach())


class CentredWithDropout(Attends):
    """The same where random numbers are drawn, so that as many rows must go in again."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.a(x), 0.3)
        return self.b(h - h.mean(0).detach())


class FirstConstant(Attends):
    """The values of the first record enter all others."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h + 0.1 * h[:1].detach())


class LongestConstant(Attends):
    """All records are divided by the largest number of any."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h / h.detach().abs().max())


class DividedByTheirNumber(Attends):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) / len(x))


class FirstRecord(Attends):
    """Every record is added to the first one's."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h + 0.01 * h[:1])


class Crossing(nn.Module):
    """A parameter outside any layer, on rows that were mixed, and put apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(4)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x * self.scale).roll(1, 0) + x)


MIXING = [Attends, CentredData, CentredActivations, CentredConstants, CentredWithDropout, FirstConstant]
MIXING += [LongestConstant, DividedByTheirNumber, FirstRecord, Crossing]


@MODES
@pytest.mark.parametrize("records", [2, 5, 40, 300])
@pytest.mark.parametrize("make", MIXING)
def test_every_mixing_model_is_found_before_anything_is_released(
    make: type[nn.Module], records: int, per_record: bool
) -> None:
    torch.manual_seed(0)
    model, data = make(), (torch.randn(records, 4), torch.randint(CLASSES, (records,)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedModule, match="one row per record|depends on the other records|mixes the records"):
        run(model, data, per_record=per_record)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@MODES
@pytest.mark.parametrize("records", [2, 5, 40])
def test_records_that_are_sorted_and_put_back_keep_their_gradients(records: int, per_record: bool) -> None:
    torch.manual_seed(0)
    model, data = Permutes(), (torch.randn(records, 4), torch.randint(CLASSES, (records,)))
    ours = clipless.clipped_sum(model, losses, data, "abadi")
    theirs = clipless.oracle.clipped_sum(model, losses, data, "abadi")
    for name, grad in theirs.grads.items():
        torch.testing.assert_close(ours.grads[name], grad, rtol=1e-4, atol=1e-5)
    assert run(model, data, per_record=per_record).ledger.steps == 2


class Chaotic(nn.Module):
    """Weights so large that rounding is amplified from time step to time step: what is left of a training that diverged."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells, self.last = (
            nn.Embedding(20, 8),
            nn.LSTM(8, 16, 2, batch_first=True),
            nn.Linear(16, CLASSES),
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(30.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(self.table(x))[0][:, -1])


def test_amplified_rounding_is_not_taken_for_mixed_records() -> None:
    torch.manual_seed(0)
    data = torch.randint(20, (30, 30)), torch.randint(CLASSES, (30,))
    with pytest.raises(UnsupportedModule, match="in their last digit, so rounding hides .* diverged"):
        run(Chaotic(), data, per_record=True)


class MixesWhenMasked(nn.Module):
    """Through the same modules in the same order, with masks and without."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h if mask.all() else h.roll(1, 0))


@pytest.mark.parametrize("new_at", [1, 3, 5])
def test_a_new_way_of_calling_the_model_is_checked_whenever_it_comes(new_at: int) -> None:
    torch.manual_seed(0)
    model, x, y = MixesWhenMasked(), torch.randn(6, 4), torch.randint(CLASSES, (6,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    private = clipless.make_private(
        model, optimizer, TensorDataset(x, y), noise_multiplier=1.0, delta=1e-3, accountant="rdp", steps=6, seed=1,
        batch_size=6, loss_reduction="mean"
    )  # fmt: skip

    def train() -> None:
        for step, (x, y) in enumerate(private.loader, 1):
            mask = torch.ones(6, 4, dtype=torch.long)
            mask[:, 2:] = int(step != new_at)
            optimizer.zero_grad()
            private.backward(F.cross_entropy(model(x, mask), y, reduction="none"))
            optimizer.step()

    with pytest.raises(UnsupportedModule, match="not in the|depends on the other records"):
        train()
    assert private.ledger.steps == new_at - 1
    private.detach()


class AtTheEdge(nn.Module):
    """A unit at the edge of its ReLU, on the side that `positive` says of the batch: what rounding does, made certain."""

    def __init__(self, units: int, positive: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.a, self.b, self.positive = nn.Linear(4, units), nn.Linear(units, CLASSES), positive

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        edge = h[:, :1] - h[:, :1].detach() + (1e-9 if self.positive(x) else -1e-9)
        return self.b(torch.cat([edge, h[:, 1:]], 1).relu())


@MODES
@pytest.mark.parametrize("case", ["rounding", "their number", "their values"])
def test_rounding_that_depends_on_the_number_of_rows_is_no_lost_gradient(case: str, per_record: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.randint(CLASSES, (16,))
    total = x.double().sum()
    sides: dict[str, Callable[[Tensor], bool]] = {
        "rounding": lambda rows: len(rows) > 8,
        "their number": lambda rows: len(rows) > 8,
        "their values": lambda rows: bool((rows.double().sum() - total).abs() < 1e-6),
    }
    model = AtTheEdge(20 if case == "their number" else 4000, sides[case])
    if case == "rounding":
        assert run(model, (x, y), per_record=per_record).ledger.steps == 2
    else:  # a jump of a fifth is more than rounding makes, and so is any that comes from other records
        with pytest.raises(UnsupportedModule, match="not what plain autograd gives"):
            run(model, (x, y), per_record=per_record)


def contrastive(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="none")


def softly_weighted(out: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(out, y, reduction="none")
    return losses * losses.softmax(0)


def all_the_same(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y).expand(len(out))


@pytest.mark.parametrize("losses", [contrastive, softly_weighted, all_the_same])
def test_losses_that_couple_the_records_are_found(losses: Callable[[Tensor, Tensor], Tensor]) -> None:
    problem = PROBLEMS["linear-2d"]
    with pytest.raises(Misuse, match="mixes the records.*reduction='none'"):
        run(problem.model(), problem.batch(RECORDS), per_record=True, losses=losses)


class InTwo(nn.Module):
    """Called in two parts, as `model.body` and `model.head`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, CLASSES)


@pytest.mark.parametrize("between", ["nothing", "centring", "detached centring"])
def test_what_happens_between_two_parts_of_a_model_is_seen(between: str) -> None:
    model, (x, y) = InTwo(), PROBLEMS["linear-2d"].batch(RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = clipless.make_private(
        model, optimizer, TensorDataset(x, y), noise_multiplier=1.0, delta=1e-3, accountant="rdp", steps=3, seed=1,
        batch_size=RECORDS, loss_reduction="sum",
    )  # fmt: skip

    def losses(model: InTwo, batch: Any) -> Tensor:
        h = model.body(batch[0]).tanh()
        centre = {"nothing": 0.0, "centring": h.mean(0), "detached centring": h.mean(0).detach()}[between]
        return F.cross_entropy(model.head(h - centre), batch[1], reduction="none")

    def train() -> None:
        for batch in private.loader:
            private.step(losses, batch)  # type: ignore[arg-type]

    if between == "nothing":
        train()
        assert private.ledger.steps == 3
    else:
        with pytest.raises(Misuse, match="mixes the? ?records|mixes records"):
            train()
        assert private.ledger.steps == 0
    private.detach()


class Flattened(nn.Module):
    """Rows of records and positions together, in one of two orders, handed out like this."""

    def __init__(self, time_major: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.time_major = nn.Linear(4, 5), nn.Linear(5, CLASSES), time_major

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(torch.cumsum(self.a(x), 1).tanh())
        return (h.transpose(0, 1) if self.time_major else h).reshape(-1, CLASSES)


def test_flattened_outputs_are_followed_or_refused() -> None:
    data = (torch.randn(RECORDS, 3, 4), torch.randint(CLASSES, (RECORDS, 3)))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y.flatten(), reduction="sum")

    assert run(Flattened(), data, per_record=False, losses=loss).ledger.steps == 2
    with pytest.raises(UnsupportedModule, match="one row per record"):
        run(Flattened(time_major=True), data, per_record=False, losses=loss)


class OwnLoss(nn.Module):
    """Computes its own loss: a mean over the records, over all tokens that count, or with weights of the classes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(4, 8), nn.Linear(8, CLASSES), kind

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.last(F.dropout(self.first(x), 0.5, self.training))
        weight = torch.tensor([1.0, 100.0, 10.0]) if self.kind == "weighted" else None
        ignored = 0 if self.kind == "ignoring" else -100
        return {"loss": F.cross_entropy(out, y, weight=weight, ignore_index=ignored), "logits": out}


@pytest.mark.parametrize("kind", ["plain", "weighted", "ignoring"])
def test_a_model_that_returns_its_loss_is_refused_unless_it_is_a_mean_over_the_records(kind: str) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(15, 4), torch.arange(15) % CLASSES)
    model = OwnLoss(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = clipless.make_private(
        model,
        optimizer,
        data,
        noise_multiplier=1.0,
        delta=1e-3,
        accountant="rdp",
        steps=3,
        seed=1,
        batch_size=15,
        loss_reduction="mean",
    )

    def train() -> None:
        for x, y in private.loader:
            model(x, y)["loss"].backward()
            optimizer.step()

    if kind == "plain":
        train()
        assert private.ledger.steps == 3
    else:
        with pytest.raises(Misuse, match=r"not the mean of one loss per record.*private\.step"):
            train()
        assert private.ledger.steps == 0


class Wrapping(nn.Module):
    """Returns its output in an object of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.last(x))


@MODES
def test_an_output_that_cannot_be_found_is_refused(per_record: bool) -> None:
    with pytest.raises(UnsupportedModule, match="no tensor is found.*Return tensors"):
        run(
            Wrapping(), PROBLEMS["linear-2d"].batch(RECORDS), per_record=per_record,
            losses=lambda out, y: F.cross_entropy(out.logits, y, reduction="none"),
        )  # fmt: skip


class Hidden(nn.Module):
    """Hands its parameter on in a way that nothing sees."""

    def __init__(self, way: Callable[[nn.Parameter, Tensor], Tensor]) -> None:
        super().__init__()
        self.p, self.way, self.last = nn.Parameter(torch.ones(4)), way, nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(self.p, x))


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(p, x)
        return p * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, x = ctx.saved_tensors
        return (grad * x).sum(0), grad * p


def by_alias(p: nn.Parameter, x: Tensor) -> Tensor:
    return x * torch.stack([p.as_subclass(Tensor)])[0]


def by_function(p: nn.Parameter, x: Tensor) -> Tensor:
    return Through.apply(p, x)


@MODES
@pytest.mark.parametrize("way", [by_alias, by_function])
def test_a_gradient_is_there_or_refused_by_name(
    way: Callable[[nn.Parameter, Tensor], Tensor], per_record: bool
) -> None:
    """Never silently missing: the parameter moves as the oracle says, or is named."""
    model, (x, y) = Hidden(way), PROBLEMS["linear-2d"].batch(RECORDS)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    refusals: list[str] = []
    try:
        run(model, (x, y), per_record=per_record)
    except CliplessError as refused:
        refusals.append(str(refused))
    assert all("'p'" in refusal or "(model)" in refusal for refusal in refusals)
    if refusals:
        return
    ours = clipless.clipped_sum(model, losses, (x, y)).grads["p"]
    torch.testing.assert_close(ours, clipless.oracle.clipped_sum(model, losses, (x, y)).grads["p"])


@MODES
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_gradient_that_gets_lost_on_its_way_is_refused_by_name(kept: float, per_record: bool) -> None:
    """All of one parameter's gradient, half of it, a hundredth: by a rule of a layer that is wrong."""
    torch.manual_seed(0)
    model, (x, y) = PROBLEMS["linear-2d"].model(), PROBLEMS["linear-2d"].batch(RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = clipless.make_private(
        model, optimizer, TensorDataset(x, y), noise_multiplier=1.0, delta=1e-3, accountant="rdp", steps=2, seed=1,
        batch_size=RECORDS, loss_reduction="sum",
    )  # fmt: skip
    layer = private._engine._map.layers[model.get_submodule("0")]
    true = layer.rule

    def wrong(use: Any, grads: tuple[Tensor, ...]) -> dict[str, Any]:
        forms = true(use, grads)
        return {**forms, "weight": Instantiated(kept * forms["weight"].per_record())}

    object.__setattr__(layer, "rule", wrong)
    inputs, labels = next(iter(private.loader))
    losses = F.cross_entropy(model(inputs), labels, reduction="none")
    private.backward(losses) if per_record else losses.sum().backward()
    with pytest.raises(UnsupportedModule, match="gradient of parameter '0.weight' is not what plain autograd gives"):
        optimizer.step()
    assert private.ledger.steps == 0
    private.detach()


class Skips(nn.Module):
    """Layers that are left out at random, on time-major tensors with as many positions as there may be records."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(6)), nn.Linear(4, CLASSES)
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        h = x.unsqueeze(0) * torch.arange(1.0, self.positions + 1).view(-1, 1, 1)
        for layer in self.layers:
            if float(torch.rand(())) < 0.3:
                h = h + torch.cumsum(layer(h), 0).tanh()
        return self.last(h.mean(0))


@MODES
def test_layers_that_no_probe_met_are_told_by_seeds_where_positions_are_as_many_as_records(per_record: bool) -> None:
    """Positions taken for records would be clipped one by one: a record would add up to 6 times its bound."""
    torch.manual_seed(3)
    problem = PROBLEMS["linear-2d"]
    model = Skips(RECORDS)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = clipless.make_private(
        model, optimizer, TensorDataset(*problem.batch(RECORDS)), noise_multiplier=1e-6, delta=1e-3, accountant="rdp",
        steps=30, seed=1, batch_size=RECORDS, loss_reduction="sum", clipping="auto-v",
    )  # fmt: skip
    for x, y in private.loader:
        optimizer.zero_grad()
        state = torch.get_rng_state()
        losses = F.cross_entropy(model(x), y, reduction="none")
        private.backward(losses) if per_record else losses.sum().backward()
        after = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), after)
        addends = []
        for k in range(RECORDS):
            torch.set_rng_state(state)
            loss = F.cross_entropy(plain(x[k : k + 1]), y[k : k + 1])
            grads = torch.autograd.grad(loss, list(plain.parameters()), allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, model.parameters(), strict=True)]
            share = torch.cat([g.flatten() for g in flat])
            addends.append(share / share.norm())
        torch.set_rng_state(after)
        released = torch.cat([p.grad.flatten() for p in model.parameters()]) * RECORDS
        torch.testing.assert_close(released, torch.stack(addends).sum(0), atol=1e-3, rtol=1e-3)
    private.detach()


def test_seeds_are_multiplied_without_rounding_in_every_type() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for records in (1, 2, 33, 500):
            for seeds in seed_passes(records, dtype, torch.device("cpu"), 3):
                assert seeds.dtype == dtype
                values = torch.rand(records).to(dtype)
                assert torch.equal((values * seeds) / seeds, values)


def test_no_two_records_have_the_same_seeds() -> None:
    for records in (2, 32, 33, 1024):
        passes = seed_passes(records, torch.float32, torch.device("cpu"), 7)
        assert len(set(zip(*(seeds.tolist() for seeds in passes), strict=True))) == records


@pytest.mark.parametrize("share", [1e-1, 1e-5, 1e-11])
def test_a_small_share_of_another_record_is_found(share: float) -> None:
    """Seeds that differ by a factor of up to 2**31 make much of little."""
    torch.manual_seed(0)
    (seeds,) = seed_passes(RECORDS, torch.float32, torch.device("cpu"), 0)
    own = torch.randn(RECORDS, 5, 20)
    mixing = torch.eye(RECORDS) + share * torch.ones(RECORDS, RECORDS)
    plain = torch.einsum("ab,brd->ard", mixing, own)
    seeded = torch.einsum("ab,b,brd->ard", mixing, seeds, own)
    assert impurity(sketch(plain, 0), sketch(seeded, 0), seeds) > IMPURE
    assert impurity(sketch(own, 0), sketch(own * seeds.view(-1, 1, 1), 0), seeds) == 0


class Counts(nn.Linear):
    """Every pass gives more than the one before."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) * (1 + 0.2 * self.passes)


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_every_parameter_is_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is whose gradient does not arrive."""
    add = Trial.add

    def lossy(self: Trial, own: str, form: Form, like: Tensor) -> None:
        if own != name:
            add(self, own, form, like)

    monkeypatch.setattr(Trial, "add", lossy)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(UnsupportedModule, match=f"gradient of parameter '{name}' is not"):
        self_checked(model, losses, (torch.randn(6, 4), torch.arange(6) % 3), 6, per_record=True)


@pytest.mark.parametrize("per_record", [True, False])
def test_a_pass_that_cannot_be_repeated_is_refused(per_record: bool) -> None:
    """On one record, of which nothing else could tell."""
    with pytest.raises(UnsupportedModule, match="gave two different outputs"):
        self_checked(Counts(4, 3), losses, (torch.ones(1, 4), torch.zeros(1, dtype=torch.long)), 1, per_record)


def test_checks_come_at_the_first_two_batches_and_at_powers_of_two() -> None:
    """Of those with two records or more; a single record is checked for what it can show."""
    schedule = CheckSchedule()
    assert [number for number in range(1, 70) if schedule.due(5)] == [1, 2, 4, 8, 16, 32, 64]
    fresh = CheckSchedule()
    assert [fresh.due(records) for records in (0, 1, 5, 0, 5, 1, 5)] == [False, True, True, False, True, True, False]


def test_a_share_is_found_in_rows_much_smaller_than_others() -> None:
    """A row of 1e-4 beside one of 1, with one part in a hundred of another record: rounding is a hundred times less."""
    plain, seeds = torch.tensor([1.0, 1e-4]).view(1, 2, 1), torch.tensor([1.0, 2.0])
    seeded = plain * torch.tensor([1.0, 2.02]).view(1, 2, 1)
    assert impurity(plain, seeded, seeds) > IMPURE
    assert named_records(plain, [seeded], [seeds]) is None

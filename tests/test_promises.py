"""The promise in people's own scripts: losses, models and habits that would break it without a word, each exact or refused
before anything is released."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless import Misuse, UnsupportedModule

CLASSES, FEATURES = 3, 4
WEIGHTS = torch.tensor([1.0, 100.0, 1.0])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def records(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, FEATURES), torch.arange(count) % CLASSES


def attach(model: nn.Module, data: tuple[Tensor, ...], lr: float = 0.1, **changes: Any) -> Any:
    """Every record in every batch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp", "steps": 4, "seed": 1} | changes
    private = clipless.make_private(
        model, optimizer, TensorDataset(*data), batch_size=len(data[0]), **{"loss_reduction": "mean", **settings}
    )
    return private, optimizer


def released_sum(data: tuple[Tensor, Tensor], losses: Callable[[Tensor, Tensor], Tensor], clipping: str) -> Tensor:
    """The clipped sum of the first step, all but free of noise."""
    model = network()
    private, optimizer = attach(model, data, noise_multiplier=1e-6, clipping=clipping)
    x, y = next(iter(private.loader))
    private.backward(losses(model(x), y))
    optimizer.step()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()]) * len(x)
    private.detach()
    return grads.double()


# Losses.


def class_weighted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight=WEIGHTS, reduction="none")


def ignoring(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, ignore_index=0, reduction="none")


@pytest.mark.parametrize("clipping", ["abadi", "auto-s"])
@pytest.mark.parametrize("losses", [class_weighted, ignoring])
def test_removing_a_record_moves_the_sum_of_weighted_losses_by_its_own_share(
    losses: Callable[[Tensor, Tensor], Tensor], clipping: str
) -> None:
    x, y = records(16)
    whole = released_sum((x, y), losses, clipping)
    for k in range(16):
        rest = [row for row in range(16) if row != k]
        assert (whole - released_sum((x[rest], y[rest]), losses, clipping)).norm() <= 1 + 1e-4


def weighted_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS)


def mean_of_some(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=0)


def contrastive(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


@pytest.mark.parametrize("clipping", ["abadi", "auto-s"])
@pytest.mark.parametrize("loss", [weighted_mean, mean_of_some, contrastive])
def test_check_judges_the_loss_that_is_trained(loss: Callable[..., Tensor], clipping: str) -> None:
    """Also where clipping hides on this batch what the loss would do on another."""
    report = clipless.check(network(), loss, records(8), clipping, "mean")
    assert not report.sound
    assert report.oracle_agreement is False or report.remove_one_record is False
    with pytest.raises(clipless.Unsound):
        attach(network(), records(8), check=(loss, records(8)))


def test_check_finds_a_weighted_mean_by_removing_a_record() -> None:
    """One that alone has its class, with a weight of 100: all the others count for more without it."""
    x, y = records(8)
    y[:] = 0
    y[3] = 1
    report = clipless.check(network(), weighted_mean, (x, y), "abadi", "mean")
    assert report.remove_one_record is False
    assert report.largest_change > 1.5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_check_accepts_a_loss_for_the_batch_that_is_what_it_is_said_to_be(reduction: str) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    assert clipless.check(network(), loss, records(8), loss_reduction=reduction).sound
    other = {"mean": "sum", "sum": "mean"}[reduction]
    assert not clipless.check(network(), loss, records(8), loss_reduction=other).sound


@pytest.mark.parametrize("size", [1500, 4001, 16001])
@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
def test_one_record_more_changes_no_other_share_in_half_precision(size: int, mode: str) -> None:
    x, y = torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(2)), torch.arange(size) % CLASSES
    sums = []
    for count in (size, size - 1):
        model = network().to(torch.bfloat16 if mode == "bfloat16" else torch.float32)
        data = (x[:count].to(next(model.parameters()).dtype), y[:count])
        private, optimizer = attach(model, data, noise_multiplier=1e-6, delta=1e-6, clipping="abadi")
        inputs, targets = next(iter(private.loader))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
            losses = F.cross_entropy(model(inputs), targets, reduction="none")
        private.backward(losses)
        sums.append(torch.cat([s.flatten().double() for s in private._engine.complete().values()]))
        optimizer.step()
        private.detach()
    assert (sums[0] - sums[1]).norm() <= 1 + 1e-3


@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
def test_a_mean_loss_in_half_precision_is_refused(mode: str) -> None:
    model = network().to(torch.bfloat16 if mode == "bfloat16" else torch.float32)
    x, y = records(12)
    private, _ = attach(model, (x.to(next(model.parameters()).dtype), y))
    inputs, targets = next(iter(private.loader))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
        loss = F.cross_entropy(model(inputs), targets)
    with pytest.raises(Misuse, match=r"16 bits.*private\.backward\(losses\)"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    private.detach()


@pytest.mark.parametrize(
    ("losses", "error", "words"),
    [
        (lambda out, y: F.cross_entropy(out, y), clipless.InvalidArgument, r"one loss per record.*shape \(B,\)"),
        (lambda out, y: out, clipless.InvalidArgument, r"one loss per record, .*, got \(B, \d\): "),
        (
            lambda out, y: F.cross_entropy(out, y, reduction="none")[:-1],
            clipless.InvalidArgument,
            r"one loss per record, .*, got \(n\): ",
        ),
        (lambda out, y: [1.0] * len(y), clipless.InvalidType, "a tensor of one loss per record"),
        (lambda out, y: out.detach().sum(1), Misuse, "no gradient"),
    ],
)
def test_what_is_not_one_loss_per_record_is_refused(losses: Any, error: type[Exception], words: str) -> None:
    model = network()
    private, optimizer = attach(model, records(12))
    x, y = next(iter(private.loader))
    with pytest.raises(error, match=words):
        private.backward(losses(model(x), y))
    private.backward(F.cross_entropy(model(x), y, reduction="none"))
    optimizer.step()
    assert private.ledger.steps == 1
    private.detach()


def test_backward_without_a_batch_is_refused() -> None:
    private, _ = attach(network(), records(12))
    with pytest.raises(Misuse, match="without a batch"):
        private.backward(torch.ones(3, requires_grad=True))
    private.detach()


def test_both_forms_of_backward_give_the_same_release() -> None:
    grads = []
    for per_record in (True, False):
        model = network()
        private, optimizer = attach(model, records(12))
        x, y = next(iter(private.loader))
        losses = F.cross_entropy(model(x), y, reduction="none")
        private.backward(losses) if per_record else losses.mean().backward()
        optimizer.step()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        private.detach()
    torch.testing.assert_close(*grads)


# Layouts.


class Positionwise(nn.Module):
    """Works on every position by itself, so that positions look like records."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


def test_a_time_major_input_that_is_square_in_the_first_batch_is_refused() -> None:
    """Positions clipped as records would let one record add 2.8 times its bound."""
    size = 8
    data = (torch.randn(size, size, FEATURES), torch.randint(CLASSES, (size, size)))
    for per_record in (True, False):
        model = Positionwise()
        private, _ = attach(model, data, loss_reduction="sum")
        x, y = next(iter(private.loader))
        out = model(x.transpose(0, 1))  # [t,b,c]
        losses = F.cross_entropy(out.transpose(0, 1).transpose(1, 2), y, reduction="none").sum(1)
        with pytest.raises(
            (Misuse, UnsupportedModule), match="which of them are the records|give it the records first"
        ):
            private.backward(losses) if per_record else losses.sum().backward()
        assert private.ledger.steps == 0
        private.detach()


def test_a_square_input_with_the_records_first_is_told_by_its_losses() -> None:
    size = 8
    data = (torch.randn(size, size, FEATURES), torch.randint(CLASSES, (size, size)))
    model = Positionwise()
    private, optimizer = attach(model, data)
    for x, y in private.loader:
        private.backward(F.cross_entropy(model(x).transpose(1, 2), y, reduction="none").sum(1))
        optimizer.step()
    assert private.ledger.steps == 4
    private.detach()


# What a pass leaves in the model.


class Writes(nn.Module):
    """Keeps something of the records."""

    def __init__(self, write: Callable[["Writes", Tensor], None]) -> None:
        super().__init__()
        self.write, self.last = write, nn.Linear(FEATURES, CLASSES)
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.average = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)
        self.attribute = torch.zeros(FEATURES)
        self.register_buffer("buffer", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.write(self, x.detach().mean(0))
        return self.last(x * self.scale)


@torch.no_grad()
def initialise(model: Writes, mean: Tensor) -> None:
    model.scale.copy_(1 + mean.abs())


@torch.no_grad()
def average(model: Writes, mean: Tensor) -> None:
    model.average.mul_(0.9).add_(mean, alpha=0.1)


def average_by_data(model: Writes, mean: Tensor) -> None:
    model.average.data.mul_(0.9).add_(mean, alpha=0.1)


def buffer_by_data(model: Writes, mean: Tensor) -> None:
    model.buffer.data.mul_(0.9).add_(mean, alpha=0.1)


def buffer_by_set(model: Writes, mean: Tensor) -> None:
    model.buffer.data = 0.9 * model.buffer + 0.1 * mean


def replace_attribute(model: Writes, mean: Tensor) -> None:
    model.attribute = 0.9 * model.attribute + 0.1 * mean


def change_attribute(model: Writes, mean: Tensor) -> None:
    model.attribute.mul_(0.9).add_(mean, alpha=0.1)


WRITES = {
    initialise: "parameter 'scale' changes",
    average: "parameter 'average' changes",
    average_by_data: "parameter 'average' changes",
    buffer_by_data: "buffer 'buffer' changes",
    buffer_by_set: "buffer 'buffer' changes",
    replace_attribute: "attribute 'attribute' that changes",
    change_attribute: "attribute 'attribute' that changes",
}


@pytest.mark.parametrize(("write", "words"), WRITES.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_forward_pass_that_writes_into_the_model_is_refused(write: Callable[..., None], words: str) -> None:
    model = Writes(write)
    before = copy.deepcopy(model.state_dict())
    private, _ = attach(model, records(12))
    x, _ = next(iter(private.loader))
    with pytest.raises(UnsupportedModule, match=words):
        model(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    private.detach()


@pytest.mark.parametrize("write", [average, buffer_by_data, initialise], ids=lambda f: f.__name__)
def test_a_pass_without_gradients_on_the_open_batch_writes_nothing_either(write: Callable[..., None]) -> None:
    model = Writes(lambda model, mean: None)
    private, optimizer = attach(model, records(12))
    x, y = next(iter(private.loader))
    private.backward(F.cross_entropy(model(x), y, reduction="none"))
    model.write = write
    with torch.no_grad():
        model(x)
    with pytest.raises(Misuse, match="between the batch and its step"):
        optimizer.step()
    assert private.ledger.steps == 0
    private.detach()


def test_a_write_is_seen_in_steps_that_are_not_checked_too() -> None:
    model = Writes(lambda model, mean: None)
    private, optimizer = attach(model, records(12))
    batches = iter(private.loader)
    for _ in range(2):
        x, y = next(batches)
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
    x, _ = next(batches)
    model.write = average
    with pytest.raises(UnsupportedModule, match="parameter 'average' changes"):
        model(x)
    private.detach()


def test_averages_of_weights_after_the_step_are_welcome() -> None:
    model = Writes(lambda model, mean: None)
    private, optimizer = attach(model, records(12))
    for x, y in private.loader:
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        average(model, model.scale.detach())
        buffer_by_data(model, model.scale.detach())
    assert private.ledger.steps == 4
    private.detach()


class Remembers(nn.Module):
    """What it computes depends on the pass before."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.kept = nn.Linear(FEATURES, CLASSES), [0.0]

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(x) + self.kept[0]
        self.kept[0] += float(x.mean())
        return out


def test_a_model_that_goes_on_from_the_pass_before_is_refused() -> None:
    model = Remembers()
    private, optimizer = attach(model, records(12))
    x, y = next(iter(private.loader))
    private.backward(F.cross_entropy(model(x), y, reduction="none"))
    with pytest.raises(UnsupportedModule, match="depends on the other records|gave two different outputs"):
        optimizer.step()
    assert private.ledger.steps == 0
    private.detach()


# The model changes under way.


def add_module(model: nn.Sequential) -> None:
    model.append(nn.Linear(CLASSES, CLASSES))


def add_frozen_module(model: nn.Sequential) -> None:
    model.append(nn.BatchNorm1d(CLASSES).requires_grad_(False))


def add_parameter(model: nn.Sequential) -> None:
    model[0].extra = nn.Parameter(torch.ones(2))


def replace_module(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, CLASSES)


@pytest.mark.parametrize("change", [add_module, add_frozen_module, add_parameter, replace_module])
def test_modules_that_come_later_are_seen_at_the_next_pass(change: Callable[[nn.Sequential], None]) -> None:
    model = network()
    private, _ = attach(model, records(12))
    x, _ = next(iter(private.loader))
    change(model)
    with pytest.raises(Misuse, match="another child or parameter after make_private"):
        model(x)
    assert all(p.grad is None for p in model.parameters())
    private.detach()


@pytest.mark.parametrize("per_record", [True, False])
def test_another_mode_between_forward_and_backward_is_refused(per_record: bool) -> None:
    model = nn.Sequential(network(), nn.Dropout(0.5), nn.Linear(CLASSES, CLASSES))
    private, _ = attach(model, records(12))
    x, y = next(iter(private.loader))
    losses = F.cross_entropy(model(x), y, reduction="none")
    model.eval()
    with pytest.raises(Misuse, match=r"train\(\) or eval\(\) was called between"):
        private.backward(losses) if per_record else losses.mean().backward()
    private.detach()


def test_a_penalty_on_activations_by_an_earlier_hook_is_exact() -> None:
    model, seen = network(), list[Tensor]()
    model[0].register_forward_hook(lambda module, args, out: seen.append(out))

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + seen[-1].square().sum(1)

    ours, theirs = (f(model, losses, records(6), "abadi") for f in (clipless.clipped_sum, clipless.oracle.clipped_sum))
    for name, grad in ours.grads.items():
        torch.testing.assert_close(grad, theirs.grads[name])

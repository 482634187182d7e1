"""A model that returns the loss of the whole batch, and `loss.backward()` on it: trained if the loss is the mean, or the
sum, of one loss for each record, and refused before the first step otherwise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless

RECORDS, TOKENS, WORDS = 12, 6, 11


class Language(nn.Module):
    """Predicts the next token, and returns (logits, loss), as nanoGPT's model does."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], zero: bool = False) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS, bias=False)
        self.loss = loss
        if zero:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(F.gelu(self.body(self.words(x))))
        return logits, self.loss(logits, y)


def mean(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)


def total(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")


def weighted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=torch.linspace(1, 1.2, WORDS))


def balanced(logits: Tensor, y: Tensor) -> Tensor:
    """With a small auxiliary loss that keeps a router's load balanced over the batch."""
    chosen = F.one_hot(logits.argmax(-1), WORDS).float().mean((0, 1))
    return mean(logits, y) + 0.001 * WORDS * (chosen * logits.softmax(-1).mean((0, 1))).sum()


def noisy(logits: Tensor, y: Tensor) -> Tensor:
    """Every record at a level of noise of its own, as in diffusion."""
    level = torch.rand(len(y), 1, 1)
    return (logits * level - torch.randn_like(logits)).square().mean()


def noisy_and_coupled(logits: Tensor, y: Tensor) -> Tensor:
    return noisy(logits, y) + logits.mean(0).square().mean()


def noisy_total(logits: Tensor, y: Tensor) -> Tensor:
    return noisy(logits, y) * len(y)


def few_targets(y: Tensor) -> Tensor:
    """Every record has another number of targets; the others are ignored."""
    return torch.where(torch.arange(TOKENS) < 1 + torch.arange(RECORDS).view(-1, 1) % TOKENS, y, -1)


def train(model: nn.Module, targets: Callable[[Tensor], Tensor] = lambda y: y, reduction: str = "mean") -> Any:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, WORDS, (2, RECORDS, TOKENS), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = clipless.make_private(
        model, optimizer, TensorDataset(x, targets(y)), noise_multiplier=1.0, delta=1e-3, accountant="rdp", steps=2,
        seed=1, batch_size=RECORDS, loss_reduction=reduction,
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    try:
        for inputs, labels in private.loader:
            _, loss = model(inputs, labels)
            loss.backward()
            optimizer.step()
    except clipless.CliplessError:
        assert all(map(torch.equal, before, model.parameters()))
        raise
    finally:
        private.detach()
    return private


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("loss", "reduction"), [(mean, "mean"), (total, "sum"), (noisy, "mean"), (noisy_total, "sum")])
def test_a_loss_that_is_made_of_the_records_own_is_trained(
    loss: Callable[[Tensor, Tensor], Tensor], reduction: str, zero: bool
) -> None:
    torch.manual_seed(0)
    assert train(Language(loss, zero), reduction=reduction).ledger.steps == 2


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("loss", "targets", "reduction"),
    [
        (mean, few_targets, "mean"),
        (mean, lambda y: y, "sum"),
        (total, lambda y: y, "mean"),
        (weighted, lambda y: y, "mean"),
        (balanced, lambda y: y, "mean"),
        (noisy_and_coupled, lambda y: y, "mean"),
        (noisy_total, lambda y: y, "mean"),
        (noisy, lambda y: y, "sum"),
    ],
)
def test_a_loss_that_the_records_share_is_refused(
    loss: Callable[[Tensor, Tensor], Tensor], targets: Callable[[Tensor], Tensor], reduction: str, zero: bool
) -> None:
    """Even where every record has the same loss by chance: with a head of zeros."""
    torch.manual_seed(0)
    with pytest.raises(clipless.Misuse, match=r"private\.step\(record_losses, batch\)"):
        train(Language(loss, zero), targets, reduction)


class WithCriterion(nn.Module):
    """Holds its loss function as a module, which the loop calls."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.body, self.criterion = nn.Linear(4, 3), criterion

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Spread(nn.Module):
    """Mixes the records of a batch."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) - 0.1 * out.std(0).mean()


@pytest.mark.parametrize(("criterion", "sound"), [(nn.CrossEntropyLoss, True), (Spread, False)])
def test_a_loss_module_within_the_model_may_be_called_by_the_loop(criterion: type[nn.Module], sound: bool) -> None:
    torch.manual_seed(0)
    model, data = WithCriterion(criterion()), TensorDataset(torch.randn(RECORDS, 4), torch.arange(RECORDS) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = clipless.make_private(
        model, optimizer, data, noise_multiplier=1.0, delta=1e-3, accountant="rdp", steps=3, seed=1,
        batch_size=RECORDS, loss_reduction="mean",
    )  # fmt: skip

    def train() -> int:
        for x, y in private.loader:
            model.criterion(model(x), y).backward()
            optimizer.step()
        return private.ledger.steps

    if sound:
        assert train() == 3
    else:
        with pytest.raises(clipless.Misuse, match="private.step"):
            train()

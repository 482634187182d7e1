"""`private.step(record_losses, batch)`: as a loop with `private.backward`, to the bit, in every setting of a run."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

import clipless
from clipless import InvalidArgument, InvalidType, Misuse
from step_zoo import (
    CLASSES,
    FEATURES,
    Attention,
    Bag,
    Entry,
    Function,
    begin,
    by_loop,
    by_step,
    convolution,
    cross_entropy,
    dropout,
    mlp,
    pairs,
    plain,
    sentences,
    stacked,
    weights,
)

PLAIN, DROPOUT = Entry(lambda: plain), Entry(lambda: plain, dropout)


# As the loop, to the bit.


class Augmented(Dataset[Any]):
    """Every record with noise of torch, of NumPy and of Python."""

    def __init__(self) -> None:
        self._pairs = pairs()

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        x, y = self._pairs[number]
        return x * random.random() + 0.1 * torch.randn(FEATURES) + float(np.random.rand()), y


class Batched(Dataset[Any]):
    """Fetches several records at once."""

    def __init__(self) -> None:
        self._pairs = pairs()

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, number: int) -> Any:
        return self._pairs[number]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self._pairs[number] for number in numbers]


class Recomputed(nn.Module):
    """A checkpointed model with a layer after it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.last, self.reentrant = dropout(), nn.Linear(CLASSES, CLASSES), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant:
            x = x.detach().requires_grad_()
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def in_memory() -> TensorDataset:
    x, y = stacked(pairs())
    return TensorDataset(x, y)


SETTINGS: dict[str, tuple[Entry, dict[str, Any]]] = {
    "tensors in memory": (Entry(lambda: plain, dropout, data=in_memory), {}),
    "a subset": (Entry(lambda: plain, data=lambda: torch.utils.data.Subset(in_memory(), list(range(20)))), {}),
    "records": (DROPOUT, {}),
    "micro-batches": (DROPOUT, {"micro_batch": 5}),
    "micro-batches of one": (PLAIN, {"micro_batch": 1}),
    "small batches": (PLAIN, {"batch_size": 1, "steps": 30}),
    "per layer": (DROPOUT, {"clipping": "dc-e"}),
    "workers": (DROPOUT, {"workers": 2}),
    "augmentation": (Entry(lambda: plain, dropout, data=Augmented), {"steps": 5}),
    "augmentation and collating": (Entry(lambda: plain, dropout, data=Augmented, collate=stacked), {"steps": 5}),
    "several records at once": (Entry(lambda: plain, dropout, data=Batched), {}),
    "checkpointed": (Entry(lambda: plain, partial(Recomputed, False)), {}),
    "checkpointed, reentrant": (Entry(lambda: plain, partial(Recomputed, True)), {}),
    "attention": (Entry(lambda: plain, Attention), {"micro_batch": 7}),
    "estimated norms": (DROPOUT, {"gradients": "jl", "projections": 3, "accountant": "pld"}),
    "more than sixteen steps": (DROPOUT, {"steps": 20}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_agrees_with_the_loop_to_the_bit(name: str) -> None:
    entry, settings = SETTINGS[name]
    assert torch.equal(by_step(entry, **settings), by_loop(entry, **settings))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
}


def trained(how: str, optimizer: Callable[..., torch.optim.Optimizer], autocast: bool = False) -> Tensor:
    """The weights of a small run with a scheduler, two groups of parameters, and `autocast` around everything."""
    torch.manual_seed(0)
    model = convolution()
    groups = [{"params": list(model[:-1].parameters())}, {"params": list(model[-1].parameters()), "lr": 0.01}]
    stepping = optimizer(groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stepping, 0.9)
    private = clipless.make_private(
        model, stepping, in_memory(), noise_multiplier=1.0, delta=1e-5, batch_size=12, steps=4, seed=1, accountant="rdp"
    )
    for batch in private.loader:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if how == "step":
                private.step(plain, batch)
            else:
                losses = plain(model, batch)
        if how != "step":
            stepping.zero_grad()
            private.backward(losses)
            stepping.step()
        scheduler.step()
    private.detach()
    return weights(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_as_in_the_loop(name: str) -> None:
    assert torch.equal(trained("step", OPTIMIZERS[name]), trained("loop", OPTIMIZERS[name]))


def test_autocast_around_the_step_is_as_around_forward_and_backward() -> None:
    sgd = OPTIMIZERS["sgd"]
    assert torch.equal(trained("step", sgd, autocast=True), trained("loop", sgd, autocast=True))
    assert not torch.equal(trained("step", sgd, autocast=True), trained("step", sgd))


def test_the_random_numbers_of_the_run_are_not_touched() -> None:
    """By checks that fetch, collate and run again."""
    after = []
    for how in (by_step, by_loop):
        how(Entry(lambda: plain, dropout, data=Augmented, collate=stacked))
        after.append((torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()))
    assert torch.equal(after[0][0], after[1][0])
    assert after[0][1:] == after[1][1:]


# What it returns, and what it takes.


def test_it_returns_nothing_and_takes_what_the_loader_yields() -> None:
    model, _, private = begin(PLAIN, steps=4)
    assert private.step(plain, next(iter(private.loader))) is None
    for parts in private.loader.microbatches(4):
        assert private.step(plain, parts) is None
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert private.ledger.steps == 4
    private.detach()


def test_the_batch_that_the_loop_has_keeps_its_keys() -> None:
    """Whatever the function takes out of it."""

    def popping(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch.pop("x")), batch.pop("y"))

    entry = Entry(lambda: popping, collate=lambda samples: dict(zip("xy", stacked(samples), strict=True)))
    _, _, private = begin(entry, steps=6)
    for batch in private.loader:
        private.step(popping, batch)
        assert list(batch) == ["x", "y"]
    private.detach()


def test_tensors_of_the_batch_may_require_a_gradient() -> None:
    """In a loop with `private.backward` too."""
    model, optimizer, private = begin(PLAIN, steps=6)
    for batch in private.loader:
        batch[0].requires_grad_()
        if private.ledger.steps < 3:
            private.step(plain, batch)
        else:
            private.backward(plain(model, batch))
            optimizer.step()
    assert private.ledger.steps == 6
    private.detach()


def test_an_empty_batch_is_stepped_without_a_call() -> None:
    calls = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        return plain(model, batch)

    _, _, private = begin(PLAIN, batch_size=1, steps=30)
    sizes = []
    for batch in private.loader:
        sizes.append(len(batch[0]))
        private.step(counted, batch)
    assert 0 in sizes
    assert 0 not in calls
    assert private.ledger.steps == 30
    private.detach()


MISUSES: dict[str, tuple[Callable[[nn.Module, Any], Any], type[Exception], str]] = {
    "mean": (lambda m, b: F.cross_entropy(m(b[0]), b[1]), InvalidArgument, r"record_losses must return one loss per"),
    "columns": (lambda m, b: plain(m, b).unsqueeze(1), InvalidArgument, r"\(B,\), got \(B, 1\)"),
    "pair": (lambda m, b: (m(b[0]), plain(m, b)), InvalidType, r"record_losses must return a tensor .*got tuple"),
    "nothing": (lambda m, b: None, InvalidType, "got NoneType"),
    "detached": (lambda m, b: plain(m, b).detach(), Misuse, "the losses have no gradient"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_what_is_not_one_loss_per_record_is_refused_by_the_name_of_the_function(name: str) -> None:
    function, kind, message = MISUSES[name]
    _, _, private = begin(PLAIN)
    with pytest.raises(kind, match=message):
        private.step(function, next(iter(private.loader)))
    private.detach()


def test_a_step_without_a_batch_or_twice_on_one_is_refused() -> None:
    _, _, private = begin(PLAIN)
    own = stacked(pairs())
    with pytest.raises(Misuse, match=r"private\.step\(\) was called without a batch"):
        private.step(plain, own)
    batch = next(iter(private.loader))
    private.step(plain, batch)
    with pytest.raises(Misuse, match=r"private\.step\(\) was called without a batch"):
        private.step(plain, batch)
    private.detach()


# Exceptions.


def failing(function: Function, calls: set[int]) -> Function:
    """Raises in these calls, after the model has run."""
    made = []

    def losses(model: nn.Module, batch: Any) -> Tensor:
        made.append(None)
        found = function(model, batch)
        if len(made) in calls:
            raise KeyboardInterrupt
        return found

    return losses


@pytest.mark.parametrize("again", [True, False], ids=["again", "same batch"])
def test_a_step_can_be_repeated_after_an_exception_in_the_function(again: bool) -> None:
    """In a checked step, the first, and in one that is not: as if nothing had happened."""
    entry = PLAIN
    expected = by_step(entry, steps=6)
    model, _, private = begin(entry, steps=6)
    for number, batch in enumerate(private.loader):
        if number in (0, 4):
            with pytest.raises(KeyboardInterrupt):
                private.step(failing(plain, {1}), batch)
        private.step(plain, private.loader.again() if again and number in (0, 4) else batch)
    private.detach()
    assert torch.equal(weights(model), expected)


def test_a_step_in_parts_can_be_repeated_after_an_exception() -> None:
    expected = by_step(PLAIN, micro_batch=5, steps=6)
    model, _, private = begin(PLAIN, steps=6)
    batches = private.loader.microbatches(5)
    for number, parts in enumerate(batches):
        if number in (0, 2):
            with pytest.raises(KeyboardInterrupt):
                private.step(failing(plain, {2}), parts)
        private.step(plain, batches.again() if number in (0, 2) else parts)
    private.detach()
    assert torch.equal(weights(model), expected)


def test_a_refused_step_releases_nothing_and_can_be_taken_with_another_function() -> None:
    def coupled(model: nn.Module, batch: Any) -> Tensor:
        return plain(model, batch) / len(batch[0])

    model, _, private = begin(PLAIN)
    before = weights(model)
    for number, batch in enumerate(private.loader):
        if number == 0:
            with pytest.raises(Misuse, match="mixes records"):
                private.step(coupled, batch)
            with pytest.raises(Misuse, match=r"private\.loader\.again\(\) yields the batch once more"):
                private.step(plain, batch)
            assert torch.equal(weights(model), before)
            assert private.ledger.steps == 0
            batch = private.loader.again()
        private.step(plain, batch)
    assert private.ledger.steps == 3
    private.detach()


# What is new is checked.


def test_a_function_that_comes_later_is_checked_when_it_comes() -> None:
    kept = {"scale": 1.0}

    def running(model: nn.Module, batch: Any) -> Tensor:
        found, scale = plain(model, batch), kept["scale"]
        kept["scale"] = 0.5 * scale + 0.5 * float(found.detach().mean())
        return found / scale

    def unscaled(model: nn.Module, batch: Any) -> Tensor:
        return plain(model, batch) / 1.0

    _, _, private = begin(PLAIN, steps=8)
    batches = iter(private.loader)
    for _ in range(5):
        private.step(unscaled, next(batches))
    batch = next(batches)
    with pytest.raises(Misuse, match="it keeps something from call to call"):
        private.step(running, batch)
    assert private.ledger.steps == 5
    private.detach()


def test_a_longer_batch_is_checked_when_it_comes() -> None:
    """A function that mixes records from some length on."""

    def late(model: nn.Module, batch: Any) -> Tensor:
        found = cross_entropy(model(batch[0], (batch[0] > 0).float()), batch[1])
        return found if batch[0].shape[1] < 7 else found / len(found)

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        longest = 6 if private.ledger.steps < 5 else 7
        tokens = torch.stack([F.pad(x, (0, 7 - len(x)))[:longest] for x, _ in samples])
        return tokens, torch.tensor([y for _, y in samples])

    entry = Entry(lambda: late, Bag, data=sentences, collate=collate)
    _, _, private = begin(entry, steps=8)
    batches = iter(private.loader)
    for _ in range(5):
        private.step(late, next(batches))
    batch = next(batches)
    with pytest.raises(Misuse, match="mixes records"):
        private.step(late, batch)
    assert private.ledger.steps == 5
    private.detach()


# What cannot be seen is warned of, once.


def test_a_collate_function_may_draw_numbers_for_each_record() -> None:
    def noisy(samples: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = stacked(samples)
        return x + 0.1 * torch.randn_like(x), y

    entry = Entry(lambda: plain, collate=noisy)
    assert torch.equal(by_step(entry, steps=6), by_loop(entry, steps=6))


def test_a_batch_of_which_no_records_can_be_chosen_is_warned_of() -> None:
    """Neither from the batch, which nobody can open, nor by collating halves, since this is no batch of the loader's."""

    class Closed:
        __slots__ = ("content",)

        def __init__(self, content: Any) -> None:
            self.content = content

    _, _, private = begin(Entry(lambda: plain, collate=stacked), steps=1)
    for batch in private.loader:
        with pytest.warns(UserWarning, match="cannot") as told:
            private.step(lambda model, closed: plain(model, closed.content), Closed(batch))
    assert {str(one.message)[:39] for one in told} == {"clipless cannot choose records of this "}
    private.detach()


def test_records_padded_together_by_the_data_set_are_found() -> None:
    """It fetches several at once, as long as the longest of them."""

    class Padding(Dataset[Any]):
        def __len__(self) -> int:
            return len(sentences())

        def __getitem__(self, number: int) -> Any:
            return self.__getitems__([number])[0]

        def __getitems__(self, numbers: list[int]) -> list[Any]:
            found = [sentences()[number] for number in numbers]
            longest = max(len(x) for x, _ in found)
            return [(F.pad(x, (0, longest - len(x))), y) for x, y in found]

    _, _, private = begin(Entry(lambda: plain, Bag, data=Padding))
    with pytest.raises(Misuse, match="collated alone have other losses"):
        private.step(plain, next(iter(private.loader)))
    private.detach()


def test_a_data_set_with_a_plain_loader_is_not_read_again() -> None:
    """Records are not mixed by stacking them, so that costly ones are read once."""
    read = []

    class Counted(Dataset[Any]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, number: int) -> Any:
            read.append(number)
            return pairs()[number]

    model = mlp()
    private = clipless.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(Counted(), batch_size=12),
        noise_multiplier=1.0,
        delta=1e-5,
        accountant="rdp",
        steps=4,
        seed=1,
    )
    handed_out = 0
    for batch in private.loader:
        handed_out += len(batch[0])
        private.step(plain, batch)
    assert len(read) <= handed_out + 1  # where records lie is learned from one
    private.detach()

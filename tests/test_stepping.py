"""What the training loop does around a step: batches that are not stepped, gradients in clear, closures, subclasses, and
habits of plain training."""

import itertools
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

import clipless
from clipless import InvalidType, Misuse, Private
from clipless.sampling.loader import Batch

FEATURES, CLASSES, SIZE, BATCH = 4, 3, 40, 10
UNSTEPPED = r"was not stepped.*empty ones like any other.*private\.loader\.again\(\)"


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SIZE, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (SIZE,), generator=generator), torch.arange(SIZE))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def attach(model: nn.Module, optimizer: Optimizer, data: Any = None, **changes: Any) -> Private:
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": BATCH, "steps": 20, "seed": 3} | changes
    return clipless.make_private(
        model, optimizer, dataset() if data is None else data, **{"loss_reduction": "mean", **settings}
    )


def fresh(make: Callable[..., Optimizer] = SGD, **changes: Any) -> tuple[nn.Sequential, Optimizer, Private]:
    model = network()
    optimizer = make(model.parameters(), lr=0.1)
    return model, optimizer, attach(model, optimizer, **changes)


def backward(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss


def released(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# A batch that is drawn is stepped.


def skip_empty(model: nn.Module, optimizer: Optimizer, private: Private) -> None:
    for batch in private.loader:
        if len(batch[0]) == 0:
            continue
        backward(model, batch)
        optimizer.step()


def choose(model: nn.Module, optimizer: Optimizer, private: Private) -> None:
    for batch in private.loader:
        if batch[2].eq(0).any():
            backward(model, batch)
            optimizer.step()


def break_off(model: nn.Module, optimizer: Optimizer, private: Private) -> None:
    for _ in range(2):
        for batch in private.loader:
            if len(batch[0]) == 0:
                break
            backward(model, batch)
            optimizer.step()


def skip_parts(model: nn.Module, optimizer: Optimizer, private: Private) -> None:
    for parts in private.loader.microbatches(2):
        for batch in parts:
            if len(batch[0]) == 0:
                break
            backward(model, batch)
        else:
            optimizer.step()


def one_each(model: nn.Module, optimizer: Optimizer, private: Private) -> None:
    while private.steps_taken < private.plan.steps:
        batch = next(iter(private.loader))
        if len(batch[0]):
            backward(model, batch)
            optimizer.step()


def look_only(model: nn.Module, optimizer: Optimizer, private: Private) -> None:
    for _ in zip(private.loader, private.loader, strict=True):
        pass


@pytest.mark.parametrize("loop", [skip_empty, choose, break_off, skip_parts, one_each, look_only])
@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_batch_that_is_dropped_is_refused_at_the_next(loop: Callable[..., None], noise: str) -> None:
    """Rate 1/40: 36 % of the batches are empty. Dropping them makes the sampling another than the ledger's."""
    model, optimizer, private = fresh(batch_size=1, steps=60, noise=noise, seed=3 if noise == "seeded" else None)
    draws: list[int] = []
    open_batch = private.open_batch
    private.open_batch = lambda batch: (open_batch(batch), draws.append(batch.draw))[0]  # type: ignore[method-assign]
    with pytest.raises(Misuse, match=UNSTEPPED):
        loop(model, optimizer, private)
    assert len(draws) == private.ledger.steps + 1
    for batch in itertools.chain([private.loader.again()], private.loader):
        backward(model, batch)
        optimizer.step()
    assert private.ledger.steps == 60
    assert draws == list(range(60))


def test_a_parameter_that_became_trainable_after_backward_is_refused_by_name() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    private = attach(model, optimizer)
    backward(model, next(iter(private.loader)))
    model[0].requires_grad_(True)
    with pytest.raises(Misuse, match=r"parameter '0\.weight' became trainable"):
        optimizer.step()
    private.detach()


@pytest.mark.parametrize(("sampling", "rate"), [("poisson", 0.9), ("shuffled", None)])
def test_a_batch_that_was_not_drawn_as_planned_is_refused(sampling: str, rate: float | None) -> None:
    """As another sampler than the loader's own would announce it."""
    _, _, private = fresh()
    with pytest.raises(Misuse, match="does not fit the plan"):
        private.open_batch(Batch(0, 3, sampling, private.plan.sample_rate if rate is None else rate))
    private.open_batch(Batch(0, 3, private.plan.sampling, private.plan.sample_rate))
    private.detach()


def test_the_last_batch_of_a_pass_is_not_dropped_either() -> None:
    model, optimizer, private = fresh(epochs=1, steps=None)

    def train() -> None:
        for number, batch in enumerate(private.loader):
            if number < len(private.loader) - 1:
                backward(model, batch)
                optimizer.step()

    with pytest.raises(Misuse, match=UNSTEPPED):
        train()
    backward(model, private.loader.again())
    optimizer.step()
    assert private.ledger.steps == private.plan.steps


class Recorded(Dataset[Any]):
    """Records that are fetched one by one, and those that were."""

    def __init__(self) -> None:
        self.data = dataset()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


DATA: dict[str, Callable[[], Any]] = {
    "in memory": dataset,
    "one by one": Recorded,
    "workers": lambda: DataLoader(Recorded(), batch_size=BATCH, num_workers=2, persistent_workers=True),
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize("size", [None, 3])
def test_the_open_batch_is_handed_out_again(kind: str, noise: str, size: int | None) -> None:
    """In the middle of a pass that then goes on, whatever was done with the batch before."""
    model, optimizer, private = fresh(data=DATA[kind](), noise=noise, seed=3 if noise == "seeded" else None, steps=4)
    logical = private.loader.microbatches(size) if size else ([batch] for batch in private.loader)
    for parts in logical:
        first = next(iter(parts))
        backward(model, first)
        again = [*private.loader.microbatches(size).again()] if size else [private.loader.again()]
        assert all(map(torch.equal, first, again[0]))
        with suppress(Misuse):
            backward(model, first)  # the announcement was for other parts
        for part in private.loader.microbatches(4).again():
            backward(model, part)
        optimizer.step()
    assert private.ledger.steps == 4
    private.detach()
    vars(private).clear()


def test_a_batch_that_was_handed_out_again_releases_what_it_would_have() -> None:
    gradients = []
    for broken_off in (False, True):
        model, optimizer, private = fresh()
        batch = next(iter(private.loader))
        if broken_off:
            backward(model, batch)
            batch = private.loader.again()
        backward(model, batch)
        optimizer.step()
        gradients.append(released(model))
    assert same(*gradients)


@pytest.mark.parametrize("size", [None, 1500])
def test_a_batch_of_several_blocks_that_was_handed_out_again_is_counted_once(size: int | None) -> None:
    """Of 5,000 records 2,048 are added up in float32 and kept: what is kept of a broken-off attempt is forgotten too."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(5000, FEATURES, generator=generator), torch.arange(5000) % CLASSES)
    gradients = []
    for broken_off in (False, True):
        model, optimizer, private = fresh(data=data, batch_size=5000, steps=2)
        parts = iter(next(iter(private.loader.microbatches(size))) if size else [next(iter(private.loader))])
        if broken_off:
            backward(model, next(parts))
            for part in itertools.islice(parts, 2):
                backward(model, part)
            parts = private.loader.microbatches(size).again() if size else iter([private.loader.again()])
        for part in parts:
            backward(model, part)
        optimizer.step()
        gradients.append(released(model))
    assert same(*gradients)


class Centring(nn.Linear):
    """Moves all records to their mean, where autograd does not see it, as long as it `mixes`."""

    mixes = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.detach().mean(0) if self.mixes else x)


def test_what_was_found_in_a_batch_that_was_broken_off_is_not_held_against_the_next_attempt() -> None:
    for again in (False, True):
        model = Centring(FEATURES, CLASSES)
        optimizer = SGD(model.parameters(), lr=0.1)
        private = attach(model, optimizer)
        batch = next(iter(private.loader))
        model.mixes = True
        backward(model, batch)
        if again:
            model.mixes = False
            backward(model, private.loader.again())
            optimizer.step()
        else:
            with pytest.raises(clipless.UnsupportedModule, match="depends on the other records"):
                optimizer.step()
        assert private.ledger.steps == again
        private.detach()


def test_no_part_of_a_batch_comes_twice() -> None:
    """With two iterators over the parts of one batch, a part could take another's place and count twice."""
    model, _, private = fresh(batch_size=20)
    parts = next(iter(private.loader.microbatches(2)))
    backward(model, next(parts))
    one = private.loader.microbatches(2).again()
    backward(model, next(one))
    two = private.loader.microbatches(2).again()
    for old in (parts, one):
        with pytest.raises(Misuse, match="use the newest"):
            next(old)
    assert len(list(two)) > 2


def test_without_an_open_batch_there_is_nothing_to_hand_out_again() -> None:
    model, optimizer, private = fresh()
    with pytest.raises(Misuse, match=r"no batch to hand out again.*go on with the loader"):
        private.loader.again()
    backward(model, next(iter(private.loader)))
    optimizer.step()
    with pytest.raises(Misuse, match="no batch to hand out again"):
        private.loader.microbatches(2).again()


def test_two_iterators_at_a_time_are_refused_in_one_sentence() -> None:
    _, _, private = fresh()
    with pytest.raises(Misuse, match=r"Use one iterator at a time: zip\(loader, loader\) takes two batches"):
        next(zip(private.loader, private.loader, strict=True))


def test_after_detach_the_loader_hands_out_batches_to_whoever_asks() -> None:
    _, _, private = fresh(steps=5)
    private.detach()
    assert len(list(private.loader)) == 5


# No gradient in clear reaches the optimizer.


def test_a_frozen_parameter_does_not_keep_its_gradient_from_before() -> None:
    model = network()
    backward(model, dataset()[:])
    model[0].requires_grad_(False)
    before = [p.clone() for p in model[0].parameters()]
    optimizer = SGD(model.parameters(), lr=1.0)
    private = attach(model, optimizer)
    assert all(p.grad is None for p in model.parameters())
    backward(model, next(iter(private.loader)))
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(p.grad is None for p in model[0].parameters())
    assert same([p.detach() for p in model[0].parameters()], [p.detach() for p in before])


def test_a_gradient_of_a_refused_attempt_is_not_used() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=1.0, weight_decay=0.0)
    private = attach(model, optimizer)
    before = [p.detach().clone() for p in model[0].parameters()]
    model[0].requires_grad_(True)
    with suppress(Misuse, clipless.UnsupportedModule):
        backward(model, next(iter(private.loader)))
    with pytest.raises(Misuse, match="became trainable|without its backward"):
        optimizer.step()
    model[0].requires_grad_(False)
    for parameter in model[0].parameters():
        if parameter.grad is None:
            parameter.grad = torch.ones_like(parameter)
    backward(model, private.loader.again())
    optimizer.step()
    assert same([p.detach() for p in model[0].parameters()], before)


# Closures.


def evaluation(model: nn.Module, optimizer: Optimizer, batch: Any, calls: list[bool]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        return backward(model, batch)

    return closure


@pytest.mark.parametrize(
    ("make", "how"), [(SGD, "argument"), (SGD, "keyword"), (SGD, "no_grad"), (Adam, "argument"), (Adagrad, "no_grad")]
)
def test_a_closure_is_called_once_and_then_the_noise_is_added(make: Callable[..., Optimizer], how: str) -> None:
    outcomes = []
    for closed in (False, True):
        model, optimizer, private = fresh(make)
        calls: list[bool] = []
        for batch in private.loader:
            if not closed:
                backward(model, batch)
                optimizer.step()
                continue
            closure = evaluation(model, optimizer, batch, calls)
            expected = F.cross_entropy(model(batch[0]), batch[1]) if len(batch[0]) else None
            with torch.set_grad_enabled(how != "no_grad"):
                loss = optimizer.step(closure=closure) if how == "keyword" else optimizer.step(closure)
            assert expected is None or torch.equal(loss, expected)
        assert calls == [True] * (20 * closed)
        assert private.ledger.steps == 20
        outcomes.append([p.detach() for p in model.parameters()] + released(model))
    assert same(*outcomes)


def test_a_closure_is_not_called_where_the_step_is_refused() -> None:
    model, optimizer, private = fresh(steps=1)
    calls: list[bool] = []
    batch = next(iter(private.loader))
    backward(model, batch)
    optimizer.step(None)
    with pytest.raises(clipless.BudgetSpent):
        optimizer.step(evaluation(model, optimizer, batch, calls))
    assert not calls


def test_a_closure_that_fails_leaves_the_batch_open() -> None:
    model, optimizer, private = fresh()
    batch = next(iter(private.loader))

    def closure() -> Tensor:
        raise OSError("out of something")

    with pytest.raises(OSError, match="out of something"):
        optimizer.step(closure)
    assert private.ledger.steps == 0
    backward(model, batch)
    optimizer.step()
    assert private.ledger.steps == 1


@pytest.mark.parametrize("argument", [3, "loss", torch.ones(1)], ids=str)
def test_a_step_with_something_else_is_refused(argument: Any) -> None:
    model, optimizer, private = fresh()
    backward(model, next(iter(private.loader)))
    with pytest.raises(InvalidType, match="takes a closure or nothing"):
        optimizer.step(argument)
    assert private.ledger.steps == 0


class TwoGradients(SGD):
    """Looks at the loss somewhere else before it steps, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(0.1)
        return closure()


def test_an_optimizer_that_wants_a_second_gradient_is_refused() -> None:
    model, optimizer, private = fresh(TwoGradients)
    closure = evaluation(model, optimizer, next(iter(private.loader)), [])
    with pytest.raises(Misuse, match="one batch gives one private gradient"):
        optimizer.step(closure)
    assert private.ledger.steps == 1


# Subclasses of optimizers.


class Sub(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 1.0
        return super().step(closure)


class SubSub(Sub):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [Sub, SubSub])
@pytest.mark.parametrize("closed", [False, True])
def test_a_subclass_that_steps_by_its_base_works(kind: type[SGD], closed: bool) -> None:
    (
        SGD(network().parameters(), lr=0.1),
        Sub(network().parameters(), lr=0.1),
    )  # torch puts its hooks on a class at first use
    outcomes = []
    for make in (SGD, kind):
        model, optimizer, private = fresh(make)
        for batch in private.loader:
            if closed:
                assert optimizer.step(evaluation(model, optimizer, batch, [])) is not None
            else:
                backward(model, batch)
                optimizer.step()
        assert private.ledger.steps == 20
        outcomes.append([p.detach() for p in model.parameters()])
    assert same(*outcomes)


class Failing(Sub):
    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise OSError("out of something")
        return super().step(closure)


def test_a_step_that_failed_inside_does_not_let_the_next_one_pass() -> None:
    model, optimizer, private = fresh(Failing)
    backward(model, next(iter(private.loader)))
    with pytest.raises(OSError, match="out of something"):
        optimizer.step()
    optimizer.fails = False
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(Misuse, match="without a batch"):
        optimizer.step()
    assert same([p.detach() for p in model.parameters()], before)
    assert private.ledger.steps == 1


# Habits of plain training.


def by_norm(model: nn.Module, optimizer: Optimizer, private: Private) -> None:
    for batch in private.loader:
        backward(model, batch)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def by_value(model: nn.Module, optimizer: Optimizer, private: Private) -> None:
    """Where torch itself fails for want of gradients, the warning is there before."""
    for batch in private.loader:
        backward(model, batch)
        with suppress(RuntimeError):
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()


def by_closure(model: nn.Module, optimizer: Optimizer, private: Private) -> None:
    def closure(batch: Any) -> Tensor:
        loss = backward(model, batch)
        clip(model.parameters(), 1.0)
        return loss

    clip = clip_grad_norm_
    for batch in private.loader:
        optimizer.step(lambda batch=batch: closure(batch))


@pytest.mark.parametrize("loop", [by_norm, by_value, by_closure])
def test_clipping_gradients_that_are_not_there_is_warned_of_once(loop: Callable[..., None]) -> None:
    run = fresh(steps=4)
    with pytest.warns(UserWarning, match=r"clip_grad_\w+_ has no effect before step\(\).*clipping=") as found:
        loop(*run)
    assert len(found) == 1
    assert found[0].filename == __file__
    assert run[2].ledger.steps == 4


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [Adam, lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9), Adagrad])
def test_steps_before_the_first_are_warned_of_once(make: Callable[..., Optimizer], when: str) -> None:
    model = network()
    optimizer = make(model.parameters(), lr=0.1)
    backward(model, dataset()[:])
    optimizer.step()
    state = optimizer.state_dict()
    model = network()
    optimizer = make(model.parameters(), lr=0.1)

    def train() -> None:
        if when == "before":
            optimizer.load_state_dict(state)
        private = attach(model, optimizer)
        if when == "after":
            optimizer.load_state_dict(state)
        for batch in private.loader:
            backward(model, batch)
            optimizer.step()

    with pytest.warns(UserWarning, match="earlier steps, which this run's ledger does not count") as found:
        train()
    assert len(found) == 1
    assert found[0].filename == __file__


@pytest.mark.parametrize("make", [SGD, Adam, Adagrad])
def test_a_run_that_goes_on_with_its_ledger_is_not_warned(make: Callable[..., Optimizer]) -> None:
    model, optimizer, private = fresh(make)
    for batch in private.loader:
        backward(model, batch)
        optimizer.step()
        if private.ledger.steps == 3:
            break
    saved = private.state_dict(), optimizer.state_dict()
    model, optimizer, private = fresh(make)
    private.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in private.loader:
            backward(model, batch)
            optimizer.step()
    assert private.ledger.steps == 20

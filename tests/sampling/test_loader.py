"""Poisson batches: their law, that they do not depend on how they are fetched, and that empty ones are real steps."""

import itertools
import math
import os
import time
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info

import clipless
from clipless import InvalidArgument, Misuse, Private
from clipless.noise import noise_source
from clipless.sampling.fetching import fetcher
from clipless.sampling.loader import Batch, PoissonSampler, PrivateLoader

FEATURES, CLASSES = 4, 3


RUNS: list[Private] = []


@pytest.fixture(autouse=True)
def _workers_are_let_go() -> Iterator[None]:
    """At once: persistent workers that are left to the garbage collector make torch wait five seconds for each."""
    yield
    for private in RUNS:
        private.detach()
        vars(private).clear()
    RUNS.clear()


def attach(model: nn.Module, optimizer: Optimizer, data: Any, **changes: Any) -> Private:
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "steps": 10, "seed": 1, "accountant": "gdp"} | changes
    RUNS.append(clipless.make_private(model, optimizer, data, **{"loss_reduction": "sum", **settings}))
    return RUNS[-1]


def sampled(data: Any, **changes: Any) -> Private:
    """A run of which only the loader is of interest."""
    model = nn.Linear(FEATURES, CLASSES)
    return attach(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **changes)


def numbered(size: int) -> TensorDataset:
    """A data set whose records are their own numbers."""
    return TensorDataset(torch.arange(size))


def stepped(private: Private, batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, each handed on after its step: a gradient of zero rows, one for each record."""
    for batch in batches:
        private._model(torch.zeros(len(batch[0]), FEATURES)).sum().backward()
        private._optimizer.step()
        yield batch


def drawn(private: Private, part_size: int | None = None) -> list[list[int]]:
    """The record numbers of every batch of a pass over numbered records."""
    if part_size is None:
        return [batch[0].tolist() for batch in stepped(private, private.loader)]
    found = []
    for parts in private.loader.microbatches(part_size):
        found.append([])
        for part in parts:
            private._model(torch.zeros(len(part[0]), FEATURES)).sum().backward()
            found[-1] += part[0].tolist()
        private._optimizer.step()
    return found


# The law of the batches. A correct sampler is refused with the stated probability over seeds; the seed here is fixed.

SIZE, DRAWS = 120, 3000


class Indifferent:
    """A listener that lets batches be drawn without steps between them: the law of the draws is not the steps' concern."""

    def steps_left(self) -> None:
        return None

    def refuse_unstepped(self) -> None:
        pass

    def open_batch(self, batch: Batch) -> None:
        pass

    def reopen_batch(self) -> None:
        pass

    def open_part(self, records: int) -> None:
        pass


@pytest.fixture(scope="module", params=[6, 30, 108], ids=lambda batch: f"rate {batch / SIZE}")
def memberships(request: pytest.FixtureRequest) -> tuple[float, Tensor]:
    """The rate, and who is in which batch, [draw, record] of zeros and ones."""
    sampler = PoissonSampler(noise_source("seeded", 1), SIZE, request.param / SIZE)
    members = torch.zeros(DRAWS, SIZE, dtype=torch.float64)
    for draw, (records,) in enumerate(
        PrivateLoader(fetcher(numbered(SIZE), {}), sampler, DRAWS, Indifferent(), request.param)
    ):
        members[draw, records] = 1.0
    return sampler.rate, members


def outside(counts: Tensor, trials: int, probability: float, level: float = 1e-9) -> Tensor:
    """The counts that a binomial law falls short of, or exceeds, with at most that probability each; exact."""
    law = stats.binom(trials, probability)
    return counts[(counts < law.ppf(level)) | (counts > law.isf(level))]


def test_every_record_is_in_a_batch_with_the_planned_probability(memberships: tuple[float, Tensor]) -> None:
    """Two exact bounds at 1e-9 for each of 120 records: a false alarm for at most 1 seed in 4 million."""
    rate, members = memberships
    assert not len(outside(members.sum(0), DRAWS, rate))


def test_batch_sizes_follow_the_binomial_law(memberships: tuple[float, Tensor]) -> None:
    """Mean and variance within 5 sigma (about 6 seeds in ten million each), a chi-square test at one in a million."""
    rate, members = memberships
    sizes = members.sum(1)
    law = stats.binom(SIZE, rate)
    variance, kurtosis = law.var(), float(law.stats("k"))
    assert abs(sizes.mean().item() - law.mean()) < 5 * math.sqrt(variance / DRAWS)
    assert abs(sizes.var().item() - variance) < 5 * variance * math.sqrt((2 + kurtosis) / DRAWS)
    edges = sorted({int(law.ppf(p)) for p in torch.linspace(0.1, 0.9, 9).tolist()})
    expected = torch.tensor([law.cdf(edges[0]), *(law.cdf(b) - law.cdf(a) for a, b in itertools.pairwise(edges))])
    expected = torch.cat([expected, 1 - expected.sum(0, keepdim=True)]) * DRAWS
    observed = torch.bincount(torch.bucketize(sizes, torch.tensor(edges, dtype=torch.float64)), minlength=len(expected))
    assert stats.chisquare(observed.numpy(), expected.numpy() * (DRAWS / expected.sum().item())).pvalue > 1e-6


def test_records_are_drawn_independently_of_each_other(memberships: tuple[float, Tensor]) -> None:
    """How often two records meet: exact bounds for each of 7,140 pairs, a false alarm for at most 1 seed in 70,000."""
    rate, members = memberships
    pairs = torch.ones(SIZE, SIZE).triu(1).bool()
    assert not len(outside((members.T @ members)[pairs], DRAWS, rate**2))


@pytest.mark.parametrize("lag", [1, 2, 6])
def test_batches_are_drawn_independently_of_each_other(memberships: tuple[float, Tensor], lag: int) -> None:
    """How often a record is in both of two batches, over pairs of batches that do not overlap: at most 1 in 4 million."""
    rate, members = memberships
    earlier, later = members.view(-1, 2, lag, SIZE).unbind(1)
    assert not len(outside((earlier * later).sum((0, 1)), DRAWS // 2, rate**2))


def test_at_rate_one_everybody_is_in_every_batch() -> None:
    assert drawn(sampled(numbered(9), batch_size=9)) == [list(range(9))] * 10


# Draws are a function of the seed and their number, whatever is done with them.


class Numbers(Dataset[tuple[Tensor, int]]):
    """Records that must be fetched one by one; some take longer, so that workers finish out of order."""

    def __init__(self, size: int, slow: bool = False) -> None:
        self.size, self.slow = size, slow

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.slow and index % 3 == 0:
            time.sleep(0.002)
        return torch.tensor(index), os.getpid()


def with_workers(size: int, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(size, slow=True), batch_size=2, num_workers=2, **settings)


WAYS: dict[str, Callable[[int], Any]] = {
    "in memory": numbered,
    "subset": lambda size: Subset(TensorDataset(torch.arange(3 * size).flip(0)), range(3 * size - 1, 2 * size - 1, -1)),
    "subset of a subset": lambda size: Subset(Subset(numbered(size + 5), torch.arange(size + 2)), list(range(size))),
    "one by one": Numbers,
    "list": lambda size: [(torch.tensor(n),) for n in range(size)],
    "shuffled dataloader": lambda size: DataLoader(Numbers(size), batch_size=2, shuffle=True, drop_last=True),
    "workers": with_workers,
    "far ahead": lambda size: with_workers(size, prefetch_factor=5),
    "persistent": lambda size: with_workers(size, persistent_workers=True),
    "out of order": lambda size: with_workers(size, in_order=False),
}


@cache
def in_memory(steps: int) -> list[list[int]]:
    return drawn(sampled(numbered(20), batch_size=2, steps=steps))


@pytest.mark.parametrize("way", WAYS)
def test_the_same_seed_gives_the_same_batches_in_every_way_of_fetching(way: str) -> None:
    """Rate 1/10 of 20 records: one batch in eight is empty and is not fetched at all, which must not shift the others."""
    expected = in_memory(40)
    assert [] in expected
    assert len(set(map(tuple, expected))) > 15
    private = sampled(WAYS[way](20), batch_size=2, steps=40)
    assert drawn(private) == expected
    for part_size in (3,) if way in ("far ahead", "persistent", "out of order") else (1, 3):
        assert drawn(sampled(WAYS[way](20), batch_size=2, steps=40), part_size) == expected


@pytest.mark.parametrize("way", ["in memory", "one by one", "far ahead", "persistent"])
def test_a_pass_that_is_broken_off_loses_no_draw_and_repeats_none(way: str) -> None:
    expected = in_memory(30)
    private = sampled(WAYS[way](20), batch_size=2, epochs=3, steps=None)
    seen: list[list[int]] = []
    for taken in (3, 1, 10, 4, 10, 2):
        seen += [batch[0].tolist() for batch in itertools.islice(stepped(private, private.loader), taken)]
    assert seen == expected


def test_what_is_trained_does_not_change_the_batches() -> None:
    data = TensorDataset(torch.randn(30, FEATURES), torch.arange(30) % CLASSES, torch.arange(30))
    runs = []
    for rate in (0.1, 10.0):
        model = nn.Linear(FEATURES, CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        runs.append([])
        for x, y, number in attach(model, optimizer, data, batch_size=5).loader:
            runs[-1].append(number.tolist())
            F.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
    assert runs[0] == runs[1]


def test_other_seeds_give_other_batches() -> None:
    runs = [drawn(sampled(numbered(50), batch_size=10, seed=seed)) for seed in (1, 2, None, None)]
    assert all(one != other for one, other in itertools.combinations(runs, 2))
    assert all(one != other for run in runs for one, other in itertools.combinations(run, 2))


# How records are fetched.


@pytest.mark.parametrize("way", ["in memory", "subset", "subset of a subset"])
def test_tensors_in_memory_are_indexed_and_not_collated_one_by_one(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    private = sampled(WAYS[way](20), batch_size=5)

    def one_by_one(*args: object) -> None:
        raise AssertionError("a record was fetched by itself")

    for kind in (TensorDataset, Subset):
        for method in ("__getitem__", "__getitems__"):
            monkeypatch.setattr(kind, method, one_by_one, raising=False)
    assert sum(map(len, drawn(private))) > 0


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(2 * value for value in super().__getitem__(index))


class Halved(Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return tuple(value // 2 for value in super().__getitem__(index))

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("data", "factor"),
    [
        (Doubled(torch.arange(20)), 2),
        (Subset(Doubled(torch.arange(20)), range(20)), 2),
        (Halved(TensorDataset(6 * torch.arange(20)), range(20)), 3),
        (DataLoader(numbered(20), batch_size=5, collate_fn=lambda rows: [torch.stack([5 * n for (n,) in rows])]), 5),
    ],
    ids=["data set", "subset of it", "subset", "collate"],
)
def test_what_a_data_set_does_to_its_records_is_done(data: Any, factor: int) -> None:
    expected = drawn(sampled(numbered(20), batch_size=5))
    assert drawn(sampled(data, batch_size=5)) == [[factor * n for n in batch] for batch in expected]


@pytest.mark.parametrize("persistent", [True, False])
def test_records_are_fetched_by_the_dataloaders_own_workers(persistent: bool) -> None:
    loader = DataLoader(Numbers(40), batch_size=10, num_workers=2, persistent_workers=persistent)
    private = sampled(loader, batch_size=10, epochs=2, steps=None)
    batches = (stepped(private, private.loader) for _ in range(2))
    passes = [{process for _, processes in taken for process in processes.tolist()} for taken in batches]
    assert os.getpid() not in passes[0] | passes[1]
    assert len(passes[0]) == len(passes[1]) == 2
    assert (passes[0] == passes[1]) == persistent


class Stamped(Dataset[tuple[int, int]]):
    """What the worker's own start function left behind."""

    stamp = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, int]:
        worker = get_worker_info()
        return index, worker.dataset.stamp if worker else -1


def stamp_worker(number: int) -> None:
    get_worker_info().dataset.stamp = 100 + number


def test_the_workers_start_function_is_called() -> None:
    loader = DataLoader(Stamped(), batch_size=5, num_workers=2, worker_init_fn=stamp_worker)
    private = sampled(loader)
    stamps = {stamp for _, stamps in stepped(private, private.loader) for stamp in stamps.tolist()}
    assert stamps == {100, 101}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch warns of pinning without an accelerator only")
def test_pinned_memory_is_asked_for() -> None:
    loader = DataLoader(numbered(20), batch_size=5, pin_memory=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        next(iter(loader))
    if not told:
        pytest.skip(f"torch {torch.__version__} pins in silence")
    with pytest.warns(UserWarning, match="pin_memory"):
        drawn(sampled(loader))


def test_a_record_that_cannot_be_read_stops_the_pass_and_not_the_run() -> None:
    class Damaged(Numbers):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if index in broken:
                raise OSError(f"record {index} is unreadable")
            return super().__getitem__(index)

    broken = {3, 4, 5}
    private = sampled(Damaged(20), batch_size=10)
    with pytest.raises(OSError, match="unreadable"):
        drawn(private)
    with pytest.raises(OSError, match="unreadable"):
        private.loader.again()
    with pytest.raises(Misuse, match="hands it out once more"):  # who is in it decides whether it can be read
        drawn(private)
    taken = private.ledger.steps
    broken.clear()
    lost = [batch[0].tolist() for batch in stepped(private, [private.loader.again()])]
    found = lost + drawn(private)
    assert private.ledger.steps == 10
    assert found == drawn(sampled(numbered(20), batch_size=10))[taken:]


@pytest.mark.parametrize("kind", ["one by one", "workers"])
def test_after_a_record_that_cannot_be_read_the_pass_in_parts_is_over(kind: str) -> None:
    """Workers may have fetched it or not: what they give next could be taken for other records."""
    broken = {3}

    class Damaged(Numbers):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if index in broken:
                raise OSError(f"record {index} is unreadable")
            return super().__getitem__(index)

    data = Damaged(20) if kind == "one by one" else DataLoader(Damaged(20), batch_size=20, num_workers=1)
    private = sampled(data, batch_size=20)
    passed = iter(private.loader.microbatches(2))
    with pytest.raises(OSError, match="unreadable"):
        list(next(passed))
    broken.clear()
    for part in private.loader.microbatches(5).again():
        private._model(torch.zeros(len(part[0]), FEATURES)).sum().backward()
    private._optimizer.step()
    with pytest.raises(Misuse, match="a record could not be fetched"):
        next(passed)
    assert [sorted(batch) for batch in drawn(private)] == [list(range(20))] * 9


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_ranks_that_must_keep_in_step_have_the_same_number_of_parts(size: int) -> None:
    """Of the same draw, whoever has fewer records takes empty parts at the end, and no record is in two of them."""
    source, ranks = noise_source("seeded", 1), 3
    parts: list[list[list[Tensor]]] = []
    for rank in range(ranks):
        sampler = PoissonSampler(source, 40, 0.1, share=(rank, ranks), in_step=True)
        batches = PrivateLoader(fetcher(numbered(40), {}), sampler, 60, Indifferent(), 1).microbatches(size)
        parts.append([[part[0] for part in batch] for batch in batches])
    alone = PoissonSampler(source, 40, 0.1)
    uneven = 0
    for draw, batches in enumerate(zip(*parts, strict=True)):
        records = alone.indices(draw)
        assert {len(batch) for batch in batches} == {max(1, -(-len(records) // (ranks * size)))}
        assert torch.equal(torch.cat([part for batch in batches for part in batch]).sort().values, records)
        assert max(len(part) for batch in batches for part in batch) <= size
        uneven += len({sum(map(len, batch)) for batch in batches}) > 1
    assert uneven > 20


def test_lengths_are_those_of_a_pass() -> None:
    private = sampled(numbered(20), batch_size=3, epochs=4, steps=None)
    assert len(private.loader) == len(private.loader.microbatches(2)) == len(drawn(private)) == 7


# Empty batches: one batch in 2.7 at an expected batch of 1.


class RaisesWithoutRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            raise ValueError("I need at least one row")
        return super().forward(x)


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.view(x.shape[0], -1))


class Looping(nn.Module):
    """Has nothing to stack without records."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.stack([row / (1 + row.norm()) for row in x]))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = RaisesWithoutRows(FEATURES, CLASSES)

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(x)}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(FEATURES, CLASSES),
    "raises": lambda: nn.Sequential(RaisesWithoutRows(FEATURES, CLASSES)),
    "views": Viewing,
    "loops": Looping,
    "keywords": Keywords,
    "convolves": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.Linear(9, CLASSES)
    ),
}

ROWS = 40


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(ROWS, FEATURES, generator=generator), torch.arange(ROWS) % CLASSES)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    return model(x=x)["logits"] if isinstance(model, Keywords) else model(x)


def releases(
    make: Callable[[], nn.Module], data: Any, weight: float, unpack: Callable[[Any], tuple[Tensor, Tensor]] = tuple
) -> Iterator[tuple[int, Tensor]]:
    """Rows and released gradient of every step of a run that never moves; a weight of 0 leaves the noise alone."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    private = attach(model, optimizer, data, batch_size=1, steps=40)
    for step, batch in enumerate(private.loader, start=1):
        x, y = unpack(batch)
        optimizer.zero_grad()
        (weight * F.cross_entropy(logits(model, x), y, reduction="sum")).backward()
        optimizer.step()
        assert private.ledger.steps == step
        assert {int(state["step"]) for state in optimizer.state.values()} == {step}
        yield len(x), torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_empty_batches_release_noise_alone(
    make: Callable[[], nn.Module], data: Any, unpack: Callable[[Any], tuple[Tensor, Tensor]] = tuple
) -> None:
    rows = []
    for (count, noisy), (_, noise) in zip(
        releases(make, data, 1.0, unpack), releases(make, data, 0.0, unpack), strict=True
    ):
        assert torch.equal(noisy, noise) == (count == 0)
        assert noise.isfinite().all()
        assert (noise != 0).double().mean() > 0.8, "all but what lies on the grid's zero"
        rows.append(count)
    assert rows.count(0) >= 4, "there must be empty batches for the test to mean anything"


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_an_empty_batch_is_a_step_of_noise_for_every_model(make: Callable[[], nn.Module]) -> None:
    """Zero sum, noise, optimizer step, ledger entry; no record, real or made up, enters."""
    assert_empty_batches_release_noise_alone(make, records())


Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Carrier:
    x: Tensor
    y: Tensor


def stacked(rows: list[Any]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}


def as_pair(rows: list[Any]) -> Pair:
    return Pair(*stacked(rows).values())


def nested(rows: list[Any]) -> list[Any]:
    return [stacked(rows), ["name" for _ in rows], (torch.stack([y for _, y in rows]),)]


def through_lists(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Does not fail on an empty list, but forgets the shape and the type."""
    return torch.tensor([x.tolist() for x, _ in rows]), torch.tensor([int(y) for _, y in rows])


def carried(rows: list[Any]) -> Carrier:
    if not rows:
        return Carrier(torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.int64))
    return Carrier(**stacked(rows))


COLLATED: dict[str, tuple[Any, Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "dict": (stacked, lambda batch: (batch["x"], batch["y"])),
    "named tuple": (as_pair, lambda batch: (batch.x, batch.y)),
    "nested": (nested, lambda batch: (batch[0]["x"], batch[2][0])),
    "through lists": (through_lists, tuple),
    "object": (carried, lambda batch: (batch.x, batch.y)),
}


@pytest.mark.parametrize(("collate", "unpack"), COLLATED.values(), ids=COLLATED)
def test_an_empty_batch_is_a_step_of_noise_for_every_collate_function(
    collate: Callable[[list[Any]], Any], unpack: Callable[[Any], tuple[Tensor, Tensor]]
) -> None:
    loader = DataLoader(records(), batch_size=1, collate_fn=collate)
    assert_empty_batches_release_noise_alone(MODELS["raises"], loader, unpack)


def test_an_empty_batch_is_a_step_of_noise_for_records_that_are_dictionaries() -> None:
    rows = [{"x": x, "y": int(y), "name": f"record {y}"} for x, y in records()]
    assert_empty_batches_release_noise_alone(MODELS["raises"], rows, lambda batch: (batch["x"], batch["y"]))


@pytest.mark.parametrize(
    "data", [records(), Subset(records(), range(30)), list(records())], ids=["tensors", "subset", "list"]
)
def test_an_empty_batch_looks_like_any_other(data: Any) -> None:
    private = sampled(data, batch_size=1, steps=40)
    batches = stepped(private, private.loader)
    shapes = {(type(batch), len(batch), batch[0].shape[1:], batch[0].dtype, batch[1].dtype) for batch in batches}
    assert shapes == {(list, 2, torch.Size([FEATURES]), torch.float32, torch.int64)}


def test_an_empty_batch_moves_the_weights() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for x, y in attach(model, optimizer, records(), batch_size=1, steps=40).loader:
        before = model.weight.detach().clone()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
        assert torch.equal(model.weight, before - model.weight.grad)
        assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("part_size", [1, 2])
@pytest.mark.parametrize("data", [records(), list(records())], ids=["tensors", "list"])
def test_an_empty_batch_has_one_empty_part(data: Any, part_size: int) -> None:
    model = nn.Sequential(RaisesWithoutRows(FEATURES, CLASSES))
    optimizer = torch.optim.Adam(model.parameters())
    private = attach(model, optimizer, data, batch_size=1, steps=40)
    seen = []
    for parts in private.loader.microbatches(part_size):
        sizes = []
        for x, y in parts:
            sizes.append(len(x))
            F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
        seen.append(tuple(sizes))
    assert private.ledger.steps == 40
    assert seen.count((0,)) >= 4
    assert all(sizes == (0,) or 0 not in sizes for sizes in seen)


def test_a_batch_that_cannot_be_emptied_names_the_remedy() -> None:
    loader = DataLoader(records(), batch_size=1, collate_fn=lambda rows: Carrier(**stacked(rows)))
    private = sampled(loader, steps=40)

    def train() -> None:
        for batch in private.loader:
            private._model(batch.x).sum().backward()
            private._optimizer.step()

    with pytest.raises(InvalidArgument, match="let it accept an empty list of records"):
        train()

"""Who is a neighbour: what a plan may take from the number of records, and what follows where that is secret."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless import defaults
from clipless.errors import CliplessError, InvalidArgument
from clipless.neighbours import RELATIONS
from clipless.runs.ledger_file import read_ledger, sealed

SIZE, BATCH, STEPS = 60, 12, 6
SECRET: dict[str, Any] = {
    "neighbours": "add-remove", "sample_rate": 0.2, "steps": STEPS, "delta": 1e-5, "batch_size": BATCH,
    "noise_multiplier": 1.0, "seed": 5,
}  # fmt: skip


def dataset(size: int = SIZE) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SIZE, 3, generator=generator)[:size], torch.arange(SIZE)[:size] % 2)


class Run:
    """A private run of a small model, and all gradients that it released."""

    def __init__(self, data: Any, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.private = clipless.make_private(self.model, self.optimizer, data, **settings)
        self.drawn: list[int] = []
        self.released: list[Tensor] = []

    def train(self, weight: float = 1.0) -> "Run":
        for x, y in self.private.loader:
            self.drawn.append(len(x))
            self.optimizer.zero_grad()
            self.private.backward(weight * F.cross_entropy(self.model(x), y, reduction="none"))
            self.optimizer.step()
            self.released.append(torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]))
        return self


def public(run: Run) -> dict[str, Any]:
    """Everything about a run that others may see before its first step, and what it has spent."""
    private = run.private
    plan = private.plan
    stddevs = [plan.stddevs(step, private.thresholds).tolist() for step in range(STEPS)]
    named = {name: str(getattr(plan, name)) for name in dir(plan) if not name.startswith("_")}
    bound = {name for name in named if " at 0x" in named[name]}
    return {
        "plan": plan.to_dict(),
        "shown": str(plan),
        "attributes": {name: text for name, text in named.items() if name not in bound},
        "planned": plan.planned().to_dict(),
        "noise": stddevs,
        "divisor": plan.divisor(private.thresholds),
        "length": len(private.loader),
        "batch size": private.loader.batch_size,
        "parts": len(private.loader.microbatches(4)),
        "epochs": private.epochs,
        "spent": private.spent(),
        "state": private._state()["plan"],
    }


CLIPPINGS = {
    "auto-s": "auto-s",
    "dc-e": "dc-e",
    "dc-p": "dc-p",
    "quantile": "quantile",
    "decay": "decay",
    "schedule": clipless.schedule([(0.5, "abadi"), (0.5, clipless.global_())]),
}


@pytest.mark.parametrize("source", ["data set", "loader", "jl", "unit gradients"])
@pytest.mark.parametrize("clipping", CLIPPINGS.values(), ids=CLIPPINGS)
def test_a_plan_with_a_secret_number_of_records_does_not_depend_on_it(
    clipping: Any, source: str, tmp_path: Path
) -> None:
    more = {"jl": {"gradients": "jl"}, "unit gradients": {"unit_gradients": True}}.get(source, {})
    seen, headers = [], []
    for size in (SIZE, SIZE - 1, 5):
        data = dataset(size)
        run = Run(
            DataLoader(data, batch_size=BATCH) if source == "loader" else data, **SECRET, clipping=clipping, **more
        )
        run.private.save_to(tmp_path / f"{size}.jsonl")
        header = json.loads((tmp_path / f"{size}.jsonl").read_text().splitlines()[0])
        headers.append({name: value for name, value in header.items() if name not in ("run", "hash")})
        seen.append(public(run))
    assert seen[0] == seen[1] == seen[2]
    assert headers[0] == headers[1] == headers[2]
    assert seen[0]["plan"]["dataset_size"] is None
    assert len(run.private.loader) == run.private.plan.steps == STEPS
    assert run.private.epochs == 1


def test_noise_and_divisor_are_the_same_whatever_the_number_of_records() -> None:
    """Losses without a gradient: what is released is the noise, divided."""
    one, other = (Run(dataset(size), **SECRET).train(weight=0.0) for size in (SIZE, SIZE - 1))
    assert all(map(torch.equal, one.released, other.released))
    assert one.private.ledger == other.private.ledger
    assert one.private.spent() == other.private.spent()


def test_one_record_more_changes_no_other_records_chance() -> None:
    """With the same key the draws are the same but for that record, so what is released differs by its clipped gradient."""
    one, other = (Run(dataset(size), **SECRET | {"steps": 40}).train() for size in (SIZE, SIZE - 1))
    more = torch.tensor(one.drawn) - torch.tensor(other.drawn)
    assert set(more.tolist()) == {0, 1}
    moved = torch.stack(one.released).sub(torch.stack(other.released)).norm(dim=1) * BATCH
    assert float(moved[more == 0].max()) == 0
    assert float(moved[more == 1].min()) > 0.5
    assert float(moved.max()) <= 1 + 1 / 32  # the threshold, and the grid of the noise


def test_by_default_the_number_of_records_is_public_and_in_the_plan() -> None:
    one, other = (Run(dataset(size), delta=1e-5, noise_multiplier=1.0, batch_size=BATCH, epochs=1) for size in (60, 40))
    plan = one.private.plan
    assert (plan.neighbours, plan.dataset_size, plan.sample_rate) == ("zero-out", 60, 0.2)
    assert (len(one.private.loader), len(other.private.loader)) == (5, 3)
    assert plan.to_dict()["neighbouring"] == RELATIONS["zero-out"]
    for fragment in ("zero-out: one record is replaced by an empty one", "number of records is public", "60 records"):
        assert fragment in str(plan)
    shown = str(Run(dataset(), **SECRET).private.plan)
    assert "add-remove: one record is added or removed, and the number of records is secret" in shown
    assert "60" not in shown


@pytest.mark.parametrize("accountant", ["pld", "rdp", "gdp"])
def test_both_relations_cost_the_same_at_the_same_rate(accountant: str) -> None:
    """The multipliers and epsilons are those of before there were relations."""
    shared = {"delta": 1e-5, "batch_size": BATCH, "steps": STEPS, "accountant": accountant}
    before = {
        "pld": (2.3960766303853283, 1.3025696844236592),
        "rdp": (2.630641481665251, 1.5037328664944791),
        "gdp": (1.9572229072414211, 0.97151043457353),
    }[accountant]
    secret = {"neighbours": "add-remove", "sample_rate": BATCH / SIZE}
    for relation in ({}, secret):
        by_epsilon = Run(dataset(), **shared, **relation, epsilon=1.0).private.plan
        by_noise = Run(dataset(), **shared, **relation, noise_multiplier=2.0).private.plan
        assert (by_epsilon.noise_multiplier, by_noise.epsilon) == pytest.approx(before, rel=1e-9)
        assert by_epsilon.noise_multiplier == clipless.noise_multiplier(1.0, 1e-5, BATCH / SIZE, STEPS, accountant)


REFUSED = {
    "no rate": ({"sample_rate": None}, r"give sample_rate= too, .* steps="),
    "no delta": ({"delta": None}, "give delta= too"),
    "neither": ({"delta": None, "sample_rate": None}, "give sample_rate= and delta= too"),
    "no steps": ({"steps": None}, "give steps=, the length of the run"),
    "epochs": ({"steps": None, "epochs": 2}, "give steps= in place of epochs="),
    "both": ({"epochs": 2}, "give steps= in place of epochs="),
    "no batch size": ({"batch_size": None}, "give batch_size="),
    "a rate above 1": ({"sample_rate": 1.5}, r"must lie in \(0, 1\]"),
    "a rate of 0": ({"sample_rate": 0.0}, r"must lie in \(0, 1\]"),
    "a rate in words": ({"sample_rate": "0.2"}, "sample_rate must be a number"),
    "a rate with a public number": ({"neighbours": "zero-out"}, "leave sample_rate= out"),
    "another relation": ({"neighbours": "replace"}, "unknown neighbours 'replace'.*Valid: 'zero-out', 'add-remove'"),
    "none": ({"neighbours": None}, "unknown neighbours None"),
    "spent": ({"noise_multiplier": None}, "give epsilon="),
    "a large step": ({"steps": 0}, "steps must be at least 1"),
    "columns": ({"dataset": lambda size: (torch.ones(size, 2), torch.ones(size))}, "holds columns"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_does_not_tell_the_number_of_records(case: str) -> None:
    changes, remedy = REFUSED[case]
    changes = dict(changes)
    make = changes.pop("dataset", dataset)
    said = []
    for size in (SIZE, SIZE - 1):
        with pytest.raises(CliplessError, match=remedy) as refused:
            Run(make(size), **SECRET | changes)
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_a_batch_size_above_the_secret_number_of_records_is_accepted() -> None:
    """It is a divisor; to refuse it would tell."""
    run = Run(dataset(8), **SECRET).train()
    assert run.private.plan.expected_batch == run.private.loader.batch_size == BATCH
    with pytest.raises(InvalidArgument, match="use at most 8"):
        Run(dataset(8), delta=1e-5, noise_multiplier=1.0, batch_size=BATCH, steps=2)


def test_the_default_delta_is_a_tenth_of_one_over_n_or_less() -> None:
    for size in (1, 20, 60, 10_000, 60_000, 10**9):
        assert defaults.delta(size) == min(1e-5, 1 / (10 * size))
        assert clipless.arguments.large_delta_note(defaults.delta(size), size) is None
    plan = Run(dataset(), noise_multiplier=1.0, batch_size=BATCH, steps=2).private.plan
    assert plan.delta == 1e-5
    assert Run(dataset(1), noise_multiplier=1.0, batch_size=1, steps=2).private.plan.delta == 1e-5


@pytest.mark.parametrize(("delta", "warned"), [(1 / 600, False), (1 / 599, True), (0.5, True)])
def test_a_delta_above_a_tenth_of_one_over_n_is_warned_of(delta: float, warned: bool) -> None:
    """Where the number of records is secret, by the one that batch size and rate suggest, here 60 too."""
    with warnings.catch_warnings(record=True, action="always") as told:
        Run(dataset(), delta=delta, noise_multiplier=1.0, batch_size=BATCH, steps=2)
        Run(dataset(5), **SECRET | {"delta": delta})
    messages = [str(one.message) for one in told]
    assert len(messages) == 2 * warned
    assert all("is above 1/(10 N) for N=60" in one and "up to 1/600" in one for one in messages)
    assert all(one.filename == __file__ for one in told)


def test_a_record_of_privacy_has_the_relation() -> None:
    privacy = clipless.Privacy(epsilon=3.0, delta=1e-5, neighbours="add-remove", sample_rate=0.2)
    run = Run(dataset(), **privacy.arguments(), batch_size=BATCH, steps=2)
    assert run.private.plan.neighbours == "add-remove"
    assert clipless.Privacy(epsilon=3.0).neighbours == "zero-out"
    assert "neighbours='zero-out'" in repr(clipless.Privacy(epsilon=3.0))
    read = {"epsilon": 3, "neighbours": "add-remove", "sample_rate": 0.2, "delta": 1e-5}
    assert clipless.Privacy.from_dict(read) == privacy
    for wrong in ({"sample_rate": 0.2}, {"neighbours": "add-remove"}, {"neighbours": "replace"}):
        with pytest.raises(InvalidArgument):
            clipless.Privacy(epsilon=3.0, **wrong)


def as_stored_before(plan: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name != "neighbours"} | {
        "neighbouring": "add or remove one record"
    }


def test_a_state_of_before_there_were_relations_is_taken() -> None:
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": BATCH, "steps": 4, "seed": 3}
    first = Run(dataset(), **settings).train()
    state = first.private.state_dict()
    state["plan"] = as_stored_before(state["plan"])
    again = Run(dataset(), **settings)
    again.private.load_state_dict(state)
    assert again.private.ledger == first.private.ledger
    secret = Run(dataset(), **settings, neighbours="add-remove", sample_rate=BATCH / SIZE)
    with pytest.raises(InvalidArgument, match="another plan.*neighbours"):
        secret.private.load_state_dict(state)


def test_a_ledger_of_before_there_were_relations_is_read(tmp_path: Path) -> None:
    run = Run(dataset(), noise_multiplier=1.0, delta=1e-5, batch_size=BATCH, steps=4)
    run.private.save_to(tmp_path / "ledger.jsonl")
    header = json.loads((tmp_path / "ledger.jsonl").read_text())
    del header["hash"]
    (tmp_path / "old.jsonl").write_bytes(sealed(header | {"plan": as_stored_before(header["plan"])})[0])
    assert read_ledger(tmp_path / "old.jsonl").plan["neighbouring"] == "add or remove one record"


# What literal add-or-remove gives at a rate that is computed from the number of records. One record pulls against all
# others; without it, each of the others is drawn with another chance. The attacker adds up all steps: binomial numbers and
# a normal one, so both error rates are exact.

N, EXPECTED, NOISE, LONG = 1000, 16, 10.0, 2000


def planned(size: int, **relation: Any) -> Any:
    """The plan of that many records."""
    data = TensorDataset(torch.zeros(size, 3), torch.zeros(size, dtype=torch.long))
    settings = {"noise_multiplier": NOISE, "delta": 1e-5, "batch_size": EXPECTED, "steps": LONG}
    return Run(data, **settings, **relation).private.plan


def binomial(count: int, rate: float) -> tuple[int, NDArray[np.float64]]:
    """The least number that matters, and the probabilities from there on."""
    reach = 12 * math.sqrt(count * rate)
    least = max(0, math.floor(count * rate - reach))
    return least, stats.binom.pmf(np.arange(least, count * rate + reach), count, rate)


def above(thresholds: NDArray[np.float64], others: int, rate: float, *, taking_part: bool) -> NDArray[np.float64]:
    """The probabilities that the sum of all steps is above these thresholds."""
    least, probabilities = binomial(LONG * others, rate)
    if taking_part:
        own_least, own = binomial(LONG, rate)
        least -= own_least + len(own) - 1
        probabilities = np.convolve(probabilities, own[::-1])
    sums = least + np.arange(len(probabilities))
    stddev = NOISE * math.sqrt(LONG)
    return np.array([probabilities @ stats.norm.sf((threshold - sums) / stddev) for threshold in thresholds])


def proven(with_it: Any, without: Any, delta: float) -> float:
    """The least epsilon that the attack's error rates allow."""
    thresholds = np.linspace(29_000, 35_000, 241)
    took_part = above(thresholds, N - 1, with_it.sample_rate, taking_part=True)
    left = above(thresholds, N - 1, without.sample_rate, taking_part=False)
    ratios = [(left - delta) / took_part, (1 - took_part - delta) / (1 - left)]
    return math.log(max(float(ratio[np.isfinite(ratio)].max()) for ratio in ratios))


def test_at_a_rate_computed_from_n_the_claim_holds_for_an_empty_record_and_not_for_one_less() -> None:
    plan = planned(N)
    assert plan.epsilon == pytest.approx(0.238, abs=5e-4)
    assert proven(plan, planned(N), 1e-5) <= plan.epsilon  # the record is empty, and N the same
    assert proven(plan, planned(N - 1), 1e-5) >= 0.457  # the record is gone, and the rate another


def test_at_a_public_rate_the_claim_holds_for_one_record_less() -> None:
    public_rate = {"neighbours": "add-remove", "sample_rate": EXPECTED / N}
    plan, without = planned(N, **public_rate), planned(N - 1, **public_rate)
    assert plan == without
    assert plan.epsilon == pytest.approx(0.238, abs=5e-4)
    assert proven(plan, without, 1e-5) <= plan.epsilon

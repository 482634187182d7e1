"""gradients="jl": the law of its norms, its releases by hand, agreement with the exact engine, and what it refuses."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import clipless
from clipless.clipping import RULES, abadi
from clipless.errors import InvalidArgument, Misuse, UnsupportedModule
from clipless.gradients.checks.self_check import CheckSchedule
from clipless.gradients.projections import ProjectionEngine
from clipless.noise import noise_source
from clipless.noise.keys import KEY, SeededKeys, keystream
from clipless.noise.normals import standard_normals
from clipless.plan import RESERVE
from commanding import run_main
from noising import assert_on_grid, seeded_normals
from small_run import STEPS, Run, begin, dataset

Classes = 3


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(20, 6), nn.LSTM(6, 8, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(8, Classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(20, 8), nn.Parameter(torch.randn(7, 8) * 0.1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, Classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.table(x) + self.positions).mean(1))


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(36, Classes))


def words(records: int) -> Tensor:
    return torch.randint(20, (records, 7))


def images(records: int) -> Tensor:
    return torch.randn(records, 1, 8, 8)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "lstm": (Sequences, words),
    "cnn": (convolutional, images),
    "encoder": (Encoder, words),
}


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def projected(
    model: nn.Module, x: Tensor, y: Tensor, projections: int, rule: Any = None, step: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """The clipped sum and the norms of one batch, by the engine alone."""
    source, norms = noise_source(seed=11), []

    def factors(found: Tensor, groups: Sequence[int]) -> Tensor:
        return torch.ones_like(found) if rule is None else rule(found, torch.ones(1, 1))

    engine = ProjectionEngine(model, factors, norms.append, lambda j, like: source.vector(step, j, like), projections)
    engine.attach()
    try:
        engine.open(len(x), averaged=False)
        engine.backward(losses_of(model, x, y))
        engine.refuse_unsound()
        return engine.complete(), norms[0]
    finally:
        engine.detach()


def exact_norms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return clipless.oracle.clipped_sum(model, lambda m, b: losses_of(m, *b), (x, y), "abadi").norms


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    ours, theirs = (torch.cat([sums[name].flatten().double() for name in other]) for sums in (one, other))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("r", [1, 5])
def test_the_norms_have_the_chi_square_law(r: int) -> None:
    """200 steps, a fresh set of vectors in each; Kolmogorov-Smirnov, fixed seed, false alarm 1e-4."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(2, 4), torch.tensor([0, 2])
    truth = exact_norms(model, x, y)
    seen = torch.cat([projected(model, x, y, r, step=step)[1] for step in range(200)])  # [steps, records]
    for record in range(2):
        found = r * (seen[:, record] / truth[0, record]).square().double()
        assert stats.kstest(found.numpy(), stats.chi2(r).cdf).pvalue > 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_both_engines_agree_as_projections_grow(name: str) -> None:
    """Without clipping the sums are the same; with it, they differ by the error of the norms, about 1/√(2r)."""
    make, data = MODELS[name]
    torch.manual_seed(0)
    model, x, y = make(), data(6), torch.randint(Classes, (6,))
    model.eval()  # the two engines draw their random numbers apart
    plain = abadi(threshold=1e6)
    exact = clipless.clipped_sum(model, lambda m, b: losses_of(m, *b), (x, y), plain)
    assert distance(projected(model, x, y, 1)[0], exact.grads) < 1e-5
    clipped = clipless.clipped_sum(model, lambda m, b: losses_of(m, *b), (x, y), "auto-v").grads
    few, many = (distance(projected(model, x, y, r, RULES["auto-v"])[0], clipped) for r in (3, 300))
    assert many < few
    assert many < 0.12  # 300 projections: 4 %


@pytest.mark.parametrize("name", MODELS)
def test_models_train(name: str) -> None:
    make, data = MODELS[name]
    torch.manual_seed(0)
    model, x, y = make(), data(40), torch.randint(Classes, (40,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private = clipless.make_private(
        model, optimizer, TensorDataset(x, y), batch_size=10, steps=3, epsilon=8.0, delta=1e-3, gradients="jl",
        projections=4, seed=1, loss_reduction="mean"
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    for a, b in private.loader:
        optimizer.zero_grad()
        private.backward(losses_of(model, a, b))
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert 0.9 * 8 < private.spent().epsilon <= 8
    private.detach()


# Releases by hand.


def vectors(seed: int, step: int, number: int, like: Sequence[Tensor]) -> list[Tensor]:
    key = keystream(SeededKeys(seed).key("projection", step), 2 * number, KEY)
    numbers = torch.from_numpy(standard_normals(key, sum(one.numel() for one in like))).float()
    return [p.view(one.shape) for p, one in zip(numbers.split([one.numel() for one in like]), like, strict=True)]


CASES: dict[str, tuple[Any, Callable[[float, int], float], Callable[[int], float]]] = {
    "auto-s": ("auto-s", lambda n, step: 1 / (n + 0.01), lambda step: 1.0),
    "abadi": (clipless.abadi(0.3), lambda n, step: min(1, 0.3 / n), lambda step: 0.3),
    "global": (clipless.global_(2.0, 0.5), lambda n, step: 0.25 if n <= 2 else 0.0, lambda step: 0.5),
    "schedule": (
        clipless.schedule([(0.5, "auto-v"), (0.5, clipless.global_(2.0))]),
        lambda n, step: 1 / n if step < 2 else float(n <= 2),
        lambda step: 1.0 if step < 2 else 2.0,
    ),
}


@pytest.mark.parametrize("parts", [None, 7])
@pytest.mark.parametrize("name", CASES)
def test_each_release_is_the_sum_clipped_by_the_estimates_plus_noise(name: str, parts: int | None) -> None:
    """Vectors, norms, factors, sums and noise computed apart from the engine."""
    clipping, factor, threshold = CASES[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    data = TensorDataset(torch.randn(80, 5) * 3, torch.randint(3, (80,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    private = clipless.make_private(
        net, optimizer, data, batch_size=20, steps=4, clipping=clipping, seed=5, delta=1e-5, noise_multiplier=1.3,
        gradients="jl", projections=3, loss_reduction="mean"
    )  # fmt: skip
    for step, some in enumerate(private.loader.microbatches(parts or 80)):
        weights, records = {n: p.detach().clone() for n, p in net.named_parameters()}, []
        for x, y in some:
            records.append((x, y))
            private.backward(losses_of(net, x, y))
        optimizer.step()
        x, y = (torch.cat(column) for column in zip(*records, strict=True))
        grads = per_record(net, weights, x, y)
        squares = torch.zeros(len(x), dtype=torch.float64)
        for number in range(3):
            us = vectors(5, step, number, list(weights.values()))
            product = sum(
                torch.tensordot(g.flatten(1), u.double().flatten(), 1) for g, u in zip(grads, us, strict=True)
            )
            squares += torch.as_tensor(product).square()
        factors = torch.tensor([factor(float(n), step) for n in (squares / 3).sqrt()], dtype=torch.float64)
        normals, stddev = seeded_normals(5, "gradient", step, weights.values()), 1.3 * threshold(step) * (1 + RESERVE)
        for p, g, noise in zip(net.parameters(), grads, normals, strict=True):
            expected = torch.tensordot(factors, g, 1) + stddev * noise
            assert p.grad is not None
            assert_on_grid(p.grad, expected, stddev, 5e-5 * (stddev + float(expected.abs().max())), divisor=20)
        optimizer.zero_grad()
    private.detach()


def per_record(net: nn.Module, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights, (x.unsqueeze(0),)), y.unsqueeze(0))

    wide = {name: value.double() for name, value in weights.items()}
    return list(vmap(grad(loss), (None, 0, 0))(wide, x.double(), y).values())


def run(**options: Any) -> "Steps":
    given = {"gradients": "jl", "projections": 4, "accountant": "pld", "noise_multiplier": 2.0, **options}
    made = begin(**given)
    return Steps(made.model, made.optimizer, made.scheduler, made.private)


class Steps(Run):
    """Steps from one loss per record."""

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.private.backward(F.cross_entropy(self.model(x), y, reduction="none"))
        self.optimizer.step()
        self.scheduler.step()


@pytest.mark.parametrize("clipping", ["auto-s", "global", "dc-e", "quantile", "decay"])
def test_runs_resume_bit_for_bit_and_record_their_projections(tmp_path: Path, clipping: str) -> None:
    whole = run(clipping=clipping).go().close()
    first = run(clipping=clipping)
    first.private.save_to(tmp_path / "ledger.jsonl")
    first.go(5).save(tmp_path / "run.pt")
    first.go(3).close()
    resumed = run(seed=99, clipping=clipping).load(tmp_path / "run.pt").go().close()
    assert torch.equal(resumed.weights(), whole.weights())
    assert torch.equal(resumed.private.thresholds, whole.private.thresholds)
    assert resumed.private.ledger == whole.private.ledger == whole.private.plan.planned()
    assert all(event.projections == 4 for event, _ in whole.private.ledger.events)  # type: ignore[attr-defined]
    found = clipless.read_ledger(tmp_path / "ledger.jsonl")
    assert found.spent().epsilon == whole.private.spent().epsilon > clipless.epsilon(2.0, 12 / 60, STEPS, 1e-5)


def test_a_report_says_that_norms_were_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run()
    made.private.save_to(tmp_path / "ledger.jsonl")
    made.go(2).close()
    shown = run_main(["report", "ledger.jsonl"], tmp_path, capsys)
    assert shown.returncode == 0, shown.stderr
    assert "estimated by 4 random projections" in shown.stdout


def test_secure_noise_gives_other_vectors_in_every_run() -> None:
    one, two = (run(seed=None).private._source.vector(0, 0, [torch.zeros(5)])[0] for _ in range(2))
    assert not torch.equal(one, two)


def test_vectors_are_standard_normal_and_not_those_of_the_noise() -> None:
    source = noise_source(seed=3)
    like = [torch.zeros(2000), torch.zeros(40, 50)]
    many = torch.stack([torch.cat([v.flatten() for v in source.vector(0, j, like)]) for j in range(6)])
    assert stats.kstest(many.flatten().numpy(), stats.norm.cdf).pvalue > 1e-4
    assert float(torch.corrcoef(many).fill_diagonal_(0).abs().max()) < 0.08
    assert not torch.equal(source.vector(1, 0, like)[0], source.vector(0, 0, like)[0])
    noise = torch.cat([one.flatten() for one in seeded_normals(3, "gradient", 0, like)])
    assert abs(float(torch.corrcoef(torch.stack([many[0], noise.float()]))[0, 1])) < 0.08


def test_a_budget_is_kept_and_costs_more_noise_than_exact_norms() -> None:
    plans = {r: run(projections=r, noise_multiplier=None, epsilon=3.0).private.plan for r in (5, 20, 100)}
    exact = clipless.noise_multiplier(3.0, 1e-5, 12 / 60, STEPS)
    assert plans[5].noise_multiplier > plans[20].noise_multiplier > plans[100].noise_multiplier > exact
    for plan in plans.values():
        assert 2.9 < plan.planned().spent(1e-5).epsilon <= 3.0
        assert "random projections" in str(plan)


# Records that are not finite, no records, and anything else that may be in a batch.


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_record_that_is_not_finite_adds_nothing_and_changes_nothing(bad: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    x, y = torch.randn(6, 3), torch.randint(3, (6,))
    rest = torch.tensor([0, 1, 3, 4, 5])
    expected, norms = projected(model, x[rest], y[rest], 4, RULES["auto-v"])
    x[2] = bad
    found, seen = projected(model, x, y, 4, RULES["auto-v"])
    assert torch.isinf(seen[0, 2])
    torch.testing.assert_close(seen[0, rest], norms[0], rtol=1e-5, atol=0)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    x[:] = bad
    everything, _ = projected(model, x, y, 4, RULES["auto-v"])
    assert all(not value.any() for value in everything.values())


def test_an_empty_batch_is_noise_only() -> None:
    made = run(batch_size=1, steps=12, clipping="dc-e", accountant="pld")
    sizes = []
    for x, y in made.private.loader:
        sizes.append(len(x))
        made.step(x, y)
    assert 0 in sizes
    assert made.private.ledger.steps == 12
    made.close()


def test_outputs_may_be_changed_in_place_and_lie_in_a_dictionary() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layer(x), "rows": torch.arange(len(x))}

    torch.manual_seed(0)
    model, x, y = Wrapped(), torch.randn(5, 3), torch.randint(3, (5,))

    def losses(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = m(batch[0])["logits"]
        out.mul_(2.0)
        return F.cross_entropy(out, batch[1], reduction="none")

    exact = clipless.oracle.clipped_sum(model, losses, (x, y), abadi(1e6)).grads
    engine = ProjectionEngine(
        model, lambda n, g: torch.ones_like(n), None, lambda j, like: [torch.randn_like(one) for one in like], 2
    )
    engine.attach()
    engine.open(5, averaged=False)
    engine.backward(losses(model, (x, y)))
    assert distance(engine.complete(), exact) < 1e-5
    engine.detach()


def test_padding_has_no_gradient_in_forward_mode_either() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3))
    x, y = torch.randint(0, 3, (8, 3)), torch.randint(3, (8,))
    norms = projected(model, x, y, 400)[1]
    torch.testing.assert_close(norms, exact_norms(model, x, y), rtol=0.2, atol=0)


def test_the_model_may_be_called_twice_for_one_loss() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.randn(5, 3)

    def losses(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (m(batch[0]) - m(batch[1])).square().sum(1)

    truth = clipless.oracle.clipped_sum(model, losses, (x, y), abadi(1e6))
    source, norms = noise_source(seed=1), []
    engine = ProjectionEngine(model, lambda n, g: torch.ones_like(n), norms.append, source_of(source), 500)
    engine.attach()
    engine.open(5, averaged=False)
    engine.backward(losses(model, (x, y)))
    assert distance(engine.complete(), truth.grads) < 1e-5
    torch.testing.assert_close(norms[0], truth.norms, rtol=0.2, atol=0)
    engine.detach()


def source_of(source: Any) -> Any:
    return lambda j, like: source.vector(0, j, like)


def test_frozen_parameters_and_sparse_tables_are_left_to_autograd() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3))
    model[2].requires_grad_(False)
    x, y = torch.randint(9, (6, 3)), torch.randint(3, (6,))
    dense = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3))
    dense.load_state_dict(model.state_dict())
    dense[2].requires_grad_(False)
    exact = clipless.oracle.clipped_sum(dense, lambda m, b: losses_of(m, *b), (x, y), abadi(1e6)).grads
    found = projected(model, x, y, 2)[0]
    assert found.keys() == exact.keys() == {"0.weight", "3.weight", "3.bias"}
    assert distance(found, exact) < 1e-5


class Rounding(nn.Linear):
    """Its first pass is another function than all later ones, by a little, as another kernel's rounding can make it."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        factor, self.factor = self.factor, 1.0
        return super().forward(x) * factor


@pytest.mark.parametrize("factor", [1.0, 1.02, 1.2])
def test_the_sum_is_that_of_the_gradients_whose_norms_were_estimated(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckSchedule, "due", lambda self, records: False)  # a check would see it
    torch.manual_seed(0)
    model, x, y = Rounding(4, 3), torch.randn(6, 4), torch.randint(3, (6,))
    first = x @ model.weight.T * factor + model.bias * factor
    at_output = torch.autograd.grad(F.cross_entropy(first, y, reduction="sum"), first)[0]
    model.factor = factor
    if factor > 1.05:
        with pytest.raises(UnsupportedModule, match="do not agree"):
            projected(model, x, y, 3)
        return
    found = projected(model, x, y, 3)[0]
    torch.testing.assert_close(found["weight"].float(), at_output.T @ x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["model", "losses"])
def test_after_an_exception_the_same_batch_gives_the_same_release(where: str) -> None:
    torch.manual_seed(0)
    trouble = {"model": False, "losses": False}

    class Fragile(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if trouble["model"]:
                raise OSError("out of memory")
            return super().forward(x)

    released = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Fragile(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = clipless.make_private(
            model, optimizer, dataset(), gradients="jl", projections=3, batch_size=20, steps=2, noise_multiplier=1.0,
            seed=1, delta=1e-5, loss_reduction="mean"
        )  # fmt: skip
        x, y = next(iter(private.loader))
        if interrupted:
            trouble[where] = True
            with pytest.raises((OSError, Misuse, InvalidArgument)):
                private.backward(per_class(model(x), y) if where == "model" else per_class(model(x), y).mean())
            trouble[where] = False
            x, y = private.loader.again()
        with torch.no_grad():
            model(torch.randn(3, 5))  # a look at something else
        private.backward(per_class(model(x), y))
        optimizer.step()
        released.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        private.detach()
    assert torch.equal(*released)


# Refusals.


class WithoutForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Custom(nn.Module):
    """A linear layer, and something after it."""

    def __init__(self, after: Callable[["Custom", Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.scale, self.after = nn.Linear(5, 2), nn.Parameter(torch.ones(2)), after
        self.own: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.layer(x)) * self.scale


def remembering(module: Custom, x: Tensor) -> Tensor:
    module.own.append(1)
    return x * len(module.own)


def under_no_grad(module: Custom, x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = module.layer.weight.sum()
    return x * factor


REFUSED_MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)), "BatchNorm1d '1' mixes records"),
    "no jvp": (lambda: Custom(lambda m, x: WithoutForwardMode.apply(x)), "no forward-mode derivative"),  # type: ignore[no-untyped-call]
    "batch mean": (lambda: Custom(lambda m, x: x - x.mean(0)), "depends on the other records"),
    "detached mean": (lambda: Custom(lambda m, x: x / x.detach().abs().mean()), "depends on the other records"),
    "a little of another record": (
        lambda: Custom(lambda m, x: x + 1e-4 * x.roll(1, 0)),
        "depends on the other records",
    ),
    "memory": (lambda: Custom(remembering), "do not agree|run twice on the same"),
    "no_grad": (lambda: Custom(under_no_grad), "do not agree"),
    "half": (lambda: nn.Linear(5, 2).bfloat16(), "bfloat16"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED_MODELS.values(), ids=REFUSED_MODELS)
def test_models_that_cannot_be_bounded_or_estimated_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    torch.manual_seed(0)
    model = make()
    with pytest.raises(UnsupportedModule, match=message):
        train(model, lambda out, y: F.cross_entropy(out, y, reduction="none"))


def train(model: nn.Module, losses: Callable[[Tensor, Tensor], Tensor], data: Any = None, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"batch_size": 20, "steps": 2, "noise_multiplier": 1.0, "delta": 1e-5, "seed": 1, "projections": 3}
    private = clipless.make_private(
        model, optimizer, data or dataset(), gradients="jl", **{"loss_reduction": "mean", **given, **options}
    )
    for x, y in private.loader:
        private.backward(losses(model(x), y))
        optimizer.step()


def test_embedding_bags_are_refused_by_name() -> None:
    data = TensorDataset(torch.randint(9, (60, 4)), torch.randint(2, (60,)))
    with pytest.raises(UnsupportedModule, match="_embedding_bag.*gradients='exact'"):
        train(nn.Sequential(nn.EmbeddingBag(9, 3), nn.Linear(3, 2)), per_class, data)


def per_class(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted by all": lambda out, y: per_class(out, y) * out.std(),
    "contrastive": lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="none"),
    "mean for each": lambda out, y: per_class(out, y).mean().expand(len(out)),
    "rolled": lambda out, y: per_class(out, y).roll(1),
}


@pytest.mark.parametrize("losses", MIXED.values(), ids=MIXED)
def test_losses_that_mix_records_are_refused(losses: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(Misuse, match="mixes the records"):
        train(nn.Linear(5, 2), losses)


def test_a_loss_that_cannot_be_differentiated_twice_is_refused() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    with pytest.raises(UnsupportedModule, match="cannot be differentiated twice"):
        train(nn.Linear(5, 2), lambda out, y: Once.apply(per_class(out, y)))  # type: ignore[no-untyped-call]


LOOPS: dict[str, tuple[Callable[[Any, nn.Module, Tensor, Tensor], object], str]] = {
    "plain backward": (lambda p, m, x, y: F.cross_entropy(m(x), y).backward(), "call private.backward"),
    "twice": (lambda p, m, x, y: [p.backward(per_class(m(x), y)) for _ in range(2)], "second backward"),
    "scalar": (lambda p, m, x, y: p.backward(F.cross_entropy(m(x), y)), "one loss per record"),
    "another model": (
        lambda p, m, x, y: p.backward(per_class(nn.Linear(5, 2)(x), y)),
        "is not part of the private model",
    ),
    "chained": (
        lambda p, m, x, y: p.backward(per_class(m[2](m[1](m[0](x))), y)),
        "not the model that make_private got",
    ),
    "parameters outside": (
        lambda p, m, x, y: p.backward(per_class(m(x), y) + m[0].weight.square().sum()),
        "do not agree",
    ),
    "eval between": (lambda p, m, x, y: p.backward(per_class((m(x), m.eval())[0], y)), r"train\(\) or eval\(\)"),
    "no backward": (lambda p, m, x, y: m(x), r"step\(\) without its backward"),
    "other rows": (lambda p, m, x, y: m(torch.randn(len(x) + 3, 5)), "rows are not the batch's records"),
    "autocast": (lambda p, m, x, y: autocast(m, x), "autocast computes with 16 bits"),
}


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)  # type: ignore[no-any-return]


def tried(wrong: Any, private: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    wrong(private, model, *batch)
    optimizer.step()


@pytest.mark.parametrize(("wrong", "message"), LOOPS.values(), ids=LOOPS)
def test_wrong_loops_are_refused_and_show_nothing(wrong: Any, message: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = clipless.make_private(
        model, optimizer, dataset(), gradients="jl", projections=2, batch_size=20, steps=2, noise_multiplier=1.0, seed=1,
        delta=1e-5, loss_reduction="mean"
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(private.loader))
    with pytest.raises((Misuse, UnsupportedModule, InvalidArgument), match=message):
        tried(wrong, private, model, optimizer, (x, y))
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    private.detach()


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "rdp": ({"accountant": "rdp"}, "rdp.*infinite.*'pld'"),
    "gdp": ({"accountant": "gdp"}, "gdp.*infinite.*'pld'"),
    "groups": ({"clipping": clipless.abadi(groups="per-layer")}, "groups='flat'"),
    "kernels": ({"kernels": clipless.Kernels()}, "leave it out"),
    "none": ({"projections": 0}, "at least 1"),
    "half": ({"projections": 2.5}, "whole number"),
    "name": ({"gradients": "lj"}, "did you mean 'jl'"),
    "forgotten": ({"gradients": "exact", "projections": 50}, "gradients='jl'"),
}


@pytest.mark.parametrize(("given", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidArgument, TypeError), match=message):
        run(**given)

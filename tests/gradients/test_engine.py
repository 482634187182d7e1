"""The engine against the oracle: every problem × batch size, with all rules and partitions."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import clipless
from clipless import oracle
from clipless.clipping import CLIPPINGS, RULES, Clipping
from clipless.gradients.forms import OuterProducts
from clipless.plan import sensitivity
from clipless.preflight import relative_error
from clipless.thresholds import Constant
from problems import PROBLEMS, Problem, Scale, losses

PARTITIONS = {
    "flat": "flat",
    "per-layer": "per-layer",
    "per-parameter": "per-parameter",
    "blocks": [["*weight", "*scale", "*up"], ["*bias", "*down"]],
}


def clipping_for(name: str, groups: str, model: nn.Module) -> Clipping:
    """The clipping of that name; global's cutoff is such that some records are kept and some are dropped."""
    factory, partition = CLIPPINGS[name], PARTITIONS[groups]
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    if groups == "blocks" and not any(n.endswith(("bias", "down")) for n in names):
        partition = [["*"]]
    return factory(groups=partition)


def as_float64(clipped: clipless.ClippedSum) -> Tensor:
    return torch.cat([grad.double().flatten() for grad in clipped.grads.values()])


# A rule sees norms alone, whatever the layer, and a partition sees names: every problem flat, with the rules in turn, per
# layer, and with the other two partitions in turn.
TURN = dict(zip(PROBLEMS, itertools.cycle(sorted(RULES))))
COMBINATIONS = [
    (name, *each)
    for (name, rule), groups in zip(TURN.items(), itertools.cycle(["per-parameter", "blocks"]))
    for each in ((rule, "flat"), ("auto-s", "per-layer"), ("auto-s", groups))
]
# What a partition does with norms depends on no number of records.
SIZES = {"flat": (0, 1, 2, 7), "per-layer": (2, 7), "per-parameter": (7,), "blocks": (7,)}


@pytest.mark.parametrize(("name", "clipping", "groups"), COMBINATIONS)
def test_engine_agrees_with_oracle(name: str, clipping: str, groups: str) -> None:
    problem = PROBLEMS[name]
    model = problem.model()
    how = clipping_for(clipping, groups, model)
    for records in SIZES[groups]:
        batch = problem.batch(records)
        fast, slow = (which.clipped_sum(model, losses, batch, how) for which in (clipless, oracle))
        assert fast.norms.shape == slow.norms.shape
        torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-4, atol=1e-7)
        assert relative_error(fast, slow) <= 1e-4
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_model_is_left_as_it_was(problem: Problem) -> None:
    model = problem.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainable = [p.requires_grad for p in model.parameters()]
    clipless.clipped_sum(model, losses, problem.batch(3))
    assert trainable == [p.requires_grad for p in model.parameters()]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_a_double_precision_model_is_summed_in_double_precision() -> None:
    problem = PROBLEMS["linear-3d-ghost"]
    model = problem.model().double()
    x, y = problem.batch(5)
    fast, slow = (which.clipped_sum(model, losses, (x.double(), y), "auto-s") for which in (clipless, oracle))
    assert fast.grads["0.weight"].dtype == torch.float64
    assert relative_error(fast, slow) < 1e-6


def test_per_layer_is_not_flat() -> None:
    """Two layers of different norm get different factors per layer, and one factor when flat."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[1].weight.fill_(10.0)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).sum(1)

    x = torch.tensor([[1.0, 2.0]])
    flat, layered = (clipless.clipped_sum(model, loss, x, clipless.auto_v(groups=g)) for g in ("flat", "per-layer"))
    assert layered.norms.shape == (2, 1)
    for grad in layered.grads.values():
        assert float(grad.norm()) == pytest.approx(1 / math.sqrt(2))
    assert float(flat.grads["0.weight"].norm()) > 0.9
    assert float(flat.grads["1.weight"].norm()) < 0.2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "clipping", "groups"),
    [
        (name, *each)
        for name, rule in TURN.items()
        for each in ((rule, "flat"), ("abadi", "per-layer"))
        if not name.startswith("embedding")
    ],
)
def test_a_non_finite_record_contributes_nothing_and_changes_nothing(
    name: str, clipping: str, groups: str, bad: float
) -> None:
    problem = PROBLEMS[name]
    model = problem.model()
    how = clipping_for(clipping, groups, model)
    x, y = problem.batch(4)
    clean = clipless.clipped_sum(model, losses, (x[1:], y[1:]), how)
    x[0] = bad
    dirty = clipless.clipped_sum(model, losses, (x, y), how)
    torch.testing.assert_close(dirty.norms[:, 1:], clean.norms)
    for key, grad in dirty.grads.items():
        torch.testing.assert_close(grad, clean.grads[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("groups", PARTITIONS)
@pytest.mark.parametrize("first", [nn.Linear(6, 4), nn.Conv1d(1, 4, 6)], ids=["linear", "conv"])
def test_data_that_are_not_finite_count_for_nothing_in_any_group(first: nn.Module, groups: str, bad: float) -> None:
    """One infinite number is finite again after a tanh, so the record's gradient in the last layer would be."""
    model = nn.Sequential(first, nn.Flatten(), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.arange(4) % 3
    x = x.unsqueeze(1) if isinstance(first, nn.Conv1d) else x
    how = clipless.auto_s(groups=PARTITIONS[groups])
    clean = clipless.clipped_sum(model, losses, (x[1:], y[1:]), how)
    x[0, ..., 2] = bad
    dirty, slow = (which.clipped_sum(model, losses, (x, y), how) for which in (clipless, oracle))
    assert (dirty.norms[:, 0] == math.inf).all()
    torch.testing.assert_close(dirty.norms, slow.norms, rtol=1e-4, atol=1e-7)
    for key, grad in dirty.grads.items():
        torch.testing.assert_close(grad, clean.grads[key], rtol=1e-5, atol=1e-6)


class Masked(nn.Module):
    """Two layers and attention between positions, to which a mask of 0 and -inf is added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        z = self.first(x).tanh()
        return self.last(((z @ z.mT + mask.unsqueeze(1)).softmax(2) @ z).mean(1))


class Biased(Masked):
    """The mask also enters the module in which a parameter of its own is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask + self.bias)


@pytest.mark.parametrize("model", [Masked, Biased])
@pytest.mark.parametrize("groups", PARTITIONS)
def test_infinite_numbers_in_a_mask_break_no_record(groups: str, model: type[Masked]) -> None:
    mask = torch.zeros(4, 5).masked_fill(torch.arange(5) > torch.tensor([[4], [1], [2], [3]]), -math.inf)
    batch = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1)), mask, torch.arange(4) % 3

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(*batch[:2]), batch[2], reduction="none")

    fast, slow = (
        w.clipped_sum(Masked(), loss, batch, clipless.auto_s(groups=PARTITIONS[groups])) for w in (clipless, oracle)
    )
    assert slow.norms.isfinite().all()
    torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-4, atol=1e-7)
    assert relative_error(fast, slow) <= 1e-4


@pytest.mark.parametrize("groups", PARTITIONS)
@pytest.mark.parametrize("clipping", RULES)
def test_a_record_that_overflows_in_one_group_adds_nothing_there(clipping: str, groups: str) -> None:
    """Its data are finite, and so is its gradient in the last layer; in the first one it passes all float32 squares."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    with torch.no_grad():
        model[0].weight.fill_(0)
    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.arange(4) % 3
    x[2] = 1e30
    how = clipping_for(clipping, groups, model)
    fast, slow = (which.clipped_sum(model, losses, (x, y), how) for which in (clipless, oracle))
    assert (~fast.norms.isfinite()).sum() == 1
    assert groups == "flat" or fast.norms[:, 2].isfinite().any()
    torch.testing.assert_close(fast.norms, slow.norms)
    assert relative_error(fast, slow) <= 1e-5
    rest = [0, 1, 3]
    change = as_float64(fast) - as_float64(clipless.clipped_sum(model, losses, (x[rest], y[rest]), how))
    assert float(change.norm()) <= float(sensitivity(how.start(len(fast.norms)))) * (1 + 1e-5)


@given(data=st.data())
def test_removing_one_record_moves_the_sum_by_at_most_the_sensitivity(data: st.DataObject) -> None:
    """Over problems, clippings, partitions, thresholds and outliers of up to 1e6."""
    problem = PROBLEMS[data.draw(st.sampled_from(sorted(PROBLEMS)))]
    model = problem.model()
    name, groups = data.draw(st.sampled_from(sorted(CLIPPINGS))), data.draw(st.sampled_from(sorted(PARTITIONS)))
    threshold = data.draw(st.floats(1e-3, 1e3))
    base = clipping_for(name, groups, model)
    keyword = {"global": "cutoff"}.get(name, "threshold" if isinstance(base.policy, Constant) else "start")
    how = CLIPPINGS[name](**{keyword: threshold}, groups=base.groups)
    x, y = problem.batch(data.draw(st.integers(1, 5)), seed=data.draw(st.integers(0, 99)))
    victim = data.draw(st.integers(0, len(x) - 1))
    if x.is_floating_point():
        x[victim] *= data.draw(st.sampled_from([0.0, 1e-6, 1.0, 1e3, 1e6]))
    rest = [row for row in range(len(x)) if row != victim]
    whole, without = (clipless.clipped_sum(model, losses, b, how) for b in ((x, y), (x[rest], y[rest])))
    bound = float(sensitivity(how.start(len(whole.norms))))
    assert bound == pytest.approx(threshold, rel=1e-5)
    assert float((as_float64(whole) - as_float64(without)).norm()) <= bound * (1 + 1e-4)


@given(seed=st.integers(0, 10_000), cancel=st.floats(1e-7, 1.0), length=st.integers(2, 6))
def test_ghost_norms_are_never_too_small_where_positions_cancel(seed: int, cancel: float, length: int) -> None:
    """A record's positions may nearly cancel; a norm rounded down there would let it exceed the threshold."""
    generator = torch.Generator().manual_seed(seed)
    acts = torch.randn(3, length, 16, generator=generator)
    grads = torch.randn(3, length, 16, generator=generator)
    acts[0, 1], grads[0, 1] = acts[0, 0], -grads[0, 0] * (1 + cancel)
    acts[0, 2:] = 0
    form = OuterProducts(acts, grads)
    truth = (grads.double().mT @ acts.double()).flatten(1).norm(dim=1)
    norms, lengths = form.sq_norms.double().sqrt(), (acts.norm(dim=2) * grads.norm(dim=2)).sum(1).double()
    assert (norms >= truth * (1 - 1e-6)).all()
    assert (norms <= truth * (1 + 1e-4) + 1e-5 * lengths).all()


def test_time_major_activations_agree_with_the_oracle_also_when_square() -> None:
    class TimeMajor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale, self.head = nn.Linear(3, 3), Scale(3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.scale(self.inner(x.transpose(0, 1)).tanh()).mean(0))

    model = TimeMajor()
    for records in (1, 2, 5):
        batch = torch.randn(records, 5, 3), torch.arange(records) % 3
        fast, slow = (which.clipped_sum(model, losses, batch, "auto-v") for which in (clipless, oracle))
        assert relative_error(fast, slow) <= 1e-4


def test_records_flattened_with_positions_agree_with_the_oracle() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.flatten(0, 1)).view(len(x), -1, 3).sum(1)

    torch.manual_seed(0)
    model, batch = Flat(), (torch.randn(4, 5, 3), torch.arange(4) % 3)
    fast, slow = (which.clipped_sum(model, losses, batch, "auto-v") for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-4


def test_dropout_draws_what_it_would_have_drawn() -> None:
    """The layout's probe leaves the random state alone, and the tapped layers see the same masks as plain training."""
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    torch.manual_seed(7)
    plain = torch.autograd.grad(losses(model, (x, y)).sum(), list(model.parameters()))
    torch.manual_seed(7)
    ours = clipless.clipped_sum(model, losses, (x, y), clipless.abadi(threshold=1e9))
    for grad, reference in zip(ours.grads.values(), plain, strict=True):
        torch.testing.assert_close(grad, reference)


def test_loss_function_must_give_one_loss_per_record() -> None:
    with pytest.raises(clipless.InvalidArgument, match="reduction='none'"):
        clipless.clipped_sum(nn.Linear(2, 2), lambda m, x: m(x).mean(), torch.ones(3, 2))


class Averaging(nn.Module):
    """Keeps a mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.linear(x)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), Averaging])
def test_a_model_that_is_refused_is_left_as_it_was(make) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(clipless.UnsupportedModule):
        clipless.clipped_sum(model, losses, (torch.randn(5, 4), torch.arange(5) % 3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

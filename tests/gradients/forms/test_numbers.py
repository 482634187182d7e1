"""Norms, factors and sums at the ends of what float32 can hold: tiny, many and cancelling numbers."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import clipless
from clipless import oracle
from clipless.clipping import RULES, AutoS, Clipping, Global, least_norm
from clipless.gradients.engine import Engine
from clipless.gradients.forms import Form, Instantiated, OuterProducts, Scattered, Tied, sq_norm
from clipless.gradients.forms.cancellation import ROUNDING as ROUNDING_ERROR
from clipless.gradients.kernels import Kernels
from clipless.native import rows
from clipless.partition import partition
from clipless.preflight import relative_error
from clipless.thresholds import Constant
from compiling import loaded

EVERY_RULE = {
    **RULES,
    "global-scaled": Global(ratio=4.0),
    **{f"auto-s-{gamma:g}": AutoS(gamma) for gamma in (1e-6, 1e-14, 1e-18, 1e-25, 1e-42, 1e-60)},
}
ROUNDING = 1 + 1e-4


@pytest.fixture(params=["compiled", "torch"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(rows, "compiled", lambda: None)
    else:
        loaded(rows)


def output_sums(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).sum(1)


def as_float64(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([grad.double().flatten() for grad in grads.values()])


# Records too small to count.


@pytest.mark.parametrize("threshold", [1e-20, 1e-3, 1.0])
@pytest.mark.parametrize("rule", EVERY_RULE.values(), ids=EVERY_RULE)
def test_no_record_is_too_small_for_the_bound(rule: Callable[[Tensor, Tensor], Tensor], threshold: float) -> None:
    """A norm that cannot be told from 0 in float32 must not get the factor of 0. Inputs down to the least float32."""
    model = nn.Linear(5, 3, bias=False)
    how = Clipping("", rule, Constant(threshold))
    for exponent in (0, -5, -10, *range(-15, -46, -1)):
        x = 10.0**exponent * torch.linspace(0.3, 1, 5).expand(1, 5)
        fast, slow = (which.clipped_sum(model, output_sums, x, how) for which in (clipless, oracle))
        share = float(as_float64(fast.grads).norm())
        assert share <= threshold * ROUNDING
        assert share == pytest.approx(float(as_float64(slow.grads).norm()), rel=1e-4)
        torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", EVERY_RULE.values(), ids=EVERY_RULE)
def test_no_record_of_a_mean_is_too_small_for_the_bound(rule: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A mean over 1000 records makes every gradient a thousandth: what counts as 0 is a thousand times larger."""
    model = nn.Linear(5, 3, bias=False)
    engine = Engine(
        model,
        partition("flat", ["weight"]),
        lambda norms, groups: rule(norms, torch.ones(1, 1)),
        lambda norms: None,
        Kernels(),
    )
    engine.attach()
    for exponent in range(-10, -40, -1):
        engine.clear()
        engine.open(1000, averaged=True)
        x = torch.zeros(1000, 5)
        x[0] = 10.0**exponent * torch.linspace(0.3, 1, 5)
        output_sums(model, x).mean().backward()
        assert float(as_float64(engine.complete()).norm()) <= ROUNDING
    engine.detach()


def test_the_least_norm_that_counts_is_where_squares_are_exact() -> None:
    least = least_norm(torch.float32)
    assert 1e-16 < least < 1e-14
    assert least_norm(torch.float64) < 1e-140
    model, how = nn.Linear(4, 1, bias=False), clipless.auto_v()
    below, above = (factor * least / 2 * torch.ones(1, 4) for factor in (0.999, 1.001))
    assert not clipless.clipped_sum(model, output_sums, below, how).norms.any()
    found = clipless.clipped_sum(model, output_sums, above, how)
    assert float(found.grads["weight"].double().norm()) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("positions", [1, 4])
def test_a_record_without_gradient_adds_nothing_and_changes_nothing(positions: int) -> None:
    model, x = nn.Linear(5, 3), torch.rand(3, positions, 5)
    x[1] *= -1

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).sum((1, 2)) * (x[:, 0, 0] > 0)

    fast, slow = (which.clipped_sum(model, loss, x, "auto-s") for which in (clipless, oracle))
    assert fast.norms[0, 1] == 0
    assert relative_error(fast, slow) <= 1e-5


@pytest.mark.parametrize("small", [1e-18, 1e-20, 1e-22, 1e-24])
@pytest.mark.parametrize("positions", [1, 3])
def test_a_product_of_tiny_and_huge_numbers_has_its_true_norm(method: None, positions: int, small: float) -> None:
    """The squares of the tiny ones vanish in float32; those of the product do not."""
    generator = torch.Generator().manual_seed(0)
    acts, grads = (torch.rand(2, positions, 8, generator=generator) for _ in range(2))
    acts, grads = acts * small, grads / small / 1e6
    truth = (grads.double().mT @ acts.double()).flatten(1).norm(dim=1)
    norms = OuterProducts(acts, grads).sq_norms.double().sqrt()
    assert ((norms >= truth * (1 - 1e-6)) & (norms <= truth * (1 + 1e-4))).all()


# Norms of many numbers.


@pytest.mark.parametrize("value", [0.1, 0.7])
def test_the_norm_of_ten_million_numbers(method: None, value: float) -> None:
    """`torch.linalg.vector_norm` alone is 0.8 % below."""
    numbers = torch.full((1, 10**7), value)
    truth = float(numbers[0, 0].double()) * math.sqrt(10**7)
    tall = numbers.view(1, 10**3, 10**4)
    for form in (Instantiated(numbers), OuterProducts(torch.ones(1, 1, 1), numbers.unsqueeze(1)), Instantiated(tall)):
        assert float(form.sq_norms.sqrt()) == pytest.approx(truth, rel=1e-5)
    assert float(sq_norm(numbers.view(2, -1)[:, ::2])[1].sqrt()) == pytest.approx(truth / 2, rel=1e-5)


def test_the_norm_of_ten_thousand_equal_positions() -> None:
    one = torch.linspace(0.3, 0.7, 4)
    table = Scattered(torch.zeros(1, 10**5, dtype=torch.int64), one.expand(1, 10**5, 4).contiguous(), 3)
    assert float(table.sq_norms.sqrt()) == pytest.approx(1e5 * float(one.double().norm()), rel=1e-5)
    product = OuterProducts(torch.full((1, 1500, 4), 0.1), one.expand(1, 1500, 4))
    truth = 1500 * 2 * float(torch.tensor(0.1).double()) * float(one.double().norm())
    assert float(product.sq_norms.sqrt()) == pytest.approx(truth, rel=1e-4)


def test_two_million_rows_of_a_table_add_up() -> None:
    """Rows of which one is hit by all positions of all records are first added up by record: added up one by one in float32,
    the last ones would be rounded away."""
    records, positions = 40, 60_000
    table = Scattered(torch.zeros(records, positions, dtype=torch.int64), torch.full((records, positions, 1), 0.1), 3)
    total = torch.full((3, 1), torch.nan)
    table.add_to(total, torch.ones(records), beta=0)
    one = positions * float(torch.tensor(0.1).double())
    assert abs(float(total[0].double()) - records * one) < 0.05 * one
    assert not total[1:].any()
    table.add_to(total, torch.ones(records), beta=1)
    assert abs(float(total[0].double()) - 2 * records * one) < 0.05 * one


# Positions that cancel.


def test_the_norm_of_a_product_that_cancels_is_that_in_float64_and_the_rounding_error() -> None:
    """No more and no less: of twenty positions with one gradient each the last one cancels all the others."""
    generator = torch.Generator().manual_seed(0)
    acts, grads = (
        torch.randn(6, 20, 30, generator=generator),
        torch.randn(6, 1, 8, generator=generator).repeat(1, 20, 1),
    )
    acts[:, -1] = -acts[:, :-1].sum(1) + 1e-3 * acts[:, 0]
    form = OuterProducts(acts, grads)
    exact = (grads.double().mT @ acts.double()).flatten(1).norm(dim=1)
    lengths = (acts.double().norm(dim=2) * grads.double().norm(dim=2)).sum(1)
    rounding = ROUNDING_ERROR * torch.finfo(torch.float32).eps * lengths
    torch.testing.assert_close(form.sq_norms.sqrt() - rounding, exact, rtol=0, atol=1e-3 * float(rounding.min()))


def pieces_that_cancel(seed: int, cancel: float, length: int) -> dict[str, tuple[Form, Tensor, Tensor]]:
    """Forms of one table [5,8], the true gradients [b,5,8], and the lengths of all positions together [b]; positions of
    record 0 cancel but for a part `cancel`, within the table, within the matrix and between both."""
    generator = torch.Generator().manual_seed(seed)
    grads, acts = (torch.randn(2, length, 8, generator=generator) for _ in range(2))
    indices = torch.randint(5, (2, length), generator=generator)
    indices[0, 1] = indices[0, 0]
    within = grads.clone()
    within[0, 1], within[0, 2:] = -grads[0, 0] * (1 + cancel), 0
    heads = torch.nn.functional.one_hot(indices, 5).float() * torch.rand(2, length, 1, generator=generator)
    matched = -grads / heads.sum(2, keepdim=True)
    matched[0] *= 1 + cancel
    found: dict[str, tuple[Form, Tensor, Tensor]] = {}
    for name, table, matrix in (
        ("table", Scattered(indices, within, 5), None),
        ("both", Scattered(indices, grads, 5), OuterProducts(matched, heads)),
        ("both-within", Scattered(indices, within, 5), OuterProducts(acts * 1e-6, heads)),
    ):
        truth = Scattered(indices, table.grads.double(), 5).per_record()
        lengths = table.grads.double().norm(dim=2).sum(1)
        if matrix is not None:
            truth = truth + matrix.grads.double().mT @ matrix.acts.double()
            lengths = lengths + (matrix.acts.double().norm(dim=2) * matrix.grads.double().norm(dim=2)).sum(1)
        found[name] = (table if matrix is None else Tied(table, matrix), truth, lengths)
    return found


@given(seed=st.integers(0, 10_000), cancel=st.floats(1e-8, 1.0), length=st.integers(2, 6))
@pytest.mark.parametrize("kind", ["table", "both", "both-within"])
def test_norms_of_tables_are_never_too_small_where_positions_cancel(
    kind: str, seed: int, cancel: float, length: int
) -> None:
    """Neither below the true norm, nor below what the weighted sum makes of the record."""
    form, truth, lengths = pieces_that_cancel(seed, cancel, length)[kind]
    norms, exact = form.sq_norms.double().sqrt(), truth.flatten(1).norm(dim=1)
    assert (norms >= exact * (1 - 1e-6)).all()
    assert (norms <= exact * (1 + 1e-4) + 1e-5 * lengths).all()
    for record in range(2):
        total, factor = torch.empty(5, 8), (1 / norms[record]).clamp(max=1e30).float().view(1)
        form.rows(slice(record, record + 1)).add_to(total, factor, beta=0)
        assert float(total.double().norm()) <= ROUNDING


# Sums over many records.

MANY = 100_000


class Twin(nn.Module):
    """Every kind of form in one: a product, rows that are written out, and a table whose first row everyone meets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear, self.norm = nn.Embedding(3, 4), nn.Linear(4, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.table(x).tanh().sum(1))).square() @ torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("parts", [1, 40])
def test_a_hundred_thousand_equal_records_add_up(parts: int) -> None:
    """In float32 all along the sum is off by several records; blocks in float64 leave a hundredth of one."""
    model, clipping = Twin(), clipless.auto_v()
    x = torch.tensor([[0, 0, 2, 0]])
    few = clipless.clipped_sum(model, lambda m, b: m(b), x.expand(64, 4), clipping).grads
    engine = Engine(
        model,
        partition("flat", few),
        lambda norms, groups: clipping.rule(norms, torch.ones(1, 1)),
        lambda norms: None,
        Kernels(),
    )
    engine.attach()
    for _ in range(parts):
        engine.open(MANY // parts, averaged=False)
        model(x.expand(MANY // parts, 4)).sum().backward()
    found = engine.complete()
    engine.detach()
    off = as_float64({name: grad.double() - few[name].double() * (MANY / 64) for name, grad in found.items()})
    assert float(off.norm()) < 0.05


@pytest.mark.parametrize("sizes", [[6], [1, 3, 2]])
def test_means_and_sums_of_losses_give_the_same_sum(sizes: list[int]) -> None:
    """The engine undoes the mean's division by the part, and divides by nothing."""
    clipping, batch = clipless.abadi(), torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    for averaged in (True, False):
        model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
        twin.load_state_dict(model.state_dict())
        engine = Engine(
            model,
            partition("flat", ["weight", "bias"]),
            lambda norms, groups: clipping.rule(norms, torch.ones(1, 1)),
            None,
            Kernels(),
        )
        engine.attach()
        for x in batch.split(sizes):
            engine.open(len(x), averaged=averaged)
            losses = output_sums(model, x)
            (losses.mean() if averaged else losses.sum()).backward()
        found = engine.complete()["weight"]
        engine.detach()
        torch.testing.assert_close(found, oracle.clipped_sum(twin, output_sums, batch, clipping).grads["weight"])


def test_sums_can_be_read_between_the_parts() -> None:
    model, twin, clipping = nn.Linear(3, 2), nn.Linear(3, 2), clipless.abadi()
    twin.load_state_dict(model.state_dict())
    engine = Engine(
        model,
        partition("flat", ["weight", "bias"]),
        lambda norms, groups: clipping.rule(norms, torch.ones(1, 1)),
        lambda norms: None,
        Kernels(),
    )
    engine.attach()
    parts = torch.randn(5, 700, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for x in parts:
        engine.open(len(x), averaged=False)
        output_sums(model, x).sum().backward()
        expected += oracle.clipped_sum(twin, output_sums, x, clipping).grads["weight"].double()
        torch.testing.assert_close(engine.complete()["weight"].double(), expected, rtol=1e-5, atol=1e-4)
    engine.detach()

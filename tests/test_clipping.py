"""Properties of every clipping rule, and of partitions and thresholds."""

import math
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from allocations import effective_multiplier
from clipless import InvalidArgument, InvalidType
from clipless.clipping import CLIPPINGS, RULES, AutoS, ByGroup, Clipping, Global, as_clipping
from clipless.partition import partition
from clipless.plan import RESERVE, noise_stddevs, sensitivity
from clipless.thresholds import Constant

EVERY_RULE = {**RULES, "global-scaled": Global(ratio=4.0)}
ODD_NORMS = [0.0, 1e-45, 1e-30, 1.0, 1e30, math.inf, math.nan]
ROUNDING = 1 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("threshold", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("norm", ODD_NORMS)
@pytest.mark.parametrize("rule", EVERY_RULE.values(), ids=EVERY_RULE)
def test_contribution_never_exceeds_threshold(rule, norm: float, threshold: float, dtype: torch.dtype) -> None:
    """P1, and a norm that is not finite gets exactly 0."""
    norms, thresholds = torch.tensor([[norm]], dtype=dtype), torch.tensor([[threshold]], dtype=dtype)
    factor = float(rule(norms, thresholds))
    assert math.isfinite(factor)
    if math.isfinite(norm):
        assert factor * float(norms) <= float(thresholds) * ROUNDING
    else:
        assert factor == 0.0


@given(norm=st.floats(0, 2.0**99, width=32), threshold=st.floats(2**-20, 2**20, width=32))
@pytest.mark.parametrize("rule", EVERY_RULE.values(), ids=EVERY_RULE)
def test_contribution_never_exceeds_threshold_anywhere(rule, norm: float, threshold: float) -> None:
    factor = float(rule(torch.tensor([[norm]]), torch.tensor([[threshold]])))
    assert 0 <= factor * norm <= threshold * ROUNDING


@given(
    norm=st.floats(2.0**-149, 2.0**128 - 2.0**104, width=32),
    threshold=st.floats(1e-10, 1e10),
    units=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@example(norm=3.0, threshold=1.0, units=0, dtype=torch.float32)
@example(norm=3.4e38, threshold=1e-3, units=0, dtype=torch.float32)
@pytest.mark.parametrize("rule", EVERY_RULE.values(), ids=EVERY_RULE)
def test_no_rounding_takes_a_contribution_above_the_threshold(
    rule, norm: float, threshold: float, units: int, dtype: torch.dtype
) -> None:
    """As exact numbers, with the threshold as it is before it is rounded to the norms' type, and for the product as it is
    rounded too. Norms a few units in the last place from the threshold are the hardest."""
    thresholds = torch.tensor([[threshold]], dtype=torch.float64).to(dtype)
    bound = max(threshold, float(thresholds))
    for each in (norm, threshold * (1 + units * 2.0**-24)):
        norms = torch.tensor([[each]], dtype=torch.float64).to(dtype)
        factors = rule(norms, thresholds)
        assert 0 <= Fraction(float(factors)) * Fraction(float(norms.nan_to_num(posinf=0.0))) <= Fraction(bound)
        assert float((factors * norms).nan_to_num()) <= bound


@pytest.mark.parametrize(("kind", "value"), [(AutoS, 0.0), (AutoS, -0.5), (Global, -1.0), (Global, math.nan)])
def test_a_rule_with_a_number_that_breaks_its_bound_cannot_be_made(kind: type, value: float) -> None:
    with pytest.raises(InvalidArgument, match="must be"):
        kind(value)


# Rules of one's own.

ONE = torch.ones(1, 1)


def own(rule) -> Clipping:
    return Clipping("own", rule, Constant(1.0))


def shy(norms: Tensor, thresholds: Tensor) -> Tensor:
    """A rule with a bound: half of what is allowed."""
    return 0.5 * thresholds / norms.clamp(min=1.0)


def bold(norms: Tensor, thresholds: Tensor) -> Tensor:
    return torch.ones_like(norms)


def barely(norms: Tensor, thresholds: Tensor) -> Tensor:
    """The largest factors, rounded up."""
    return torch.nextafter(thresholds / norms, torch.full_like(norms, math.inf))


BROKEN = {
    "no bound": bold,
    "a little too large": lambda norms, thresholds: 1.0005 * thresholds / norms,
    "negative": lambda norms, thresholds: -5.0 * thresholds / norms,
    "not a number": lambda norms, thresholds: norms * math.nan,
    "infinite": lambda norms, thresholds: norms / 0.0,
    "too large for small norms alone": lambda norms, thresholds: torch.where(norms < 1e-5, 1e9, thresholds / norms),
    "norms changed in place": lambda norms, thresholds: thresholds / norms.mul_(1e-3),
    "thresholds changed in place": lambda norms, thresholds: thresholds.mul_(1e3) / norms,
}
LOOKING_ASIDE = {
    "the largest norm": lambda norms, thresholds: thresholds / norms.amax(1, keepdim=True).expand_as(norms),
    "the number of records": lambda norms, thresholds: thresholds / norms / norms.shape[1],
    "chance": lambda norms, thresholds: thresholds / norms * torch.rand(norms.shape),
}
NO_FACTORS = {
    "one for all": lambda norms, thresholds: thresholds / 1e6,
    "one for each record": lambda norms, thresholds: (thresholds / norms)[0],
    "whole numbers": lambda norms, thresholds: torch.zeros(norms.shape, dtype=torch.int64),
    "complex": lambda norms, thresholds: torch.zeros(norms.shape, dtype=torch.complex64),
    "a list": lambda norms, thresholds: [[0.0] * norms.shape[1]],
    "nothing": lambda norms, thresholds: None,
}


@pytest.mark.parametrize("rule", BROKEN.values(), ids=BROKEN)
def test_a_rule_that_lets_more_through_is_refused_by_name(rule) -> None:
    norms = torch.tensor([[2.0, 1e-7, 7.0, 0.3]])
    with pytest.raises(InvalidArgument, match=rf"{re.escape(repr(rule))}.*factor \* norm <= threshold"):
        own(rule).factors(norms, ONE, [0])
    with pytest.raises(InvalidArgument, match="larger than threshold / norm"):
        clipless.make_private(*model_and_optimizer(), DATA, **SETTINGS, clipping=own(rule))


@pytest.mark.parametrize("rule", LOOKING_ASIDE.values(), ids=LOOKING_ASIDE)
def test_a_rule_that_looks_at_other_records_is_refused(rule) -> None:
    with pytest.raises(InvalidArgument, match="another factor if other records are left out"):
        own(rule).factors(torch.tensor([[2.0, 1.0, 7.0, 3.0, 5.0]]), ONE, [0])


@pytest.mark.parametrize("rule", NO_FACTORS.values(), ids=NO_FACTORS)
def test_what_is_no_factor_for_each_norm_is_refused(rule) -> None:
    with pytest.raises(InvalidType, match=r"one floating-point factor for each norm.*\[G,B\]"):
        own(rule).factors(torch.ones(2, 3), torch.ones(2, 1), [0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [shy, barely, *RULES.values()], ids=["shy", "barely", *RULES])
def test_a_rule_of_ones_own_with_a_bound_is_taken(rule, dtype: torch.dtype) -> None:
    """Rounding is no reason to refuse it, and takes no contribution above the threshold. What is not finite gets 0."""
    norms = torch.tensor([[0.0, 1e-9, 0.5, 1.0, 3.0, 1e30, math.inf]], dtype=dtype)
    factors = own(lambda n, t: rule(n, t)).factors(norms, torch.ones(1, 1, dtype=dtype), [0])
    assert factors.dtype is dtype
    assert factors[0, [0, -1]].tolist() == [0, 0]
    used = norms[0, 1:-1].double()
    assert bool((factors[0, 1:-1].double() * used <= 1).all())
    torch.testing.assert_close(
        factors[0, 1:-1], rule(norms, torch.ones(1, 1, dtype=dtype))[0, 1:-1], rtol=1e-6, atol=0.0
    )


def test_one_rule_of_ones_own_among_groups_is_held_to_its_promise() -> None:
    both = ByGroup((RULES["abadi"], bold))
    with pytest.raises(InvalidArgument, match="bold"):
        own(both).factors(torch.full((2, 3), 9.0), torch.ones(2, 1), [0, 1])
    assert own(both).factors(torch.full((1, 3), 9.0), ONE, [0]).flatten().tolist() == pytest.approx([1 / 9] * 3)


def test_a_clipping_that_could_break_its_promise_is_refused() -> None:
    class Mine(Clipping):
        def factors(self, norms: Tensor, thresholds: Tensor, groups: object) -> Tensor:
            return torch.ones_like(norms)

    with pytest.raises(InvalidType, match="derives from Clipping"):
        as_clipping(Mine("mine", bold, Constant(1.0)))


def test_a_bound_that_is_broken_in_a_step_releases_nothing() -> None:
    """Where the rule shows it for such norms only. The batch can be taken again, by a rule that is right."""
    state = {"broken": False}

    def rule(norms: Tensor, thresholds: Tensor) -> Tensor:
        return bold(norms, thresholds) if state["broken"] else shy(norms, thresholds)

    model, optimizer = model_and_optimizer()
    private = clipless.make_private(model, optimizer, DATA, **SETTINGS, clipping=own(rule))
    before = [p.clone() for p in model.parameters()]
    (x,) = next(iter(private.loader))
    state["broken"] = True
    with pytest.raises(InvalidArgument, match="nothing was released"):
        private.backward(model(x)[:, 0] * 100)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert private.ledger.steps == 0
    state["broken"] = False
    (x,) = private.loader.again()
    private.backward(model(x)[:, 0] * 100)
    optimizer.step()
    assert private.ledger.steps == 1
    private.detach()


DATA = TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)))
SETTINGS = {"noise_multiplier": 1.0, "batch_size": 20, "steps": 2, "seed": 3}


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("rule", EVERY_RULE.values(), ids=EVERY_RULE)
def test_every_group_has_its_own_threshold(rule) -> None:
    norms, thresholds = torch.rand(3, 5) * 4, torch.tensor([[0.5], [1.0], [2.0]])
    together = rule(norms, thresholds)
    assert together.shape == (3, 5)
    for g in range(3):
        torch.testing.assert_close(together[g : g + 1], rule(norms[g : g + 1], thresholds[g : g + 1]))


@given(smaller=st.floats(0, 100), ratio=st.floats(1.001, 10))
def test_auto_s_keeps_the_order_of_norms(smaller: float, ratio: float) -> None:
    """P2."""
    norms = torch.tensor([[smaller, smaller * ratio + 1e-3]], dtype=torch.float64)
    shares = as_clipping("auto-s").rule(norms, torch.ones(1, 1)) * norms
    assert shares[0, 0] < shares[0, 1]


@pytest.mark.parametrize("name", ["auto-v", "abadi"])
def test_auto_v_and_abadi_do_not_keep_the_order(name: str) -> None:
    norms = torch.tensor([[2.0, 5.0]])
    shares = as_clipping(name).rule(norms, torch.ones(1, 1)) * norms
    torch.testing.assert_close(shares[0, 0], shares[0, 1])


def test_formulas_by_hand() -> None:
    norms, one = torch.tensor([[0.0, 0.5, 4.0]]), torch.ones(1, 1)
    expected = {
        clipless.abadi(): [0.0, 1.0, 0.25],
        clipless.auto_v(): [0.0, 2.0, 0.25],
        clipless.auto_s(gamma=0.5): [2.0, 1.0, 1 / 4.5],
        clipless.global_(cutoff=2.0, threshold=1.0): [0.5, 0.5, 0.0],
    }
    for how, factors in expected.items():
        torch.testing.assert_close(how.rule(norms, one).flatten(), torch.tensor(factors))
    assert clipless.global_(cutoff=3.0).policy.threshold == 3.0


@pytest.mark.parametrize("threshold", [1e-3, 1.0, 700.0])
@pytest.mark.parametrize("ratio", [0.25, 1.0, 3.0])
def test_global_drops_everything_above_the_cutoff(ratio: float, threshold: float) -> None:
    """Also what is above by a few units in the last place of float32."""
    cutoff = ratio * threshold
    norms = cutoff * torch.tensor([[0.5, 1 - 1e-6, 1 + 1e-6, 1 + 1e-4, 1.001, 2.0]], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        factors = Global(ratio)(norms.to(dtype), torch.tensor([[threshold]])).flatten()
        assert factors.tolist() == pytest.approx([1 / ratio, 1 / ratio, 0, 0, 0, 0])


def test_a_change_of_one_threshold_is_not_a_learning_rate() -> None:
    """P6: thresholds (9, 12) and (16, 12) give sums that are not multiples of each other."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def summed(*thresholds: float) -> torch.Tensor:
        how = clipless.auto_v(threshold=thresholds, groups="per-layer")
        grads = clipless.clipped_sum(model, lambda m, b: m(b)[:, 0], x, how).grads
        return torch.cat([grad.flatten() for grad in grads.values()])

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(a, b, dim=0))

    assert cosine(summed(9, 12), summed(18, 24)) == pytest.approx(1, abs=1e-6)
    assert cosine(summed(9, 12), summed(16, 12)) < 0.99


@pytest.mark.parametrize("groups", ["flat", "per-layer", "per-parameter", [["a.*"], ["b.*", "c"]]])
def test_a_single_threshold_is_the_sensitivity_of_the_whole(groups) -> None:
    """R_l = R/√L, so that the sensitivity is R however the parameters are divided."""
    parts = partition(groups, ["a.weight", "a.bias", "b.weight", "c"])
    assert float(sensitivity(clipless.abadi(threshold=3.0).start(len(parts)))) == pytest.approx(3.0)


@given(
    thresholds=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6),
    multiplier=st.floats(0.1, 50),
    allocation=st.sampled_from(["uniform", "equal-budget"]),
)
def test_both_allocations_are_worth_the_planned_multiplier(thresholds, multiplier: float, allocation: str) -> None:
    column = torch.tensor(thresholds, dtype=torch.float64).unsqueeze(1)
    worth = effective_multiplier(column, noise_stddevs(column, multiplier, allocation))
    assert worth == pytest.approx(multiplier * (1 + RESERVE), rel=1e-9)


def test_noise_in_proportion_to_each_threshold_is_worth_less() -> None:
    """s_g = σ·R_g without √G, as in a published listing, has the multiplier σ/√G."""
    thresholds = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    assert effective_multiplier(thresholds, 2.0 * thresholds) == pytest.approx(1.0)


@pytest.mark.parametrize("name", CLIPPINGS)
def test_every_clipping_costs_the_same(name: str) -> None:
    """P5: what the ledger records does not depend on the rule, nor on the policy at the same total noise."""
    model = torch.nn.Linear(2, 2)
    data = torch.utils.data.TensorDataset(torch.ones(20, 2), torch.zeros(20, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = clipless.make_private(
        model,
        optimizer,
        data,
        noise_multiplier=1.3,
        batch_size=5,
        steps=3,
        clipping=name,
        seed=0,
        loss_reduction="mean",
    )
    for x, y in private.loader:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert private.spent().epsilon == pytest.approx(clipless.epsilon(1.3, 0.25, 3, private.plan.delta), rel=1e-6)
    private.detach()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("perlayer", "did you mean 'per-layer'"),
        ([["a.*"]], "parameter 'b.weight' is in no block"),
        ([["a.*", "b.*"], ["*.weight"]], "is in 2 blocks"),
        ([["*"], ["nothing"]], "matches no trainable parameter"),
        (["a", "b"], "list of lists"),
        (7, "list of lists"),
    ],
)
def test_bad_partitions_are_refused(groups, message: str) -> None:
    with pytest.raises(clipless.CliplessError, match=message):
        partition(groups, ["a.weight", "a.bias", "b.weight"])


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, "1", None, True, [1.0, -1.0]])
@pytest.mark.parametrize("make", [clipless.abadi, clipless.auto_v, clipless.auto_s], ids=lambda f: f.__name__)
def test_bad_thresholds_are_refused(make, bad) -> None:
    with pytest.raises(clipless.CliplessError, match="threshold must be"):
        make(threshold=bad)


def test_a_threshold_vector_must_fit_the_groups() -> None:
    with pytest.raises(clipless.InvalidArgument, match="3 thresholds for 2 groups"):
        clipless.abadi(threshold=[1.0, 1.0, 1.0]).start(2)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(clipless.InvalidArgument, match="did you mean 'auto-s'"):
        as_clipping("autos")
    with pytest.raises(clipless.InvalidType, match="clipless.auto_s"):
        as_clipping(3)
    with pytest.raises(clipless.InvalidArgument, match="did you mean 'uniform'"):
        as_clipping(clipless.abadi(allocation="uniforn"))


def test_a_policy_takes_its_rule_by_name_as_an_object_or_from_another_clipping() -> None:
    rules = [clipless.dc_e(rule=rule).rule for rule in ("auto-s", AutoS(), clipless.auto_s())]
    assert rules[0] == rules[1] == rules[2] == AutoS(gamma=0.01)
    assert clipless.quantile(rule=clipless.auto_s(gamma=0.5)).rule == AutoS(gamma=0.5)
    with pytest.raises(clipless.InvalidArgument, match="did you mean 'auto-v'"):
        clipless.decay(rule="auto_v")

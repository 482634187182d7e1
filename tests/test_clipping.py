"""Properties of every clipping rule, and of partitions and thresholds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clipless
from allocations import effective_multiplier
from clipless.clipping import CLIPPINGS, RULES, AutoS, Global, as_clipping
from clipless.partition import partition
from clipless.plan import noise_stddevs, sensitivity

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
    assert effective_multiplier(column, noise_stddevs(column, multiplier, allocation)) == pytest.approx(multiplier)


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

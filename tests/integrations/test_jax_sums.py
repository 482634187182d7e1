"""Rules, norms and sums in JAX, against torch's rules and against one record at a time."""

import math
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax_problem import gradients, records, torch_model, weights
from torch import Tensor, nn

import clipless
from clipless.clipping import CLIPPINGS, RULES, AutoS, ByGroup, Global
from clipless.errors import InvalidArgument, InvalidType
from clipless.integrations.jax import FACTORS, clipped_sum, factors, register_rule
from clipless.integrations.jax.sums import clip_rows

NORMS = [0.0, 1e-30, 1e-3, 0.3, 1.0, 7.0, 1e19, 1e30, math.inf, math.nan]
EVERY_RULE = {**RULES, "by-group": ByGroup((Global(2.0),)), "auto-s 1": AutoS(1.0)}


def jitted(rule: Any, norms: jax.Array, thresholds: jax.Array) -> jax.Array:
    return jax.jit(factors, static_argnums=0)(rule, norms, thresholds)


@pytest.mark.parametrize("threshold", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("rule", EVERY_RULE.values(), ids=EVERY_RULE)
def test_every_rule_has_a_form_that_agrees_with_it_and_keeps_its_promise(rule: Any, threshold: float) -> None:
    norms = np.array([NORMS], np.float32)
    found = np.asarray(jitted(rule, jnp.asarray(norms), jnp.array([[threshold]])))
    expected = rule(torch.from_numpy(norms), torch.tensor([[threshold]])).numpy()
    np.testing.assert_allclose(found, expected, rtol=3e-7)
    finite = np.isfinite(norms)
    assert (found[finite].astype(float) * norms[finite] <= threshold * (1 + 1e-6)).all()
    assert (found[~finite] == 0).all()


def test_a_rule_without_a_form_is_refused_until_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half:
        def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
            return clipless.abadi().rule(norms, thresholds) / 2

    monkeypatch.setattr("clipless.integrations.jax.rules.FACTORS", dict(FACTORS))
    rule, rows = Half(), {"w": jnp.array([[3.0, 4.0]])}
    with pytest.raises(InvalidType, match=r"has no JAX form: register .*register_rule, or take one of Abadi"):
        clipped_sum(rows, clipless.Clipping("half", rule, clipless.thresholds.Constant(1.0)))
    register_rule(Half)(lambda rule, norms, thresholds: factors(RULES["abadi"], norms, thresholds) / 2)
    found = clipped_sum(rows, clipless.Clipping("half", rule, clipless.thresholds.Constant(1.0)))
    np.testing.assert_allclose(found.sums["w"], [0.3, 0.4], rtol=1e-6)


def oracle_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def by_both(clipping: Any, batch: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    model = torch_model()
    found = clipped_sum(gradients(weights(model), *(column.numpy() for column in batch)), clipping)
    expected = clipless.oracle.clipped_sum(model, oracle_loss, batch, clipping)
    ours = [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(found.sums)]
    return ours, np.asarray(found.norms), [grad.numpy() for grad in expected.grads.values()], expected.norms.numpy()


@pytest.mark.parametrize("groups", ["flat", "per-layer", "per-parameter", [["0.weight"], ["0.bias", "2"]]])
@pytest.mark.parametrize("name", CLIPPINGS)
def test_sums_and_norms_are_those_of_single_records(name: str, groups: Any) -> None:
    ours, norms, sums, expected = by_both(CLIPPINGS[name](groups=groups), records(20))  # type: ignore[call-arg]
    np.testing.assert_allclose(norms, expected, rtol=1e-5)
    for own, other in zip(ours, sums, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", ["flat", "per-parameter"])
def test_a_record_that_is_not_finite_adds_nothing_to_its_groups(groups: str) -> None:
    rows = {"a": jnp.array([[1.0], [math.nan], [2.0], [1e30]]), "b": jnp.array([[1.0], [1.0], [math.inf], [0.0]])}
    found = clipped_sum(rows, clipless.abadi(groups=groups))
    if groups == "flat":
        root = 0.5**0.5
        np.testing.assert_allclose([found.sums["a"][0], found.sums["b"][0]], [root, root], rtol=1e-6)
    else:
        np.testing.assert_allclose([found.sums["a"][0], found.sums["b"][0]], [2 * 0.5**0.5, 2 * 0.5**0.5], rtol=1e-6)


def test_padding_adds_nothing_even_if_its_gradient_is_nan() -> None:
    rows, start = [jnp.array([[3.0], [math.nan], [5.0]])], np.ones((1, 1), np.float32)
    sums, norms = clip_rows(rows, start, 1, np.zeros(3, bool), RULES["auto-v"], (0,))
    assert sums[0].tolist() == pytest.approx([1.0], rel=1e-6)
    assert norms.tolist() == [[3.0, math.inf, math.inf]]


def test_norms_of_large_and_of_many_numbers_are_not_too_small() -> None:
    """A float32 sum of squares stops growing at 2**24."""
    many = clipped_sum({"w": jnp.ones((1, 2**25))}, "abadi")
    assert math.isclose(float(many.norms[0, 0]), 2**12.5, rel_tol=1e-6)
    large = clipped_sum({"w": jnp.array([[3e18, 4e18]])}, "abadi")
    np.testing.assert_allclose(large.sums["w"], [0.6, 0.8], rtol=1e-6)


def test_tiny_gradients_count_as_zero() -> None:
    assert clipped_sum({"w": jnp.array([[1e-20, 0.0]])}, "auto-v").sums["w"].tolist() == [0.0, 0.0]


def test_half_precision_is_summed_in_float32() -> None:
    found = clipped_sum({"w": jnp.full((512, 1), 1.0, jnp.bfloat16)}, "abadi")
    assert found.sums["w"].tolist() == [512.0]
    assert found.sums["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ({"w": jnp.ones((3, 2)), "b": jnp.ones((4,))}, InvalidArgument, "does not have one row per record"),
        ({"w": jnp.ones((3, 2), jnp.int32)}, InvalidType, "'w' is int32: only arrays of real floating-point numbers"),
        ({}, InvalidArgument, "no parameter to train"),
    ],
)
def test_what_is_no_per_example_gradient_is_refused(rows: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        clipped_sum(rows)

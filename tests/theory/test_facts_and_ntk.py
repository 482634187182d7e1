"""Matrix facts in exact arithmetic, kernels against finite differences, and what clipping does to the loss."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipless.theory import facts, ntk, rules
from clipless.theory.flows import Constants, flow

SMALL = st.integers(-4, 4)
POSITIVE = st.integers(1, 9).map(lambda n: Fraction(n, 5))


def floats(a: facts.Matrix) -> np.ndarray:
    return np.array([[float(x) for x in row] for row in a])


@st.composite
def kernels(draw: st.DrawFn, size: int = 3) -> facts.Matrix:
    """AAᵀ + I: positive definite, in whole numbers."""
    a = facts.matrix([[draw(SMALL) for _ in range(size)] for _ in range(size)])
    return facts.add(facts.multiply(a, facts.transpose(a)), facts.diagonal([1] * size))


@given(a=st.lists(st.lists(SMALL, min_size=3, max_size=3), min_size=3, max_size=3))
def test_exact_arithmetic_agrees_with_numpy(a: list[list[int]]) -> None:
    exact, array = facts.matrix(a), np.array(a, float)
    assert float(facts.determinant(exact)) == pytest.approx(np.linalg.det(array), abs=1e-9)
    assert [float(c) for c in facts.characteristic_polynomial(exact)] == pytest.approx(np.poly(array), abs=1e-8)
    least = np.linalg.eigvalsh((array + array.T) / 2)[0]
    if abs(least) > 1e-9:
        assert facts.is_positive_definite(exact) == (least > 0)
    symmetric = facts.symmetric_part(exact)
    eigenvalues = np.linalg.eigvalsh(floats(symmetric))
    expected = ((eigenvalues < -1e-9).sum(), (abs(eigenvalues) <= 1e-9).sum(), (eigenvalues > 1e-9).sum())
    assert facts.eigenvalue_signs(symmetric) == expected


@given(h=kernels(), c=st.tuples(POSITIVE, POSITIVE, POSITIVE))
def test_a1_a_product_has_positive_eigenvalues(h: facts.Matrix, c: tuple[Fraction, ...]) -> None:
    product = facts.multiply(h, facts.diagonal(c))
    assert facts.eigenvalue_signs(product) == (0, 0, 3)
    assert np.abs(np.linalg.eigvals(floats(product)).imag).max() < 1e-6


def test_a1_a_product_need_be_neither_symmetric_nor_positive() -> None:
    h, c, e = facts.fact_a1()
    assert facts.is_positive_definite(h)
    assert facts.transpose(h) == h
    product = facts.multiply(h, c)
    assert product == facts.matrix([[1, "1/10"], [1, "1/5"]])
    assert facts.transpose(product) != product
    assert facts.eigenvalue_signs(product) == (0, 0, 2)
    assert facts.quadratic_form(product, e) == Fraction(-2, 5)


def test_a2_positive_eigenvalues_do_not_make_a_form_positive() -> None:
    a, e = facts.fact_a2()
    assert facts.eigenvalue_signs(a) == (0, 0, 2)
    assert np.sort(np.linalg.eigvals(floats(a))) == pytest.approx([(7 - 3 * 5**0.5) / 2, (7 + 3 * 5**0.5) / 2])
    assert facts.quadratic_form(a, e) == -1


def test_a3_a_positive_form_does_not_make_eigenvalues_real() -> None:
    a = facts.fact_a3()
    assert facts.symmetric_part(a) == facts.diagonal([1, 1])
    assert facts.characteristic_polynomial(a) == (1, -2, 2)
    assert np.linalg.eigvals(floats(a)) == pytest.approx([1 + 1j, 1 - 1j])


@given(a=st.lists(st.lists(SMALL, min_size=3, max_size=3), min_size=3, max_size=3))
def test_a3_real_parts_are_positive_all_the_same(a: list[list[int]]) -> None:
    skewed = facts.matrix(a)
    skewed = facts.add(skewed, facts.scale(facts.transpose(skewed), -1))
    positive = facts.add(skewed, facts.diagonal([1, 2, 3]))
    assert facts.is_positive_definite(positive)
    assert np.linalg.eigvals(floats(positive)).real.min() > 0


@pytest.mark.parametrize(
    ("corner", "signs", "eigenvalues"),
    [("8/9", (0, 0, 2), (0.080, 5.02)), ("7/9", (0, 1, 1), (0.0, 5.0)), ("7/10", (1, 0, 1), (-0.057, 4.987))],
)
def test_a4_a_sum_of_products_need_not(corner: str, signs: tuple[int, ...], eigenvalues: tuple[float, float]) -> None:
    layers = facts.fact_a4(corner)
    assert all(facts.is_positive_definite(kernel) for kernel in layers.kernels)
    assert all(facts.eigenvalue_signs(factor) == (0, 0, 2) for factor in layers.factors)
    total = layers.clipped_kernel()
    _, trace, product = facts.characteristic_polynomial(total)
    assert trace * trace - 4 * product > 0, "real eigenvalues"
    assert facts.eigenvalue_signs(total) == signs
    assert ntk.eigenvalues(floats(total)) == pytest.approx(eigenvalues, abs=0.002)


def test_a4_is_by_default_the_example_of_a_zero_eigenvalue() -> None:
    assert facts.determinant(facts.fact_a4().clipped_kernel()) == 0


NETWORK = ntk.Network.random((3, 8, 6, 1), seed=1)
INPUTS = np.random.default_rng(2).normal(size=(5, 3))
TARGETS = np.random.default_rng(3).normal(size=5)


def test_jacobians_are_finite_differences() -> None:
    for number, jacobian in enumerate(NETWORK.jacobians(INPUTS)):
        for column in range(jacobian.shape[1]):
            ends = []
            for step in (1e-6, -1e-6):
                steps = [np.zeros(w.size) for w in NETWORK.weights]
                steps[number][column] = step
                ends.append(NETWORK.moved(steps).outputs(INPUTS))
            np.testing.assert_allclose(jacobian[:, column], (ends[0] - ends[1]) / 2e-6, atol=1e-8)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("name", ["abadi", "auto-v", "auto-s", "global"])
def test_outputs_move_by_the_clipped_kernel(name: str, layerwise: bool) -> None:
    """Equation 4.3: one small step along the clipped gradients changes the outputs by −τKe."""
    rule = rules.named_rules(gamma=0.05, cutoff=1.0)[name]
    thresholds = (0.3, 0.5, 0.4) if layerwise else (0.5,)
    jacobians, residuals = NETWORK.jacobians(INPUTS), NETWORK.outputs(INPUTS) - TARGETS
    layer_factors = ntk.factors(ntk.kernels(jacobians), residuals, rule, thresholds, layerwise)
    gradients = [jacobian * residuals[:, None] for jacobian in jacobians]
    if not layerwise:
        flat = np.concatenate(gradients, axis=1)
        np.testing.assert_allclose(layer_factors[0], rule(np.linalg.norm(flat, axis=1), 0.5))
    for gradient, factor, bound in zip(gradients, layer_factors, thresholds * (1 if layerwise else 3), strict=True):
        assert (factor * np.linalg.norm(gradient, axis=1)).max() <= bound * (1 + 1e-12)
    tau = 1e-6
    moved = NETWORK.moved([-tau * (f @ g) for f, g in zip(layer_factors, gradients, strict=True)])
    kernel = ntk.clipped_kernel(ntk.kernels(jacobians), layer_factors)
    speed = (moved.outputs(INPUTS) - NETWORK.outputs(INPUTS)) / tau
    np.testing.assert_allclose(speed, -kernel @ residuals, rtol=1e-3, atol=1e-5)


def test_signs_of_the_kernel_by_rule() -> None:
    """Theorems 1 and 2 on a real network: flat keeps eigenvalues positive, global the quadratic form, dropping neither."""
    jacobians, residuals = NETWORK.jacobians(INPUTS), NETWORK.outputs(INPUTS) - TARGETS
    layers = ntk.kernels(jacobians)
    for name, rule in rules.named_rules(cutoff=1e6).items():
        kernel = ntk.clipped_kernel(layers, ntk.factors(layers, residuals, rule, (0.1,), layerwise=False))
        assert ntk.eigenvalues(kernel)[0] > 0, name
        assert np.abs(np.linalg.eigvals(kernel).imag).max() < 1e-9
        if name == "global":
            assert ntk.least_quadratic_form(kernel) > 0
    norms = np.sqrt(np.diag(sum(layers)) * residuals**2)
    dropping = ntk.factors(layers, residuals, rules.global_(float(np.median(norms))), (0.1,), layerwise=False)
    assert ntk.eigenvalues(ntk.clipped_kernel(layers, dropping))[0] == pytest.approx(0, abs=1e-12)


def test_loss_can_grow_under_flat_clipping_and_falls_under_global() -> None:
    example = ntk.growing_loss()
    assert facts.is_positive_definite(example.kernels[0])
    assert facts.quadratic_form(example.kernels[0], (1, 1, 1)) > 0
    clipped = facts.multiply(example.kernels[0], facts.diagonal(["1/10", "1/3", "1/3"]))
    assert facts.quadratic_form(clipped, example.residuals) == Fraction(-9, 5)
    layers, thresholds, start = example.arrays()
    times = np.linspace(0, 120, 1201)
    losses = 0.5 * (ntk.residual_flow(layers, start, rules.abadi, thresholds, False, times) ** 2).sum(1)
    slope = (losses[1] - losses[0]) / (times[1] - times[0])
    assert slope == pytest.approx(1.8, rel=0.05)
    assert losses.max() > 1.15 * losses[0]
    assert losses[-1] < 1e-3, "in the end it falls, as the eigenvalues say"
    falling = ntk.residual_flow(layers, start, rules.global_(100.0), (100.0,), False, times)
    losses = 0.5 * (falling**2).sum(1)
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


def test_two_records_never_make_the_loss_grow() -> None:
    """Nor stand still, layer by layer: with positive definite kernels eᵀKe is positive. Three records can, see below."""
    draws = np.random.default_rng(0)
    for _ in range(2000):
        roots = draws.normal(size=(2, 2, 2)) * draws.uniform(0.1, 3, size=(2, 1, 1))
        layers, e = [root @ root.T for root in roots], draws.normal(size=2) * 3
        bounds = tuple(draws.uniform(0.05, 3, size=2))
        for layerwise, thresholds in ((False, bounds[:1]), (True, bounds)):
            kernel = ntk.clipped_kernel(layers, ntk.factors(layers, e, rules.abadi, thresholds, layerwise))
            assert e @ kernel @ e > 0


def test_layerwise_clipping_stands_still_at_a_loss_of_nine() -> None:
    example = ntk.stationary_point()
    assert all(facts.is_positive_definite(kernel) for kernel in example.kernels)
    e = example.residuals
    shares = []
    for kernel, bound in zip(example.kernels, example.thresholds, strict=True):
        squares = [kernel[i][i] * e[i] ** 2 for i in range(3)]
        clipped = all(square > bound**2 for square in squares)
        assert clipped or all(square < bound**2 for square in squares)
        if clipped:
            assert all(kernel[i][i] == 1 for i in range(3)), "so that R/(|e|√H) is rational"
        shares.append(facts.matrix([[bound if clipped else e[i]] for i in range(3)]))
    moves = [facts.multiply(kernel, share) for kernel, share in zip(example.kernels, shares, strict=True)]
    assert facts.add(*moves) == facts.matrix([[0], [0], [0]])
    assert sum(x * x for x in e) / 2 == 9

    layers, thresholds, there = example.arrays()
    times = np.linspace(0, 1600, 50)
    away = ntk.residual_flow(layers, there + np.array([0.3, -0.2, 0.25]), rules.abadi, thresholds, True, times)
    np.testing.assert_allclose(away[-1], there, atol=1e-5)
    flat = ntk.residual_flow(layers, there, rules.abadi, (2.0,), False, times)
    assert 0.5 * (flat[-1] ** 2).sum() < 1e-3


NETWORK_OF_THEOREM_4 = ntk.standing_network()
SOFT = Constants(epsilon=0.2)  # beside √v: with less the flows become stiff as the loss vanishes


def test_standing_network_is_the_stationary_point_in_weights() -> None:
    layers, thresholds, residuals = ntk.stationary_point().arrays()
    for jacobian, kernel in zip(NETWORK_OF_THEOREM_4.jacobians, layers, strict=True):
        np.testing.assert_allclose(jacobian @ jacobian.T, kernel, atol=1e-12)
    np.testing.assert_array_equal(NETWORK_OF_THEOREM_4.residuals(NETWORK_OF_THEOREM_4.start), residuals)
    field = NETWORK_OF_THEOREM_4.clipped_gradient(NETWORK_OF_THEOREM_4.start, rules.abadi, thresholds, True)
    np.testing.assert_allclose(field, np.full(8, 0.15**0.5), atol=1e-12)


@pytest.mark.parametrize("name", ["heavy ball", "Nesterov", "Adam", "AdaGrad", "RMSprop"])
def test_theorem_4_each_optimizer_stands_still_layer_by_layer_and_arrives_otherwise(name: str) -> None:
    """The clipped gradients sum up to something, and the weights go on, but the loss stays at 9: local, layer by layer."""
    network = NETWORK_OF_THEOREM_4
    kinds = {
        "local, by layer": (rules.abadi, network.thresholds, True),
        "local, flat": (rules.abadi, (2.0,), False),
        "global, flat": (rules.global_(20.0), (20.0,), False),
        "global, by layer": (rules.global_(20.0), (20.0, 20.0), True),
    }
    losses = {}
    for kind, (rule, thresholds, layerwise) in kinds.items():

        def field(
            w: np.ndarray, rule: rules.ArrayRule = rule, bounds: tuple[float, ...] = thresholds, by: bool = layerwise
        ) -> np.ndarray:
            return network.clipped_gradient(w, rule, bounds, by)

        path = flow(name, field, network.start, np.array([5.0, 20.0, 60.0]), SOFT)
        losses[kind] = 0.5 * (network.residuals(path) ** 2).sum(1)
        if layerwise and rule is rules.abadi:
            assert np.linalg.norm(path[-1] - path[-2]) > 10, "the weights move"
    np.testing.assert_allclose(losses.pop("local, by layer"), 9, rtol=1e-4)
    for kind, found in losses.items():
        assert found[2] < 0.05, kind
        assert (np.diff(found) < 1e-3).all(), kind

"""Flows against closed forms, and optimizers against their flows as steps go to zero."""

import numpy as np
import pytest
import torch
from scipy.special import j1

from clipless.errors import InvalidArgument
from clipless.theory.flows import OPTIMIZERS, Constants, descend, flow

CURVES = np.array([1.0, 4.0])
START = np.array([1.0, -0.7])
TIMES = np.linspace(0.5, 4.0, 8)


def quadratic(w: np.ndarray) -> np.ndarray:
    return CURVES * w


def test_gradient_flow_decays_exponentially() -> None:
    expected = START * np.exp(-CURVES * (TIMES[:, None] - 1e-4))
    np.testing.assert_allclose(flow("gradient", quadratic, START, TIMES), expected, atol=1e-7)


def test_heavy_ball_is_a_damped_oscillator() -> None:
    omega = np.sqrt(CURVES - 0.25)
    t = TIMES[:, None] - 1e-4
    expected = START * np.exp(-t / 2) * (np.cos(omega * t) + np.sin(omega * t) / (2 * omega))
    np.testing.assert_allclose(flow("heavy ball", quadratic, START, TIMES), expected, atol=1e-6)


def test_nesterov_is_a_bessel_function() -> None:
    """Su, Boyd and Candès: on a quadratic w = w₀·2J₁(t√λ)/(t√λ)."""
    x = TIMES[:, None] * np.sqrt(CURVES)
    np.testing.assert_allclose(flow("Nesterov", quadratic, START, TIMES), START * 2 * j1(x) / x, atol=1e-6)
    soon = flow("Nesterov", quadratic, START, np.array([3e-4]))[0]
    np.testing.assert_allclose((soon - START) / 3e-4**2, -quadratic(START) / 8, rtol=0.03)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_follows_its_flow(name: str) -> None:
    """Halving the step halves the distance, and it is small."""
    there = flow(name, quadratic, START, TIMES)[-1]
    distances = [
        np.linalg.norm(descend(name, quadratic, START, round(4 / h), h)[-1] - there) for h in (4e-3, 2e-3, 1e-3)
    ]
    assert distances[-1] < 0.01
    assert distances[0] / distances[1] == pytest.approx(2, abs=0.35)
    assert distances[1] / distances[2] == pytest.approx(2, abs=0.35)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="Nesterov"):
        flow("nesterov", quadratic, START, TIMES)
    with pytest.raises(InvalidArgument, match="later times"):
        flow("Adam", quadratic, START, np.array([0.0, 1.0]))


def of_torch(name: str, h: float, k: Constants) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    w = torch.nn.Parameter(torch.tensor(START))
    made = {
        "gradient": lambda: torch.optim.SGD([w], lr=h),
        "heavy ball": lambda: torch.optim.SGD([w], lr=h * h, momentum=1 - k.friction * h),
        "Adam": lambda: torch.optim.Adam([w], lr=h, betas=(1 - k.first * h, 1 - k.second * h), eps=k.epsilon),
        "AdaGrad": lambda: torch.optim.Adagrad(
            [w], lr=h**0.5, initial_accumulator_value=k.square / h, eps=k.epsilon / h**0.5
        ),
        "RMSprop": lambda: torch.optim.RMSprop([w], lr=h, alpha=1 - k.second * h, eps=k.epsilon),
    }[name]()
    if name == "RMSprop":
        made.state[w] = {"step": torch.tensor(0.0), "square_avg": torch.full_like(w, k.square)}
    return w, made


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Nesterov"])
def test_updates_are_those_of_torch(name: str) -> None:
    """Nesterov's (k−1)/(k+2) is not one of torch's; its flow has its closed form above."""
    h, k = 0.05, Constants()
    w, optimizer = of_torch(name, h, k)
    for _ in range(20):
        w.grad = torch.tensor(quadratic(w.detach().numpy()))
        optimizer.step()
    np.testing.assert_allclose(descend(name, quadratic, START, 20, h)[-1], w.detach().numpy(), rtol=1e-9)


@pytest.mark.parametrize("name", ["gradient", "heavy ball"])
def test_noise_vanishes_in_the_flow(name: str) -> None:
    """Fact 4.1: the mean square distance that noise makes over a fixed time falls in proportion to the step; 4,000 runs."""
    squares = []
    for h in (0.04, 0.01):
        clear = descend(name, quadratic, START, round(2 / h), h)[-1]
        ends = descend(name, quadratic, np.tile(START, (4000, 1)), round(2 / h), h, noise=1.0)[-1]
        squares.append(float(((ends - clear) ** 2).sum(1).mean()))
    assert squares[0] / squares[1] == pytest.approx(4, rel=0.15)

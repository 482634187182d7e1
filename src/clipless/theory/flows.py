"""GLOBAL F.1-F.8: the flows that optimizers follow when their steps go to zero, beside gradient flow.

Each optimizer is here twice: as an update with a step h, and as the differential equation that it approaches. `gradient` is
any field, such as a sum of clipped gradients: privacy changes the field and not the optimizer, and its noise vanishes in the
limit. Where the paper does not say how the optimizers' constants depend on h, the choice is ours and stated in the
docstring.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.integrate import solve_ivp

from clipless.arguments import named
from clipless.arrays import Floats
from clipless.errors import InvalidArgument

Field = Callable[[Floats], Floats]
SOON = 1e-4


@dataclass(frozen=True)
class Constants:
    """Friction `a`, the rates of first and second moments, ε beside √v, and v at the start of AdaGrad and RMSprop."""

    friction: float = 1.0
    first: float = 2.0
    second: float = 1.0
    epsilon: float = 1e-3
    square: float = 1.0


@dataclass(frozen=True)
class Optimizer:
    """An update over a time h, and its flow. The state is [rows, d], its first row the parameters."""

    begin: Callable[[Field, Floats, float, Constants], Floats]
    speed: Callable[[Field, Floats, float, Constants], Floats]
    update: Callable[[Field, Floats, int, float, Constants], Floats]


def gradient_speed(field: Field, state: Floats, time: float, k: Constants) -> Floats:
    """ẇ = −∇L."""
    return -field(state[0])[None]


def gradient_update(field: Field, state: Floats, step: int, h: float, k: Constants) -> Floats:
    """w ← w − h∇L."""
    return state - h * field(state[0])[None]


def heavy_ball_speed(field: Field, state: Floats, time: float, k: Constants) -> Floats:
    """ẅ + aẇ + ∇L = 0."""
    return np.stack([state[1], -k.friction * state[1] - field(state[0])])


def heavy_ball_update(field: Field, state: Floats, step: int, h: float, k: Constants) -> Floats:
    """w ← w + β(w − w_before) − s∇L with s = h² and β = 1 − ah; the second row is (w − w_before)/h."""
    moved = (1 - k.friction * h) * state[1] - h * field(state[0])
    return np.stack([state[0] + h * moved, moved])


def nesterov_speed(field: Field, state: Floats, time: float, k: Constants) -> Floats:
    """ẅ + (3/t)ẇ + ∇L = 0."""
    return np.stack([state[1], -3 / time * state[1] - field(state[0])])


def nesterov_update(field: Field, state: Floats, step: int, h: float, k: Constants) -> Floats:
    """y = w + (k−1)/(k+2)·(w − w_before), w ← y − s∇L(y) with s = h²; the second row is (w − w_before)/h."""
    ahead = state[0] + (step - 1) / (step + 2) * h * state[1]
    new = ahead - h * h * field(ahead)
    return np.stack([new, (new - state[0]) / h])


def adam_speed(field: Field, state: Floats, time: float, k: Constants) -> Floats:
    """ẇ = −m̂/(√v̂ + ε), ṁ = a(∇L − m), v̇ = b(∇L² − v), with m̂ = m/(1 − e^{−at}) and v̂ = v/(1 − e^{−bt})."""
    w, m, v = state
    g = field(w)
    mean, square = -m / np.expm1(-k.first * time), -v / np.expm1(-k.second * time)
    return np.stack([-mean / (np.sqrt(np.maximum(square, 0)) + k.epsilon), k.first * (g - m), k.second * (g * g - v)])


def adam_update(field: Field, state: Floats, step: int, h: float, k: Constants) -> Floats:
    """Adam with learning rate h, β₁ = 1 − ah and β₂ = 1 − bh, bias-corrected."""
    w, m, v = state
    g = field(w)
    m, v = m + k.first * h * (g - m), v + k.second * h * (g * g - v)
    mean, square = m / (1 - (1 - k.first * h) ** step), v / (1 - (1 - k.second * h) ** step)
    return np.stack([w - h * mean / (np.sqrt(square) + k.epsilon), m, v])


def adagrad_speed(field: Field, state: Floats, time: float, k: Constants) -> Floats:
    """ẇ = −∇L/(√v + ε), v̇ = ∇L²."""
    g = field(state[0])
    return np.stack([-g / (np.sqrt(state[1]) + k.epsilon), g * g])


def adagrad_update(field: Field, state: Floats, step: int, h: float, k: Constants) -> Floats:
    """v ← v + h∇L², w ← w − h∇L/(√v + ε): AdaGrad with learning rate √h, its sum of squares times h."""
    g = field(state[0])
    v = state[1] + h * g * g
    return np.stack([state[0] - h * g / (np.sqrt(v) + k.epsilon), v])


def rmsprop_speed(field: Field, state: Floats, time: float, k: Constants) -> Floats:
    """ẇ = −∇L/(√v + ε), v̇ = b(∇L² − v)."""
    g = field(state[0])
    return np.stack([-g / (np.sqrt(np.maximum(state[1], 0)) + k.epsilon), k.second * (g * g - state[1])])


def rmsprop_update(field: Field, state: Floats, step: int, h: float, k: Constants) -> Floats:
    """RMSprop with learning rate h and smoothing 1 − bh."""
    g = field(state[0])
    v = state[1] + k.second * h * (g * g - state[1])
    return np.stack([state[0] - h * g / (np.sqrt(v) + k.epsilon), v])


def _alone(field: Field, start: Floats, time: float, k: Constants) -> Floats:
    return start[None].copy()


def _at_rest(field: Field, start: Floats, time: float, k: Constants) -> Floats:
    return np.stack([start, np.zeros_like(start)])


def _setting_out(field: Field, start: Floats, time: float, k: Constants) -> Floats:
    """Nesterov's flow shortly after its singular start: w = w₀ − (t²/8)∇L, ẇ = −(t/4)∇L."""
    g = field(start)
    return np.stack([start - time**2 / 8 * g, -time / 4 * g])


def _with_square(field: Field, start: Floats, time: float, k: Constants) -> Floats:
    return np.stack([start, np.full_like(start, k.square)])


def _first_moments(field: Field, start: Floats, time: float, k: Constants) -> Floats:
    """Adam's moments shortly after the start, where m̂ = ∇L and v̂ = ∇L²."""
    g = field(start)
    return np.stack([start, -np.expm1(-k.first * time) * g, -np.expm1(-k.second * time) * g * g])


OPTIMIZERS = {
    "gradient": Optimizer(_alone, gradient_speed, gradient_update),
    "heavy ball": Optimizer(_at_rest, heavy_ball_speed, heavy_ball_update),
    "Nesterov": Optimizer(_setting_out, nesterov_speed, nesterov_update),
    "Adam": Optimizer(_first_moments, adam_speed, adam_update),
    "AdaGrad": Optimizer(_with_square, adagrad_speed, adagrad_update),
    "RMSprop": Optimizer(_with_square, rmsprop_speed, rmsprop_update),
}


def flow(name: str, field: Field, start: Floats, times: Floats, constants: Constants | None = None) -> Floats:
    """The parameters [len(times), d] along an optimizer's flow from `start` at time 0; times after `SOON`."""
    optimizer, k = named("optimizer", name, OPTIMIZERS), constants or Constants()
    if min(times) <= SOON:
        raise InvalidArgument(f"a flow is computed after time {SOON:g} only: give later times.")
    begin = optimizer.begin(field, np.asarray(start, float), SOON, k)

    def speed(time: float, flat: Floats) -> Floats:
        return optimizer.speed(field, flat.reshape(begin.shape), time, k).ravel()

    solved = solve_ivp(speed, (SOON, times[-1]), begin.ravel(), t_eval=times, rtol=1e-8, atol=1e-10)
    found: Floats = solved.y.T.reshape(len(times), *begin.shape)[:, 0]
    return found


def descend(
    name: str,
    field: Field,
    start: Floats,
    steps: int,
    h: float,
    constants: Constants | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> Floats:
    """The parameters [steps + 1, d] of the optimizer itself, with steps of h and normal noise on every gradient."""
    optimizer, k, draws = named("optimizer", name, OPTIMIZERS), constants or Constants(), np.random.default_rng(seed)
    state = optimizer.begin(field, np.asarray(start, float), 0.0, k)
    path = [state[0]]

    def noisy(w: Floats) -> Floats:
        return field(w) + noise * draws.normal(size=w.shape) if noise else field(w)

    for step in range(1, steps + 1):
        state = optimizer.update(noisy, state, step, h, k)
        path.append(state[0])
    return np.array(path)

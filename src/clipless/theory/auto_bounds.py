"""AUTO's convergence bounds (Theorems 4 and 6): how small the gradient gets after T steps of automatic clipping.

Setting: L-smooth loss, per-sample gradients g + Δ with Δ symmetric and E‖Δ‖ ≤ ξ, update w ← w − η(Σ_i c_i g_i + σN(0, I))
with R = 1, ηB = η₀/√T. What a step gains on average is ½‖g‖·f, with f the alignment of a symmetric pair g ± Δ; summed over
T steps it cannot exceed the initial loss gap plus what the length and the noise of the steps cost (`optimisation_term`).
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar

from clipless.arrays import Floats
from clipless.errors import InvalidArgument

LEAST_RATIO, MOST_RATIO = 1.0, 1e9


def alignment(c: npt.ArrayLike, r: npt.ArrayLike, gamma: npt.ArrayLike = 0.0) -> Floats:
    """f(c, r; Γ) = (1+rc)/(√(r²+2rc+1)+Γ) + (1−rc)/(√(r²−2rc+1)+Γ).

    The component along a unit gradient g of the two clipped gradients g ± Δ, with r = ‖Δ‖/‖g‖, c the cosine of their angle
    and Γ = γ/‖g‖. At Γ = 0 a gradient of length 0 is clipped to 0, as AUTO-V does.
    """
    c, r, gamma = np.broadcast_arrays(*(np.asarray(each, float) for each in (c, r, gamma)))
    total = np.zeros(c.shape)
    for sign in (1, -1):
        length = np.sqrt(np.maximum(r**2 + 2 * sign * r * c + 1, 0)) + gamma
        total += np.divide(1 + sign * r * c, length, out=np.zeros(c.shape), where=length > 0)
    return total


def least_alignment(r: float, gamma: float = 0.0) -> float:
    """min over 0 < c ≤ 1 of f(c, r; Γ).

    In P = |g+Δ||g−Δ| the alignment at Γ = 0 is √((1+r²+P)/2)·(1 + (1−r²)/P), with its minimum at c → 0 for r² ≤ ½ and
    inside for ½ < r² < 1. For r > 1 it is at c = 1: 0 if Γ = 0, else Γ/(r−1+Γ) − Γ/(r+1+Γ).
    """
    if r > 1 or gamma > 0:
        return _least_by_search(r, gamma)
    if r == 1:
        return 1.0  # the limit c → 1; at c = 1 itself one of the two gradients vanishes
    k, s = 1 - r * r, 1 + r * r
    product = min(s, (k + math.sqrt(k * k + 8 * k * s)) / 2)
    return math.sqrt((s + product) / 2) * (1 + k / product)


def _least_by_search(r: float, gamma: float) -> float:
    grid = np.linspace(0, 1, 2001)
    values = alignment(grid, r, gamma)
    best = int(values.argmin())
    around = (grid[max(best - 1, 0)], grid[min(best + 1, 2000)])
    found = minimize_scalar(
        lambda c: float(alignment(c, r, gamma)), bounds=around, method="bounded", options={"xatol": 1e-9}
    )
    return float(min(found.fun, values[best]))


def measure(x: npt.ArrayLike, r: float | Floats, xi: float, gamma: float) -> Floats:
    """M(x; r, ξ, γ) = (γ/((r−1)(x+ξ/r)+γ) − γ/((r+1)(x+ξ/r)+γ))·x for r ≥ 1: what a step gains at ‖g‖ = x + ξ/r.

    It is f(1, r; γ/‖g‖)·x, grows with x and stays below `measure_limit`.
    """
    x = np.asarray(x, float)
    length = x + xi / r
    found: Floats = (gamma / ((r - 1) * length + gamma) - gamma / ((r + 1) * length + gamma)) * x
    return found


def measure_limit(r: float, gamma: float) -> float:
    """lim M(x) for x → ∞, γ/(r−1) − γ/(r+1): the inverse is defined on [0, this)."""
    return math.inf if r == 1 else gamma / (r - 1) - gamma / (r + 1)


def inverse_measure(y: npt.ArrayLike, r: float | Floats, xi: float, gamma: float) -> Floats:
    """(C.8): the x with M(x) = y; infinite from `measure_limit` on."""
    y = np.asarray(y, float)
    a = xi / r
    root = gamma * np.sqrt(a * a + 2 * xi * y + 2 * gamma * y + y * y)
    below = 2 * gamma - (r * r - 1) * y
    rest = y * (a * (r * r - 1) + r * gamma) - a * gamma
    # Where `rest` is negative, adding it to the root would cancel all digits at small y.
    product = y * ((r * r - 1) * a * a + 2 * gamma * xi + gamma * gamma)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.where(rest < 0, product / (root - rest), (root + rest) / below)
    return np.where(below > 0, found, np.inf)


def concave_inverse(y: npt.ArrayLike, r: float, xi: float, gamma: float, longest: float) -> Floats:
    """F: the upper concave envelope of (C.8) over gradients no longer than `longest`, so that E x ≤ F(E M(x)).

    Jensen's inequality needs F concave (Theorem 6 prints "convex"). Over gradients of any length the envelope is infinite,
    as (C.8) has a pole at the end of its interval: a rare and long gradient costs next to no M. Past M(longest) it is flat.
    Computed from 2,000 lengths, to 1e-5 of its value.
    """
    y = np.asarray(y, float)
    top = longest - xi / r
    if top <= 0:
        return np.zeros(y.shape)
    if math.isinf(top):
        return np.where(y > 0, np.inf, 0.0)
    lengths = np.concatenate([[0.0], np.geomspace(1e-9 * top, top, 2000)])
    hull_y, hull_x = _upper_hull(measure(lengths, r, xi, gamma), lengths)
    return np.interp(y, hull_y, hull_x)


def _upper_hull(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The corners of the least concave function above points that are sorted by x, starting at the origin."""
    if (y * x[-1] <= y[-1] * x).all():  # all below the chord, as where the inverse is convex
        return x[[0, -1]], y[[0, -1]]
    kept: list[tuple[float, float]] = []
    for point in zip(x.tolist(), y.tolist(), strict=True):
        while len(kept) > 1 and _turns_left(kept[-2], kept[-1], point):
            kept.pop()
        kept.append(point)
    return np.array([p[0] for p in kept]), np.array([p[1] for p in kept])


def _turns_left(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) >= (b[1] - a[1]) * (c[0] - a[0])


def optimisation_term(
    steps: float,
    loss_gap: float,
    smoothness: float,
    noise_multiplier: float = 0.0,
    dimension: float = 0.0,
    batch: float = 1.0,
) -> float:
    """4/√T·√((L₀−L*)·L·(1+σ²d/B²)), the argument of the bounds.

    The paper leaves out the ½ of the smoothness inequality; with it the 4 would be 2√2.
    """
    return 4 / math.sqrt(steps) * math.sqrt(loss_gap * smoothness * (1 + noise_multiplier**2 * dimension / batch**2))


def auto_s_bound(term: float, xi: float, gamma: float = 0.01, longest: float | None = None) -> float:
    """G: AUTO-S's bound, min over r ≥ 1 of ξ/r + F(term; r, ξ, γ).

    Without `longest` F is (C.8) itself, which has the paper's slope of −1/4 in T: the length of the gradient whose gain M
    is the mean gain. With `longest` F is the concave envelope over gradients up to that length: a bound on the
    mean length, which Jensen's inequality makes decay as T^(−1/6) only.
    """
    if gamma <= 0 or xi < 0 or term < 0:
        raise InvalidArgument("AUTO-S's bound needs gamma > 0, xi >= 0 and term >= 0; for gamma = 0 use auto_v_bound.")
    if longest is None:
        return _least_over_ratios(lambda r: xi / r + inverse_measure(term, r, xi, gamma), LEAST_RATIO, MOST_RATIO)
    cap = longest

    def at(ratios: Floats) -> Floats:
        bounds = [xi / r + float(concave_inverse(term, r, xi, gamma, cap)) if xi / r < cap else cap for r in ratios]
        return np.array(bounds)

    return _least_over_ratios(at, LEAST_RATIO, MOST_RATIO)


def auto_v_bound(term: float, xi: float) -> float:
    """AUTO-V's bound, min over 0 < r < 1 of ξ/r + term/min_c f(c, r): never below ξ, however many steps are taken."""
    return _least_over_ratios(
        lambda ratios: np.array([xi / r + term / least_alignment(float(r)) for r in ratios]), 1e-9, 1.0
    )


def sgd_bound(steps: float, loss_gap: float, smoothness: float, xi: float, batch: float) -> float:
    """The bound of SGD without privacy: T^(−1/4)·√(2(L₀−L*)L + ξ²/B)."""
    return steps**-0.25 * math.sqrt(2 * loss_gap * smoothness + xi * xi / batch)


def _least_over_ratios(at: Callable[[Floats], Floats], least: float, most: float) -> float:
    """The minimum over r on a logarithmic grid of 200 points, refined five times between the neighbours of the best."""
    grid = np.geomspace(least, most, 200)
    for _ in range(6):
        values = at(grid)
        best = int(values.argmin())
        grid = np.geomspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], 21)
    return float(values[best])

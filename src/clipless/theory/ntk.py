"""GLOBAL Theorems 1 and 2, and the networks of Theorem 4: the clipped neural tangent kernel, and what it does to the loss.

For per-sample losses ½(f_i − y_i)², residuals e = f − y and vanishing steps, outputs follow ḟ = −Ke: K = HC for flat
clipping and Σ_r H_r C_r layer by layer, with H_r = J_r J_rᵀ. The noise of DP-SGD does not enter (Fact 4.1): its variance
over a fixed time goes to zero with the step. The loss changes at the rate −eᵀKe.

- Theorem 1, local clipping: flat, K has positive eigenvalues but eᵀKe can be negative, so the loss can grow for a while.
  Layer by layer not even the eigenvalues need be positive, and a stationary point of non-zero loss exists.
- Theorem 2, global clipping with no record above the cutoff: K = (R/Z)H is positive definite and the loss always falls.
  A dropped record makes K singular.
- Theorem 4: the same ends for heavy ball, Nesterov, Adam, AdaGrad and RMSprop (`flows`). The loss goes to zero unless
  clipping is local and layer by layer; `standing_network` is an example in which none of them gets anywhere.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from scipy.integrate import solve_ivp

from clipless.arrays import Floats
from clipless.theory.facts import Matrix, matrix
from clipless.theory.rules import ArrayRule


@dataclass(frozen=True)
class Network:
    """A network of tanh layers with one output: weights [out, in], each with a bias column, scaled by 1/√in."""

    weights: tuple[Floats, ...]

    @classmethod
    def random(cls, widths: tuple[int, ...], seed: int = 0) -> "Network":
        draws = np.random.default_rng(seed)
        return cls(tuple(draws.normal(size=(out, into + 1)) for into, out in pairwise(widths)))

    def _activations(self, inputs: Floats) -> list[Floats]:
        """The input of each layer with a column of ones, scaled; then the output."""
        found, values = [], inputs
        for number, weight in enumerate(self.weights):
            extended = np.column_stack([values, np.ones(len(values))]) / np.sqrt(weight.shape[1])
            found.append(extended)
            values = extended @ weight.T
            if number < len(self.weights) - 1:
                values = np.tanh(values)
        return [*found, values]

    def outputs(self, inputs: Floats) -> Floats:
        """One number for each record."""
        found: Floats = self._activations(inputs)[-1][:, 0]
        return found

    def jacobians(self, inputs: Floats) -> list[Floats]:
        """For each layer the derivative of every record's output by its weights, [N, p_r]."""
        activations = self._activations(inputs)
        flowing, found = np.ones((len(inputs), 1)), []
        for number in reversed(range(len(self.weights))):
            entering = activations[number]
            found.append(np.einsum("no,ni->noi", flowing, entering).reshape(len(inputs), -1))
            if number:
                scale = np.sqrt(self.weights[number].shape[1])
                slope = 1 - (entering[:, :-1] * scale) ** 2
                flowing = flowing @ self.weights[number][:, :-1] / scale * slope
        return found[::-1]

    def moved(self, steps: list[Floats]) -> "Network":
        """The network with each layer's weights moved by a step, given as a vector."""
        return Network(tuple(w + s.reshape(w.shape) for w, s in zip(self.weights, steps, strict=True)))


def kernels(jacobians: list[Floats]) -> list[Floats]:
    """H_r = J_r J_rᵀ of each layer."""
    return [jacobian @ jacobian.T for jacobian in jacobians]


def factors(
    layer_kernels: list[Floats], residuals: Floats, rule: ArrayRule, thresholds: tuple[float, ...], layerwise: bool
) -> list[Floats]:
    """The clipping factors [N] of each layer; flat clipping has one threshold and the same factors in all."""
    squares = [np.diag(kernel) * residuals**2 for kernel in layer_kernels]
    if layerwise:
        return [rule(np.sqrt(square), bound) for square, bound in zip(squares, thresholds, strict=True)]
    (bound,) = thresholds
    return [rule(np.sqrt(sum(squares, np.zeros(len(residuals)))), bound)] * len(layer_kernels)


def clipped_kernel(layer_kernels: list[Floats], layer_factors: list[Floats]) -> Floats:
    """K = Σ_r H_r C_r, which for flat clipping is HC."""
    total = np.zeros_like(layer_kernels[0])
    for kernel, factor in zip(layer_kernels, layer_factors, strict=True):
        total += kernel * factor
    return total


def eigenvalues(kernel: Floats) -> Floats:
    """The real parts of the eigenvalues of K, sorted. HC has real ones only, Σ H_r C_r need not."""
    return np.sort(np.linalg.eigvals(kernel).real)


def least_quadratic_form(kernel: Floats) -> float:
    """The least of eᵀKe over unit vectors e: negative if there is a residual at which the loss would grow."""
    return float(np.linalg.eigvalsh((kernel + kernel.T) / 2)[0])


def residual_flow(
    layer_kernels: list[Floats],
    start: Floats,
    rule: ArrayRule,
    thresholds: tuple[float, ...],
    layerwise: bool,
    times: Floats,
) -> Floats:
    """Residuals [len(times), N] along ė = −K(e)e with the kernels H_r held fixed, as in a wide network."""

    def speed(_: float, e: Floats) -> Floats:
        found: Floats = -clipped_kernel(layer_kernels, factors(layer_kernels, e, rule, thresholds, layerwise)) @ e
        return found

    solved = solve_ivp(
        speed, (times[0], times[-1]), start, t_eval=times, rtol=1e-7, atol=1e-9, max_step=times[-1] / 100
    )
    found: Floats = solved.y.T
    return found


@dataclass(frozen=True)
class Example:
    """Kernels, thresholds and residuals in exact numbers."""

    kernels: tuple[Matrix, ...]
    thresholds: tuple[Fraction, ...]
    residuals: tuple[Fraction, ...]

    def arrays(self) -> tuple[list[Floats], tuple[float, ...], Floats]:
        found = [np.array([[float(entry) for entry in row] for row in kernel]) for kernel in self.kernels]
        return found, tuple(map(float, self.thresholds)), np.array([float(e) for e in self.residuals])


OPPOSED = matrix([[1, "-4/5", "-4/5"], ["-4/5", 1, "1/2"], ["-4/5", "1/2", 1]])


def growing_loss() -> Example:
    """Flat Abadi clipping at which the loss ½‖e‖² grows: two records near their labels push a third one away from its own.

    All are clipped to R = 1, so Ce = (1, 1, 1), and eᵀHCe = −9/5. With two records it cannot happen: for a clipped share
    that grows with the residual, eᵀHCe ≥ (|u₁|−|u₂|)(|v₁|−|v₂|) ≥ 0, u before and v after clipping, in every layer. The
    example is ours.
    """
    return Example((OPPOSED,), (Fraction(1),), (Fraction(10), Fraction(3), Fraction(3)))


def stationary_point() -> Example:
    """Two layers, clipped one by one by Abadi's rule, at which Σ H_r C_r e = 0 though e = (4, 1, 1) and the loss is 9.

    Layer 1 clips all records to ¾, so C₁e = (¾, ¾, ¾) and H₁C₁e = ¾x with x = (−3/5, 7/10, 7/10). Layer 2 clips none:
    H₂ = ¾xxᵀ + I − eeᵀ/18 is positive definite, and H₂e = −¾x. Near this point the flow is ė = −¾x − H₂e, which returns
    to it. The example is ours.
    """
    e, x = (Fraction(4), Fraction(1), Fraction(1)), (Fraction(-3, 5), Fraction(7, 10), Fraction(7, 10))
    size = range(3)
    second = [[x[i] * x[j] * 3 / 4 + Fraction(i == j) - e[i] * e[j] / 18 for j in size] for i in size]
    return Example((OPPOSED, matrix(second)), (Fraction(3, 4), Fraction(4)), e)


@dataclass(frozen=True)
class LinearNetwork:
    """Outputs e = Σ_r J_r w_r − y of layers that are linear in their weights, with constant kernels H_r = J_r J_rᵀ.

    `start` are weights at which the residuals are those of the example that it was made from.
    """

    jacobians: tuple[Floats, ...]
    start: Floats
    thresholds: tuple[float, ...]
    residuals_at_start: Floats

    def residuals(self, weights: Floats) -> Floats:
        """The residuals [..., N] of weights [..., p]."""
        found: Floats = self.residuals_at_start + (weights - self.start) @ np.concatenate(self.jacobians, axis=1).T
        return found

    def clipped_gradient(
        self, weights: Floats, rule: ArrayRule, thresholds: tuple[float, ...], layerwise: bool
    ) -> Floats:
        """The sum over records of their clipped gradients: the field that an optimizer follows."""
        e = self.residuals(weights)
        shares = factors(kernels(list(self.jacobians)), e, rule, thresholds, layerwise)
        return np.concatenate([j.T @ (share * e) for j, share in zip(self.jacobians, shares, strict=True)])


def standing_network() -> LinearNetwork:
    """`stationary_point` as a network of 3 and 5 weights in which all clipped gradients have entries of one size.

    Any J_r with J_r J_rᵀ = H_r will do for the outputs. Those here also have J₁ᵀC₁e = √0.15·(1, 1, 1) and
    J₂ᵀC₂e = √0.15·(1, 1, 1, 1, 1). So an optimizer that divides each entry by its own past moves along the same direction
    as one that does not, J w stands still for all of them, and the loss stays at 9 while the weights go on. The example is
    ours; the sums of squares, 3·0.15 and 5·0.15, are those of the two kernels' forms.
    """
    layers, thresholds, e = stationary_point().arrays()
    sizes, jacobians = (3, 5), []
    for kernel, bound, size in zip(layers, thresholds, sizes, strict=True):
        root = np.linalg.cholesky(kernel)
        clipped = np.minimum(
            np.abs(e), bound
        )  # C_r e: the records' gradients in layer 1 are |e| long, layer 2 clips none
        before, after = root.T @ clipped, np.full(size, np.sqrt(0.15))
        jacobians.append(
            np.column_stack([root, np.zeros((3, size - 3))]) @ _rotation(np.append(before, np.zeros(size - 3)), after)
        )
    start = np.zeros(sum(sizes))
    return LinearNetwork(tuple(jacobians), start, thresholds, e)


def _rotation(before: Floats, after: Floats) -> Floats:
    """An orthogonal Q with Qᵀ·before = after, of equal length: a reflection."""
    normal = before - after
    size = float(normal @ normal)
    return np.eye(len(before)) - (2 * np.outer(normal, normal) / size if size else 0.0)

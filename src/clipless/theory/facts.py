"""GLOBAL's facts A.1-A.4 about products of positive definite and diagonal matrices, in exact rational arithmetic.

H stands for a neural tangent kernel, C for the diagonal of clipping factors. What the facts say:

- A.1: HC has positive eigenvalues only (it is similar to C^½HC^½), but need not be symmetric, nor positive as a quadratic
  form: eᵀHCe < 0 is possible, and then the loss grows.
- A.2: a matrix whose eigenvalues are all positive may have a negative quadratic form.
- A.3: a matrix with a positive quadratic form may have eigenvalues that are not real; their real parts are positive.
- A.4: a sum Σ H_r C_r need not have positive eigenvalues: one can be zero or negative.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

Matrix = tuple[tuple[Fraction, ...], ...]
Number = int | str | Fraction


def matrix(rows: Iterable[Iterable[Number]]) -> Matrix:
    """Rational numbers, from whole ones or strings such as "7/9"."""
    return tuple(tuple(Fraction(entry) for entry in row) for row in rows)


def diagonal(entries: Sequence[Number]) -> Matrix:
    return matrix([[entry if i == j else 0 for j in range(len(entries))] for i, entry in enumerate(entries)])


def add(a: Matrix, b: Matrix) -> Matrix:
    return tuple(tuple(x + y for x, y in zip(p, q, strict=True)) for p, q in zip(a, b, strict=True))


def scale(a: Matrix, factor: Number) -> Matrix:
    return tuple(tuple(Fraction(factor) * x for x in row) for row in a)


def multiply(a: Matrix, b: Matrix) -> Matrix:
    columns = tuple(zip(*b, strict=True))
    return tuple(tuple(sum((x * y for x, y in zip(row, c, strict=True)), Fraction(0)) for c in columns) for row in a)


def transpose(a: Matrix) -> Matrix:
    return tuple(zip(*a, strict=True))


def symmetric_part(a: Matrix) -> Matrix:
    """(A + Aᵀ)/2, which has the same quadratic form."""
    return scale(add(a, transpose(a)), Fraction(1, 2))


def quadratic_form(a: Matrix, e: Sequence[Number]) -> Fraction:
    """eᵀAe."""
    column = matrix([[entry] for entry in e])
    return multiply(multiply(transpose(column), a), column)[0][0]


def determinant(a: Matrix) -> Fraction:
    """The determinant, by elimination with row exchanges."""
    rows, found = [list(row) for row in a], Fraction(1)
    for k in range(len(rows)):
        pivot = next((i for i in range(k, len(rows)) if rows[i][k] != 0), None)
        if pivot is None:
            return Fraction(0)
        if pivot != k:
            rows[k], rows[pivot], found = rows[pivot], rows[k], -found
        found *= rows[k][k]
        for i in range(k + 1, len(rows)):
            share = rows[i][k] / rows[k][k]
            rows[i] = [x - share * y for x, y in zip(rows[i], rows[k], strict=True)]
    return found


def is_positive_definite(a: Matrix) -> bool:
    """Whether eᵀAe > 0 for all e ≠ 0, by the leading minors of the symmetric part (Sylvester)."""
    even = symmetric_part(a)
    return all(determinant(tuple(row[:k] for row in even[:k])) > 0 for k in range(1, len(even) + 1))


def characteristic_polynomial(a: Matrix) -> tuple[Fraction, ...]:
    """Coefficients of det(λI − A), highest power first (Faddeev and LeVerrier)."""
    size, coefficients = len(a), [Fraction(1)]
    power = diagonal([0] * size)
    for k in range(1, size + 1):
        power = add(multiply(a, power), diagonal([coefficients[-1]] * size))
        product = multiply(a, power)
        coefficients.append(-sum((product[i][i] for i in range(size)), Fraction(0)) / k)
    return tuple(coefficients)


def eigenvalue_signs(a: Matrix) -> tuple[int, int, int]:
    """How many eigenvalues are negative, zero and positive, for a matrix whose eigenvalues are all real (Descartes)."""
    coefficients = list(characteristic_polynomial(a))
    zero = 0
    while coefficients[-1] == 0:
        coefficients.pop()
        zero += 1
    signs = [entry > 0 for entry in coefficients if entry != 0]
    positive = sum(p != q for p, q in pairwise(signs))
    return len(a) - zero - positive, zero, positive


@dataclass(frozen=True)
class Layers:
    """Kernels H_r and clipping factors C_r of a network's layers."""

    kernels: tuple[Matrix, ...]
    factors: tuple[Matrix, ...]

    def clipped_kernel(self) -> Matrix:
        """Σ H_r C_r."""
        total = diagonal([0] * len(self.kernels[0]))
        for kernel, factor in zip(self.kernels, self.factors, strict=True):
            total = add(total, multiply(kernel, factor))
        return total


def fact_a1() -> tuple[Matrix, Matrix, tuple[Fraction, ...]]:
    """The paper's H, C and e, with eᵀHCe = −2/5."""
    return matrix([[1, 1], [1, 2]]), diagonal([1, "1/10"]), (Fraction(1), Fraction(-2))


def fact_a2() -> tuple[Matrix, tuple[Fraction, ...]]:
    """The paper's matrix with the eigenvalues (7 ± 3√5)/2, and an e with eᵀAe = −1."""
    return matrix([[-1, 3], [-3, 8]]), (Fraction(1), Fraction(0))


def fact_a3() -> Matrix:
    """The paper's matrix with eᵀAe = ‖e‖² and the eigenvalues 1 ± i."""
    return matrix([[1, 1], [-1, 1]])


def fact_a4(corner: Number = "7/9") -> Layers:
    """The paper's two layers of two records, with H₁[1,1] = `corner`: Σ H_r C_r has eigenvalues 0 and 5 at 7/9.

    The paper prints 8/9 for the zero eigenvalue, which gives 0.080 and 5.02. At its 0.7 one is negative, as it says.
    """
    kernels = (matrix([[corner, 2], [2, 7]]), matrix([[3, 2], [2, 2]]))
    return Layers(kernels, (diagonal(["9/10", "2/5"]), diagonal(["1/10", "3/5"])))

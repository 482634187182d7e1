"""The tests of the noise: quiet on true noise, loud on each departure. False-alarm rates are stated, seeds fixed."""

from collections.abc import Callable

import numpy as np
import pytest

from clipless.arrays import Floats
from clipless.auditing import gaussian_fit

GROUPS = np.repeat([0, 1], 32)


def failing(residuals: Floats, level: float = 1e-6) -> set[str]:
    return {finding.test for finding in gaussian_fit(residuals, GROUPS) if finding.p_value < level}


def test_true_noise_passes_at_the_stated_rate() -> None:
    """200 samples, 8 tests each at 1 %: 16 failures expected; 31 or more, or 3 or fewer, have a chance of 0.1 %."""
    rng = np.random.default_rng(0)
    failures = sum(len(failing(rng.normal(size=(40, 64)), 0.01)) for _ in range(200))
    assert 3 < failures < 31


def repeated(noise: Floats) -> Floats:
    noise[30:40] = noise[:10]
    return noise


def shared(noise: Floats) -> Floats:
    noise[:, 40] = noise[:, 3]
    return noise


def louder_in_one_group(noise: Floats) -> Floats:
    noise[:, 32:] *= 1.2
    return noise


def by_batch(noise: Floats) -> Floats:
    return noise * np.random.default_rng(9).poisson(4, size=(len(noise), 1)) / 4


@pytest.mark.parametrize(
    ("departure", "test"),
    [
        (lambda noise: noise + 0.15, "mean, group 0"),
        (louder_in_one_group, "stddev, group 1"),
        (lambda noise: noise * 0.9, "stddev, group 0"),
        (lambda noise: np.sign(noise), "shape"),
        (by_batch, "size by step"),
        (repeated, "correlation of steps"),
        (shared, "correlation of coordinates"),
        (np.zeros_like, "stddev, group 0"),
    ],
)
def test_every_departure_is_found(departure: Callable[[Floats], Floats], test: str) -> None:
    noise = np.random.default_rng(1).normal(size=(80, 64))
    assert failing(noise) == set()
    assert test in failing(departure(noise.copy()))

import math
import subprocess
import sys

import pytest

from clipless.accounting import ACCOUNTANTS, epsilon, noise_multiplier
from clipless.accounting.calibrate import LEAST_MULTIPLIER
from clipless.errors import InvalidArgument, InvalidType

# epsilon, delta, sample_rate, steps
CORNERS = [
    (3.0, 1e-5, 0.01, 1000),
    (0.01, 1e-5, 0.01, 1000),
    (200.0, 1e-5, 0.01, 1000),
    (1.0, 1e-6, 0.3, 50),
    (0.01, 1e-12, 1e-6, 1),
    (0.01, 1e-12, 1.0, 1_000_000),
    (0.01, 1e-5, 1e-6, 1_000_000),
    (0.1, 1e-5, 0.1, 1_000_000),
    (1.0, 1e-12, 1e-6, 1_000_000),
    (3.0, 1e-9, 1e-4, 1_000_000),
    (200.0, 1e-12, 1e-6, 1),
    (200.0, 1e-12, 1.0, 1),
    (200.0, 1e-2, 0.5, 1_000_000),
    (200.0, 1e-5, 0.999, 100),
    (10.0, 1e-2, 0.01, 10_000),
]


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_calibration_is_safe_and_close(name, corner):
    target, delta, rate, steps = corner
    z = noise_multiplier(target, delta, rate, steps, name)
    assert math.isfinite(z)
    assert z > LEAST_MULTIPLIER
    assert 0.99 * target <= epsilon(z, rate, steps, delta, name) <= target


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_a_larger_budget_needs_less_noise(name):
    noises = [noise_multiplier(target, 1e-5, 0.02, 500, name) for target in (0.1, 0.5, 2.0, 8.0, 30.0)]
    assert noises == sorted(noises, reverse=True)
    assert len(set(noises)) == len(noises)


def test_rdp_does_not_jump_to_zero():
    """dp-accounting says 0 as soon as a divergence falls below delta ** 2, and 40 just above; the truth lies between."""
    noises = [noise_multiplier(target, 0.01, 1e-6, 1, "rdp") for target in (0.01, 0.1, 1.0, 10.0)]
    assert noises == sorted(noises, reverse=True)
    assert len(set(noises)) == 4


def test_a_delta_above_the_chance_of_being_sampled_needs_next_to_no_noise():
    assert noise_multiplier(1.0, 1e-3, 1e-6, 10) == LEAST_MULTIPLIER
    assert epsilon(LEAST_MULTIPLIER, 1e-6, 10, 1e-3) <= 1.0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"epsilon": 0.0}, InvalidArgument),
        ({"epsilon": -1.0}, InvalidArgument),
        ({"epsilon": math.inf}, InvalidArgument),
        ({"epsilon": math.nan}, InvalidArgument),
        ({"epsilon": "3"}, InvalidType),
        ({"delta": 0.0}, InvalidArgument),
        ({"delta": 1.0}, InvalidArgument),
        ({"sample_rate": 0.0}, InvalidArgument),
        ({"sample_rate": 2.0}, InvalidArgument),
        ({"steps": 0}, InvalidArgument),
        ({"steps": 1.0}, InvalidType),
        ({"accountant": "RDP"}, InvalidArgument),
    ],
)
def test_bad_arguments_are_refused(change, error):
    arguments = {"epsilon": 1.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 10} | change
    with pytest.raises(error):
        noise_multiplier(**arguments)


@pytest.mark.parametrize("corner", [(0.1, 1e-5, 0.1, 1_000_000)])
def test_memory_stays_small(corner):
    script = (
        "import resource; from clipless.accounting import noise_multiplier\n"
        "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"before = used(); noise_multiplier(*{corner}); print((used() - before) // 1024)"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(run.stdout) < 500
    assert not run.stderr

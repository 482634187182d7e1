"""The defaults of the library, each in this one place."""

CLIPPING = "auto-s"
ACCOUNTANT = "pld"

GAMMA = 0.01
THRESHOLD = 1.0
PERCENTILE = 0.5
BINS = 20
QUANTILE_RATE = 0.2
DECAY_RHO = 0.5
NOISE_RHO = 1.0
PROJECTIONS = 20


def delta(records: int) -> float:
    """1e-5, or 1/(10 N) if that is smaller.

    >>> delta(1000), f"{delta(60_000):.2e}"
    (1e-05, '1.67e-06')
    """
    return min(1e-5, 1 / (10 * records))


def steps_per_pass(records: int, expected_batch: int) -> int:
    """The steps of one pass over the loader, at least 1: as many batches as make up the data set.

    >>> steps_per_pass(1437, 256), steps_per_pass(10, 100)
    (6, 1)
    """
    return max(1, round(records / expected_batch))

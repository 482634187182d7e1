"""The policies once more, straight from their formulas in plain Python floats, for one group and one step at a time."""

import math


def quantile_step(threshold: float, noised_sum: float, batch: int, percentile: float, rate: float) -> float:
    """`noised_sum` is Σ(b_i − ½) with noise."""
    estimate = 0.5 + noised_sum / batch
    return threshold * math.exp(-rate * (estimate - percentile))


def histogram(norms: list[float], bins: int, width: float) -> list[int]:
    counts = [0] * bins
    for norm in norms:
        place = bins - 1 if norm >= width else math.floor(bins * norm / width)
        counts[min(bins - 1, place)] += 1
    return counts


def dc_p_step(threshold: float, width: float, noised: list[float], percentile: float) -> tuple[float, float]:
    total = sum(noised)
    if total <= 0:
        return threshold, width
    running = 0.0
    for k, count in enumerate(noised):
        running += count
        if running >= percentile * total:
            middle = (k + 0.5) * width / len(noised)
            return middle, 2 * middle
    raise AssertionError("the whole sum reaches every share of itself")


def dc_e_step(
    threshold: float, width: float, noised: list[float], sigma: float, dimension: int, batch: int
) -> tuple[float, float]:
    if sum(noised) <= 0:
        return threshold, width
    counts = [max(count, 0.0) for count in noised]
    bins, total = len(counts), sum(counts)

    def error(candidate: float) -> float:
        bias = sum(c * max((k + 0.5) * width / bins - candidate, 0.0) ** 2 for k, c in enumerate(counts)) / total
        return sigma**2 * candidate**2 * dimension / batch**2 + bias

    while True:
        candidates = [threshold * tenth / 10 for tenth in range(1, 21)]
        best = min(range(20), key=lambda i: error(candidates[i]))
        threshold = candidates[best]
        if best not in (0, 19):
            break
    if noised[-1] >= 0.5 * sum(noised):
        width *= 2
    elif sum(noised[bins // 2 :]) <= sum(noised) / bins:
        width /= 2
    return threshold, width

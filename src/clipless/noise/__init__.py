"""Noise sources: everything random that a private step releases or depends on comes from one of them."""

from clipless.errors import named
from clipless.noise.secure_source import SecureNoise
from clipless.noise.seeded_source import SeededNoise
from clipless.noise.source import STREAMS, NoiseSource

NOISE_SOURCES: dict[str, type[SeededNoise] | type[SecureNoise]] = {"torch": SeededNoise, "secure": SecureNoise}

__all__ = ["NOISE_SOURCES", "STREAMS", "NoiseSource", "SecureNoise", "SeededNoise", "noise_source"]


def noise_source(name: str, seed: int | None) -> NoiseSource:
    """The noise source of that name."""
    return named("noise source", name, NOISE_SOURCES)(seed)

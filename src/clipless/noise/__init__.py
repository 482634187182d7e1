"""Noise sources: everything random that a private step releases or depends on comes from one of them."""

from clipless.arguments import named
from clipless.errors import InvalidArgument
from clipless.noise.keys import STREAMS, ForwardKeys, SeededKeys
from clipless.noise.source import NoiseSource

NOISE_SOURCES = {
    "secure": "keys from the operating system, erased as the run goes on",
    "seeded": "keys from seed=, for runs that must repeat; who knows the seed can subtract the noise",
    "device": "as one of the others, but by torch's generator where tensors are not in main memory",
}

__all__ = ["NOISE_SOURCES", "STREAMS", "NoiseSource", "chosen_noise", "noise_source"]


def chosen_noise(name: str | None, seed: int | None) -> str:
    """The name of the noise source that these arguments ask for; raises for a contradiction.

    >>> chosen_noise(None, None), chosen_noise(None, 3)
    ('secure', 'seeded')
    """
    if name == "torch":
        raise InvalidArgument("noise='torch' is now called 'seeded', and needs seed=. Without a seed noise is secure.")
    if name is not None:
        named("noise source", name, NOISE_SOURCES)
    if name == "secure" and seed is not None:
        raise InvalidArgument(
            "noise='secure' takes no seed: noise that can be repeated can be subtracted. Leave seed unset, or use "
            "noise='seeded' for runs that must repeat."
        )
    if name == "seeded" and seed is None:
        raise InvalidArgument("noise='seeded' needs seed=. Leave noise unset for secure noise, which needs none.")
    if seed is not None:
        SeededKeys(seed)
    return name or ("secure" if seed is None else "seeded")


def noise_source(name: str | None = None, seed: int | None = None) -> NoiseSource:
    """The noise source of that name: by default secure, or seeded where a seed is given."""
    chosen = chosen_noise(name, seed)
    return NoiseSource(chosen, ForwardKeys() if seed is None else SeededKeys(seed), on_device=chosen == "device")

"""Do all ranks have the same records, in the same order? A sample of them is compared before training.

The ranks divide the numbers of one batch among themselves. If one record had different numbers on two ranks, as after a
shuffle without a common seed, it could be in a batch twice, and would move the sum by twice what the plan says.
"""

import hashlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipless.distributed.ranks import Alone, Ranks
from clipless.errors import InvalidArgument
from clipless.random_state import random_state_of, set_random_state
from clipless.runs.fingerprint import fingerprint

MOST_COMPARED = 32
PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
# In place of the digest of a record that this rank cannot fetch.
MISSING = ""


def refuse_other_records(ranks: Alone | Ranks, fetch: Callable[[Tensor], Any], size: int) -> None:
    """Raises on every rank if a record of the sample is not the same on all of them. `fetch` collates records of these
    numbers. A record that is not twice the same on one rank either, because it is changed at random, is not compared; if
    that is true of all, the first rank warns."""
    numbers = sampled_numbers(size)
    by_rank = ranks.gathered([digest_of(fetch, number) for number in numbers])
    differing = [
        place for place, found in enumerate(zip(*by_rank, strict=True)) if len(set(found)) > 1 or MISSING in found
    ]
    if not differing:
        return
    own = by_rank[ranks.rank]
    steady = ranks.gathered(
        [own[place] != MISSING and digest_of(fetch, numbers[place]) == own[place] for place in differing]
    )
    compared = [place for place, found in zip(differing, zip(*steady, strict=True), strict=True) if all(found)]
    if compared:
        raise InvalidArgument(
            "the ranks do not have the same records: one record is another one on another rank, so that it could "
            "be in a batch twice. Every rank needs the whole data set, in the same order: split and "
            "shuffle it with the same seed on every rank, and do not divide it among them, since make_private does."
        )
    if len(differing) == len(numbers) and ranks.rank == 0:
        warnings.warn(
            "the ranks' records could not be compared, since they cannot be fetched here or differ whenever they are "
            "fetched: make sure that every rank has the whole data set, in the same order.",
            stacklevel=4,
        )


def sampled_numbers(size: int) -> list[int]:
    """Numbers of records, evenly spaced, the first and the last among them.

    >>> sampled_numbers(3), sampled_numbers(1000)[:3], sampled_numbers(1000)[-1]
    ([0, 1, 2], [0, 32, 64], 999)
    """
    count = min(size, MOST_COMPARED)
    return [number * (size - 1) // max(1, count - 1) for number in range(count)]


def digest_of(fetch: Callable[[Tensor], Any], number: int) -> str:
    """A digest of one record, fetched with random generators in one and the same state, which is then restored. MISSING if
    it cannot be fetched or digested here; training will say why."""
    before = random_state_of((), ())
    try:
        torch.default_generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        found = hashlib.sha256()
        for part in _parts(fetch(torch.tensor([number]))):
            found.update(f"{part};".encode())
        return found.hexdigest()
    except Exception:
        return MISSING
    finally:
        set_random_state(before, ())


def _parts(value: Any) -> Iterator[str]:
    """The contents of a collated record. Of an object of an unknown kind it is only the kind."""
    if isinstance(value, Tensor):
        yield fingerprint([value])
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield fingerprint([torch.from_numpy(np.ascontiguousarray(value))])
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key)
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        yield f"{len(value)}"
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value) if isinstance(value, PLAIN) else type(value).__qualname__

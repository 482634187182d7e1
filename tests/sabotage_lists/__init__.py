"""Sabotages of the source that the tests must catch, by the room that they are in."""

from sabotage_lists import (
    accounting,
    application,
    capture,
    checks,
    experiments,
    jax,
    layers,
    ledger,
    lightning,
    noise,
    own_data,
    policies,
    processes,
    products,
    reports,
    sampling,
    sums,
    transformers,
)
from sabotage_lists.one import Sabotage

ROOMS = (
    noise,
    sums,
    policies,
    accounting,
    ledger,
    sampling,
    checks,
    capture,
    processes,
    products,
    reports,
    experiments,
    jax,
    lightning,
    transformers,
    own_data,
    layers,
    application,
)
SABOTAGES: tuple[Sabotage, ...] = tuple(sabotage for room in ROOMS for sabotage in room.SABOTAGES)

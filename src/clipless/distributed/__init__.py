"""Several processes that train one private run together, on torch.distributed alone (docs/distributed.md)."""

from clipless.distributed.comparing import facts, optimizer_settings
from clipless.distributed.joining import (
    Idle,
    broadcast_weights,
    is_sharded,
    on_every_rank,
    ranks_of,
    shards_of,
    unwrapped,
)
from clipless.distributed.ranks import Alone, Ranks
from clipless.distributed.records import refuse_other_records
from clipless.distributed.releasing import one_digest

__all__ = [
    "Alone",
    "Idle",
    "Ranks",
    "broadcast_weights",
    "facts",
    "is_sharded",
    "on_every_rank",
    "one_digest",
    "optimizer_settings",
    "ranks_of",
    "refuse_other_records",
    "shards_of",
    "unwrapped",
]

"""Several processes that train one private run together, on torch.distributed alone (docs/distributed.md)."""

from clipless.distributed.comparing import facts
from clipless.distributed.joining import Idle, broadcast_weights, on_every_rank, ranks_of, unwrapped
from clipless.distributed.ranks import Alone, Ranks
from clipless.distributed.shards import Sharded, is_sharded

__all__ = [
    "Alone",
    "Idle",
    "Ranks",
    "Sharded",
    "broadcast_weights",
    "facts",
    "is_sharded",
    "on_every_rank",
    "ranks_of",
    "unwrapped",
]

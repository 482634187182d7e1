"""The processes that torchrun has started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def rank() -> int:
    """The number of this process among those that torchrun has started; 0 without torchrun."""
    stated = os.environ.get("RANK", "") if "TORCHELASTIC_RUN_ID" in os.environ else ""
    return int(stated) if stated.isdecimal() else 0


@contextmanager
def process_group() -> Iterator[None]:
    """Let the processes that torchrun has started train together inside the block."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_torchelastic_launched() or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()

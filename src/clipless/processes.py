"""A private run belongs to the processes that started it. A copy would add the same noise to another gradient, and the
noise could be subtracted; processes that train in parallel without being joined would each report the epsilon of one
run."""

import os

import torch

from clipless.errors import Misuse

_TORCH = "torch.distributed"


def refuse_other_processes(group: object, owner: int) -> None:
    """Refuse to train in a process other than the owner, or, unless `group` is False, in parallel with other processes:
    those of torch.distributed, or, before it is initialised, those that torchrun has announced."""
    if os.getpid() != owner:
        raise Misuse(
            "this process was forked after make_private, and both would draw the same noise: call make_private in the "
            "process that trains."
        )
    if group is False:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size, by = torch.distributed.get_world_size(), _TORCH
    else:
        stated = os.environ.get("WORLD_SIZE", "")
        size, by = int(stated) if stated.isdecimal() else 1, f"WORLD_SIZE={stated} in the environment"
    if size > 1:
        raise Misuse(
            f"{by} says that {size} processes train together, and make_private was not told: each would train a model of "
            "its own and report the epsilon of one run. Call torch.distributed.init_process_group() before make_private; if "
            f"this process alone trains on these records, pass group=False{'' if by == _TORCH else ' or unset WORLD_SIZE'}."
        )

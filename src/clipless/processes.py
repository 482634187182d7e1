"""One process trains a private run. A second one, or a copy, would put the same noise on another gradient, and whoever
sees both results could subtract it; several that train side by side would each report the epsilon of one run."""

import os

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from clipless.errors import InvalidType, Misuse

_TORCH = "torch.distributed"


def refuse_processes(model: object, group: object) -> None:
    """Refuses to begin a run beside others, or with a model that is wrapped to be trained on several devices.

    `group` is None, one process unless more are found, or False, this process alone whatever is found.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise Misuse(
                f"the model is wrapped in {type(module).__name__}, which averages gradients that are not private yet: give "
                "make_private the model inside (model.module), and train in one process on one device."
            )
    if group is not None and group is not False:
        raise InvalidType(
            f"group={group!r}: training in several processes is not supported yet. Leave group unset, or pass False where "
            "this process trains alone."
        )
    refuse_other_processes(group, os.getpid())


def refuse_other_processes(group: object, owner: int) -> None:
    """Refuses to train in another process than the owner, or, unless `group` is False, beside others."""
    if os.getpid() != owner:
        raise Misuse(
            "this process was forked after make_private, and both would draw the same noise: call make_private in the "
            "process that trains."
        )
    if group is False:
        return
    size, by = _world()
    if size > 1:
        raise Misuse(
            f"{by} says that {size} processes train together, which is not supported yet: each would train a model of its "
            "own and report the epsilon of one run. Start one process; if this one alone trains on these records, pass "
            f"group=False{'' if by == _TORCH else ' or unset WORLD_SIZE'}."
        )


def _world() -> tuple[int, str]:
    """How many processes there are, and who says so: torch.distributed, or before it is initialised what torchrun set."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), _TORCH
    stated = os.environ.get("WORLD_SIZE", "")
    return int(stated) if stated.isdecimal() else 1, f"WORLD_SIZE={stated} in the environment"

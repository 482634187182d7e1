"""What must be the same on every rank before training begins, in words that a refusal can show."""

import hashlib
import platform
import re
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import clipless
from clipless.runs.fingerprint import fingerprint

MOST_SHOWN = 100
PLAIN = (bool, int, float, str, tuple, list, Tensor, type(None))


def facts(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Mapping[str, object],
    records: int,
    seed: int | None,
    allow_overspend: bool,
) -> dict[str, str]:
    """Versions, plan, settings, optimizer, and the model: its parameters and buffers, their types, and the contents of what
    is not sharded. The seed is told by its digest alone, and a number of records that is not in the plan is compared under
    a name whose values are not shown."""
    found = {
        "the version of clipless": clipless.__version__,
        "the version of torch": torch.__version__,
        "the version of numpy": np.__version__,
        "the version of Python": platform.python_version(),
        "the number of records" if plan["dataset_size"] is None else "the length of the data set": str(records),
        "the seed": hashlib.sha256(str(seed).encode()).hexdigest(),
    }
    found |= {f"the plan's {name}": _shown(value) for name, value in plan.items()}
    found["allow_overspend"] = str(allow_overspend)
    found["the optimizer"] = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    found |= {f"the optimizer's group {number}": own for number, own in enumerate(optimizer_settings(optimizer))}
    state = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    for kind, tensors in state.items():
        for name, tensor in tensors:
            trained = ", trainable" if tensor.requires_grad else ""
            found[f"{kind} {name!r}"] = f"{tuple(tensor.shape)} of {tensor.dtype}{trained}"
            spec = getattr(tensor, "_spec", None)
            if spec is not None:  # sharded: every rank has another part of it
                found[f"the placement of {kind} {name!r}"] = f"{spec.placements} on {spec.mesh}"
            else:
                found[f"the content of {kind} {name!r}"] = fingerprint([tensor])
    return found


def optimizer_settings(optimizer: Optimizer) -> list[str]:
    """The settings of each group of parameters, such as the learning rate."""
    found = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params" and isinstance(value, PLAIN)}
        found.append(f"{len(group['params'])} parameters with {options}")
    return found


def _shown(value: object) -> str:
    """A value in words, without addresses in memory, and cut short with a digest of the whole."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(value))
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[:MOST_SHOWN]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:16]})"

"""Checkpoints: everything needed to resume a private run, in one file, which is whole or absent.

The file holds the key of all noise after its step. Only its owner can read it; keep it as secret as the data.
"""

import hashlib
import io
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint

from clipless.errors import DamagedFile, InvalidArgument
from clipless.random_state import RandomState, random_state_of, set_random_state
from clipless.runs.durable_files import replace_file
from clipless.runs.journal import Journal

VERSION = 1
_FIRST_LINE = re.compile(rb"clipless-checkpoint (\d{1,9}) ([0-9a-f]{64})")


@dataclass(frozen=True)
class Checkpoint:
    """A run after one of its steps. `ledger` is the ledger's path relative to the checkpoint's folder; `run`, `position` and
    `head` identify the ledger and its length. `shards` says where sharded tensors are: `model` and `optimizer` then have
    placeholders for them."""

    ledger: str
    run: str
    position: int
    head: str
    optimizer_class: str
    model: dict[str, Any]
    optimizer: dict[str, Any]
    private: dict[str, Any]
    random: dict[str, Any]
    extra: Any
    shards: dict[str, Any] | None = None

    def write(self, path: Path) -> None:
        """Write the checkpoint, replacing an earlier one atomically. It is on disk when this returns."""
        buffer = io.BytesIO()
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        torch.save({name: value for name, value in content.items() if name != "shards" or value is not None}, buffer)
        buffer.seek(0)
        strange = get_unsafe_globals_in_checkpoint(buffer)
        if strange:
            raise InvalidArgument(
                f"a checkpoint holds tensors and plain values only, and this state holds {', '.join(strange)}: pass "
                "state_dict()s, numbers, strings, lists and dicts as extra=."
            )
        payload = buffer.getbuffer()
        digest = hashlib.sha256(payload).hexdigest()
        try:
            for stale in path.parent.glob(f".{path.name}.*.part"):
                stale.unlink()
            first_line = f"clipless-checkpoint {VERSION} {digest}\n".encode()
            replace_file(path, lambda file: file.writelines([first_line, payload]), mode=0o600)
        except OSError as error:
            raise InvalidArgument(f"cannot write the checkpoint {path} ({error}). Choose another place.") from error

    def ledger_path(self, path: Path) -> Path:
        """The path of the ledger, for a checkpoint at `path`. The checkpoint's folder may be removed later."""
        return (path.parent / self.ledger).resolve()

    def refuse_unfit(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Raises InvalidArgument unless this is a state of this model and this optimizer."""
        own = {name: _shape(value) for name, value in model.state_dict().items()}
        saved = {name: _shape(value) for name, value in self.model.items()}
        odd = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        if odd:
            raise InvalidArgument(
                f"the checkpoint is of another model (different: {', '.join(odd[:5])}): build the same model first."
            )
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        saved_sizes = [len(group["params"]) for group in self.optimizer["param_groups"]]
        if (self.optimizer_class, saved_sizes) != (_class(optimizer), sizes):
            raise InvalidArgument(
                f"the checkpoint is of another optimizer ({self.optimizer_class} with {saved_sizes} parameters, this is "
                f"{_class(optimizer)} with {sizes}): build the same optimizer first."
            )

    def restore(self, model: nn.Module, optimizer: Optimizer, rank: int = 0) -> None:
        """Restore weights, optimizer and the global random states of this rank. Random states are left alone if the
        checkpoint has none for the rank."""
        model.load_state_dict(self.model)
        optimizer.load_state_dict(self.optimizer)
        states = [self.random, *self.random.get("others", [])]
        if rank < len(states):
            set_random_states(states[rank])


def checkpoint_of(
    path: Path,
    journal: Journal,
    optimizer: Optimizer,
    states: tuple[dict[str, Any], dict[str, Any]],
    private: dict[str, Any],
    extra: Any,
    others: Sequence[dict[str, Any]] = (),
    shards: dict[str, Any] | None = None,
) -> Checkpoint:
    """A checkpoint of the run's current state, to be written to `path`; `states` are those of the model and its optimizer,
    `others` the other ranks' random states."""
    return Checkpoint(
        ledger=os.path.relpath(journal.path.absolute(), path.parent.absolute()),
        **journal.place(),
        optimizer_class=_class(optimizer),
        model=states[0],
        optimizer=states[1],
        private=private,
        random=random_states() | ({"others": list(others)} if others else {}),
        extra=extra,
        shards=shards,
    )


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a file. Raises `DamagedFile` unless every byte is as written; executes no code from it."""
    try:
        first_line, _, payload = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise InvalidArgument(f"cannot read the checkpoint {path} ({error}). Give the path of one.") from error
    found = _FIRST_LINE.fullmatch(first_line)
    if found is None:
        raise DamagedFile(f"{path} is not a clipless checkpoint, or its beginning is damaged: use an earlier copy.")
    if int(found[1]) != VERSION:
        raise InvalidArgument(f"{path} has version {int(found[1])} of the format, this clipless reads {VERSION}.")
    if hashlib.sha256(payload).hexdigest().encode() != found[2]:
        raise DamagedFile(f"{path} is damaged, cut short or edited: its digest does not match. Use an earlier copy.")
    try:
        content = torch.load(io.BytesIO(payload), weights_only=True)
        return Checkpoint(**content)
    except (pickle.UnpicklingError, RuntimeError, TypeError, ValueError, EOFError) as error:
        raise DamagedFile(f"{path} does not hold a valid checkpoint ({error}). Use an earlier copy.") from error


def random_states() -> dict[str, Any]:
    """The global random states of torch, NumPy and Python, on which dropout and augmentation depend, as plain values."""
    state = random_state_of([torch.device("cuda", index) for index in range(torch.cuda.device_count())], ())
    name, keys, *rest = state.numpy
    version, words, gauss = state.python
    return {
        "torch": state.torch,
        "cuda": list(state.cuda.values()),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": [version, list(words), gauss],
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore what `random_states` returned."""
    name, keys, *rest = states["numpy"]
    version, words, gauss = states["python"]
    cuda = states["cuda"] if torch.cuda.is_available() else []
    state = RandomState(
        torch=states["torch"],
        cuda={torch.device("cuda", index): value for index, value in enumerate(cuda)},
        python=(version, tuple(words), gauss),
        numpy=(name, keys.numpy().astype(np.uint32), *rest),
        own=[],
    )
    set_random_state(state, ())


def _shape(value: object) -> object:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)


def _class(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"

"""Sharded tensors of a checkpoint, written and read by torch.distributed.checkpoint: every rank writes its part, and reads
what is its part then."""

import pickle
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from clipless.distributed.ranks import Alone, Ranks
from clipless.distributed.shards import local_rows
from clipless.errors import DamagedFile, InvalidArgument
from clipless.runs.checkpoint import Checkpoint
from clipless.runs.shard_folder import digests, shard_folder

States = tuple[dict[str, Any], dict[str, Any]]
# All that the index of such a folder consists of, besides numbers' types.
_KNOWN = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_PLAIN = (("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"))


def save_shards(path: Path, states: States, ranks: Alone | Ranks) -> tuple[States, dict[str, Any]]:
    """Write the sharded tensors of a model's and an optimizer's state to a new folder for a checkpoint at `path`: the states
    with placeholders for them, and what the checkpoint says of the folder. All ranks call it."""
    taken: dict[str, Any] = {}

    def leave(name: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        taken[name] = value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    rest, folder = _changed(states, leave), shard_folder(path, ranks.shared(secrets.token_hex(8)))
    with ranks.reaching("save_checkpoint") as group:
        try:
            save(taken, storage_writer=FileSystemWriter(folder), process_group=group, no_dist=group is None)
        except CheckpointException as failure:
            raise InvalidArgument(f"cannot write shards to {folder} ({failure}). Choose another place.") from failure
    with ranks.together("save_checkpoint"):
        own = digests(folder, ranks.rank, ranks.size)
    files = {name: digest for found in ranks.gathered(own) for name, digest in found.items()}
    return rest, {"folder": folder.name, "files": files}


def placed_as(saved: Checkpoint, path: Path, model: nn.Module, optimizer: Optimizer) -> Checkpoint:
    """The checkpoint with every tensor as the present model has it: whole, or this rank's part of it."""
    likes: dict[str, Any] = {f"model.{name}": p for name, p in model.named_parameters(remove_duplicate=False)}
    numbered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    wanted: dict[str, Any] = {}

    def place(name: str, value: Any) -> Any:
        kind, number, *_ = name.split(".")
        like: Any = numbered[int(number)] if kind == "optimizer" else likes.get(name)
        if not isinstance(value, Tensor) or (like is None and not value.is_meta):
            return value
        divided = isinstance(like, DTensor) and value.shape == like.shape
        if not value.is_meta:
            return local_rows(value, like) if divided else value
        device = "cpu" if like is None else like.device
        made = torch.zeros_like(like, dtype=value.dtype) if divided else torch.empty_like(value, device=device)
        wanted[name] = made.detach()
        return wanted[name]

    changed, changed_optimizer = _changed((saved.model, saved.optimizer), place)
    if wanted and saved.shards is not None:
        try:
            with warnings.catch_warnings(action="ignore"):  # of reading without the other ranks
                load(wanted, storage_reader=_Reader(path.with_name(saved.shards["folder"])), no_dist=True)
        except CheckpointException as failure:
            raise DamagedFile(f"the shards of {path} cannot be read ({failure}). Use an earlier copy.") from failure
    return replace(saved, model=changed, optimizer=changed_optimizer)


def _changed(states: States, change: Callable[[str, Any], Any]) -> States:
    """Both states with every value changed, given its name."""
    model, optimizer = states
    per_parameter: Mapping[int, Mapping[str, Any]] = optimizer["state"]
    state = {
        number: {key: change(f"optimizer.{number}.{key}", value) for key, value in own.items()}
        for number, own in per_parameter.items()
    }
    return {name: change(f"model.{name}", value) for name, value in model.items()}, {**optimizer, "state": state}


class _Reader(FileSystemReader):
    """Reads the index without executing code from it: of all classes it takes those that an index consists of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            found: Metadata = _Unpickler(file).load()
        return found


def _member(kind: object, name: str) -> object:
    """A member of an enumeration, and nothing else that getattr would give."""
    if not isinstance(kind, EnumMeta):
        raise DamagedFile(f"the index of a sharded checkpoint asks for an attribute {name!r}, which is no part of one.")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        number = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if number or module in _KNOWN or (module, name) in _PLAIN:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member  # as some versions of Python pickle the members of an enumeration
        raise DamagedFile(f"the index of a sharded checkpoint asks for {module}.{name}, which is no part of one.")

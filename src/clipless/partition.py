"""Partitions of the trainable parameters into groups that are clipped separately."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument, InvalidType

NAMED = ("flat", "per-layer", "per-parameter")


@dataclass(frozen=True)
class Partition:
    """G named groups; every trainable parameter is in exactly one."""

    names: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]

    @cached_property
    def group_of(self) -> Mapping[str, int]:
        """The group number of each parameter name."""
        return {name: number for number, members in enumerate(self.members) for name in members}

    def __len__(self) -> int:
        return len(self.names)


def partition(groups: str | Sequence[Sequence[str]], parameters: Iterable[str]) -> Partition:
    """Divide parameter names: "flat", "per-layer", "per-parameter", or blocks given as lists of name patterns.

    A pattern is a parameter's name, the name of a module that holds it, or either with wildcards.

    >>> partition("per-layer", ["conv.weight", "conv.bias", "head.weight"]).names
    ('conv', 'head')
    >>> partition([["conv"], ["*.weight"]], ["conv.weight", "head.weight"])
    Traceback (most recent call last):
    clipless.errors.InvalidArgument: parameter 'conv.weight' is in 2 blocks (0, 1): make the patterns exclusive.
    """
    names = list(parameters)
    if groups == "flat":
        return Partition(("all",), (tuple(names),))
    if groups == "per-parameter":
        return Partition(tuple(names), tuple((name,) for name in names))
    if groups == "per-layer":
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(name.rpartition(".")[0] or "(model)", []).append(name)
        return Partition(tuple(layers), tuple(map(tuple, layers.values())))
    if isinstance(groups, str):
        raise unknown_name("partition", groups, NAMED)
    return _blocks(groups, names)


def _blocks(groups: Sequence[Sequence[str]], names: list[str]) -> Partition:
    well_formed = isinstance(groups, Sequence) and all(
        isinstance(block, Sequence) and not isinstance(block, str) and all(isinstance(item, str) for item in block)
        for block in groups
    )
    if not well_formed:
        raise InvalidType(
            f"groups must be one of {NAMED} or a list of lists of parameter-name patterns, got {groups!r}."
        )
    members: list[list[str]] = [[] for _ in groups]
    for name in names:
        hits = [number for number, block in enumerate(groups) if any(_matches(item, name) for item in block)]
        if not hits:
            raise InvalidArgument(
                f"parameter {name!r} is in no block: add a pattern for it, for instance ['*'] as the last block."
            )
        if len(hits) > 1:
            where = ", ".join(map(str, hits))
            raise InvalidArgument(
                f"parameter {name!r} is in {len(hits)} blocks ({where}): make the patterns exclusive."
            )
        members[hits[0]].append(name)
    for number, block in enumerate(members):
        if not block:
            raise InvalidArgument(f"block {number} {list(groups[number])!r} matches no trainable parameter: remove it.")
    return Partition(tuple(" ".join(block) for block in groups), tuple(map(tuple, members)))


def _matches(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern + ".*")

"""Counters of calls in buffers: what they hold must not depend on the records, nor on how many parts a batch came in.

A buffer of one number to which every call of its module adds exactly one is a counter. Every part of a batch finds it as the
batch did, and after the step it has moved on by one, whatever was run in between: it counts steps.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from clipless.errors import UnsupportedModule
from clipless.gradients.moving_buffers import SavedBuffer, may_count, restore, saved_buffers


class CallCounters:
    """The counters of a model, found in the passes of its first batch. `dependent` are buffers that are known to be computed
    from the records, so that they are none."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._paths = {module: path for path, module in modules}
        self._owners = list(self._paths)
        self._known: set[str] = set()
        self._settled = self._passed = False
        self._start: dict[str, SavedBuffer] = {}
        self._moving: list[SavedBuffer] = []
        self._last: dict[str, Tensor] = {}
        self.dependent: set[str] = set()

    def open(self) -> None:
        """A batch begins: remember what passes may move on."""
        self._moving = saved_buffers(self._owners)
        if self._settled:  # nothing else can move: do not look at it again
            self._owners = list(dict.fromkeys(saved.owner for saved in self._moving if self._moves(saved)))
        self._start = {self._name(saved): saved for saved in self._moving if may_count(saved.buffer)}
        self._last = {}

    def close(self) -> None:
        """The batch is over."""
        self._start, self._moving, self._last = {}, [], {}

    def rewind(self) -> None:
        """Another part of the batch begins: put back what the one before has moved on."""
        restore([saved for saved in self._moving if self._moves(saved)])
        self._last = {}

    def count(self) -> None:
        """The step is made: every counter is one further than at its beginning."""
        if not self._start:
            self.open()  # a batch without any part
        with torch.no_grad():
            for name in self._known & self._start.keys():
                owner, local, _, content = self._start[name]
                now = owner._buffers[local]
                if now is not None:
                    now.copy_(content + 1)
        self._settled |= self._passed

    def accounts_for(self, name: str) -> bool:
        """Whether a buffer that was written to is a counter, or holds what it held before."""
        start = self._start.get(name)
        return name in self._known or (
            start is not None and _equal(start.owner._buffers.get(start.name), start.content)
        )

    def after_pass(self, calls: Mapping[str, int] | None) -> None:
        """A forward pass is over, in which every module was called so many times; None if that is not known.

        Raises if a counter did not move on by one in a call of its module.
        """
        self._passed = True
        for name, (owner, local, _, content) in self._start.items():
            before, now = self._last.get(name, content), owner._buffers.get(local)
            unmoved, times = (
                _equal(now, before),
                None if calls is None else calls.get(self._paths[owner] or "(model)", 0),
            )
            counts = times in (None, 1) and _equal(now, before + 1) and name not in self.dependent
            if counts and not (self._settled or name in self._known):
                self._known.add(name)
            if name not in self._known:
                continue
            if not (counts or (unmoved and not times)):
                raise UnsupportedModule(
                    f"buffer {name!r} counts calls, and did not move on by one in a call of its module. What it holds "
                    "must not depend on the records: add exactly one in every call, or count in a Python integer."
                )
            if now is not None:
                self._last[name] = now.detach().clone()

    def _moves(self, saved: SavedBuffer) -> bool:
        return not may_count(saved.buffer) or self._name(saved) in self._known

    def _name(self, saved: SavedBuffer) -> str:
        path = self._paths[saved.owner]
        return f"{path}.{saved.name}" if path else saved.name


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.dtype is other.dtype and torch.equal(one, other)

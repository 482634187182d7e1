"""Which forward passes are checked, what is noted of them, and the tap on their output from which the checks start."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from clipless.grads.checks import CheckSchedule, PartCheck
from clipless.grads.entry import Entry, Rerun
from clipless.grads.frames import Part
from clipless.grads.layout import Dims, Place, Shapes
from clipless.grads.randomness import own_generators
from clipless.grads.receiver import Receiver
from clipless.grads.seeds import sketch
from clipless.grads.tap import Root
from clipless.grads.totals import refuse_coupled, refuse_dependent, refuse_lost
from clipless.grads.ways import Ways


class SelfCheck:
    """If it is `active`, passes that are due, or that go through something new, are checked.

    A step on the way through a model is a call of a module, after another one, on a kind of shapes. Steps are `seen` once
    they were in a check of the records, and `compared` once they were also in one of the totals, for which a pass must have
    been noted from its beginning.
    """

    def __init__(self, receiver: Receiver, modules: Iterable[nn.Module]) -> None:
        self.active = False
        self._schedule = CheckSchedule()
        self._receiver = receiver
        self._generators = own_generators(modules)
        self._seen: set[object] = set()
        self._compared: set[object] = set()
        self._number = 0

    def due(self, records: int) -> bool:
        """Whether a part of so many records is checked in any case."""
        return self.active and self._schedule.due(records)

    def begin(self, module: nn.Module, name: str, inputs: tuple[Any, Any], part: Part, ways: Ways) -> Entry:
        """A pass through the outermost module begins."""
        owing = len(self._seen) > len(self._compared)
        closely = self.active and part.records > 0 and (part.due or owing)
        rerun = Rerun.of(module, inputs, self._generators) if closely else None
        return Entry(name, part.records, ways.reading, ways.square, rerun=rerun)

    def wanted(self, entry: Entry, part: Part) -> bool:
        """Whether a pass that has come to its end is checked."""
        return self.active and (part.due or not entry.steps <= (self._compared if entry.rerun else self._seen))

    def end(self, entry: Entry, part: Part, output: Any, dims: Dims) -> Any:
        """The output of a pass that is checked, with a tap on it; `dims` are those of its floating-point tensors."""
        leaves, spec = pytree.tree_flatten(output)
        floating = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        places = [k for k in floating if leaves[k].requires_grad]
        if not places:
            entry.hidden = True
            return output
        if part.check is None:
            part.check = PartCheck(part.records, self._number, self._receiver.run)
        part.check.entries.append(entry)
        entry.places = [floating.index(k) for k in places]
        entry.outputs = tuple(leaves[k] for k in places)
        entry.out_dims = tuple(dims[k] for k in entry.places)
        entry.values = [sketch(x, dim or 0) for x, dim in zip(entry.outputs, entry.out_dims, strict=True)]
        entry.drawn = entry.rerun.now() if entry.rerun else None
        receive = partial(self._receiver.output, part, entry)
        for k, value in zip(places, Root.apply(receive, *entry.outputs), strict=True):  # type: ignore[no-untyped-call]
            leaves[k] = value
        return pytree.tree_unflatten(leaves, spec)

    def passed(self, part: Part) -> list[Entry]:
        """The backward pass of a part is over, and with it the check of its records: the passes that are to be compared."""
        entries = [] if part.check is None else [entry for entry in part.check.entries if entry.grads is not None]
        for entry in entries:
            self._seen |= entry.steps
            entry.outputs, entry.averaged = (), part.averaged
        self._number += 1
        return entries

    def compare(self, entries: Iterable[Entry], parameters: dict[str, nn.Parameter]) -> None:
        """Raise if plain autograd finds another gradient for these passes, or if the outputs for some records depend on the
        others."""
        for entry in entries:
            if entry.rerun is not None:
                with self._receiver.plainly():
                    refuse_coupled(entry, entry.averaged)
                    refuse_dependent(entry)
                    refuse_lost(entry, parameters)
                self._compared |= entry.steps


def note_step(entry: Entry, place: Place, shapes: Shapes) -> None:
    """One more call on the way through the model."""
    entry.steps.add((entry.last, place, tuple(map(len, shapes))))
    entry.last = place.name

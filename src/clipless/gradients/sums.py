"""From per-sample gradients to clipped sums: norms of all records, factors from the rule, one weighted sum per parameter."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clipless.clipping import least_norm
from clipless.gradients.capture import messages
from clipless.gradients.capture.micro_batch import MicroBatch
from clipless.gradients.capture.model_map import ModelMap
from clipless.gradients.forms import (
    Addend,
    Form,
    Instantiated,
    OuterProducts,
    add_all,
    can_wait,
    combine,
    squares_of,
    widest,
)
from clipless.gradients.kernels import Kernels, MemoryBudget, chunk_bytes
from clipless.gradients.shards import Shards
from clipless.native.rows import norms
from clipless.partition import Partition

Factors = Callable[[Tensor, Sequence[int]], Tensor]
Observe = Callable[[Tensor], None]

# So many records are summed in float32 if each adds one term to a sum, and fewer if each adds several (see `RunningSum`).
# So leaving out one record changes what is rounded by less than `clipless.plan.RESERVE`.
BLOCK = 2048
# So many terms are added up before their sum is added to the rest.
CHUNK = 256
# How often a threshold may be rounded in float32, in all additions to a block.
MOST = 13_000
# Norms of at least this many bytes are computed at once, while the data is still in the cache.
LARGE = 2**17


class ClippedSums:
    """Adds up clipped per-sample gradients over the micro-batches of a logical batch.

    `factors(norms [g,b], groups)` returns the clipping factors [g,b] of some records in some groups. `observe(norms [G,B])`,
    if given, is called once per micro-batch with all norms. A group is clipped as soon as all its parameters have arrived,
    and its forms are freed. A record whose norm in a group is not finite, or too small to count, adds nothing to that
    group; one whose data are not finite adds nothing to any group.
    """

    def __init__(
        self,
        model: ModelMap,
        groups: Partition,
        factors: Factors,
        observe: Observe | None,
        kernels: Kernels,
        shards: Shards | None = None,
    ) -> None:
        self.seen, self._shards = 0, shards
        self._parameters, self._dtype, self._device = model.parameters, model.dtype, model.device
        self._groups, self._factors, self._observe, self._kernels = groups, factors, observe, kernels
        self._chunk_bytes = chunk_bytes(kernels.memory_cap)
        self._sums: dict[str, RunningSum] = {}
        self._micro: MicroBatch | None = None
        self._budget: MemoryBudget | None = None
        self._open: list[GroupInProgress] = []
        self._ready: dict[int, float] = {}
        self._added = False

    def clear(self) -> None:
        """Forget the sums: a new logical batch begins."""
        self._micro, self.seen = None, 0
        for running in self._sums.values():
            running.records, running.blocks = 0, None

    def restart(self) -> None:
        """Start the micro-batch over after an interrupted backward pass; raises if a part of it has been added to others."""
        if self._micro is not None and self._added:
            if self.seen:
                raise messages.interrupted(again=True)
            self.clear()
        self._micro = None

    def complete(self) -> dict[str, Tensor]:
        """The sum of every parameter, zeros if no record has reached it, in at least float32, and after many additions in
        float64. The memory is reused at every step and must not be released."""
        complete = {}
        for name, parameter in self._parameters.items():
            running = self._sums.get(name)
            if running is None or running.block.device != parameter.device:
                shape = None if self._shards is None else self._shards.shape(name)
                running = self._sums[name] = RunningSum(parameter, shape)
            complete[name] = running.total()
        return complete

    def take(self, micro: MicroBatch, complete: Iterable[tuple[str, list[Form]]]) -> None:
        """Take all forms of some parameters. A group whose parameters have all arrived is clipped now or soon."""
        if micro is not self._micro:
            self._begin(micro)
        for name, uses in complete:
            number = self._groups.group_of[name]
            group, form = self._open[number], uses[0] if len(uses) == 1 else combine(uses)
            group.waiting.discard(name)
            last = not group.waiting and self._shards is None  # sums over the ranks are made in one order, at the end
            if isinstance(form, Instantiated):
                held = float(form.grads.nbytes)
            elif not (methods := form.methods()) or not micro.records:
                held = 0.0
            else:
                self._budget = self._budget or self._kernels.budget()
                choice = self._budget.choose(methods, micro.records, last, micro.tapped)
                if len(choice.chunks) > 1:
                    self._clip_chunks(micro, number, name, form, choice.method, choice.chunks)
                    continue
                form, held = form.by(choice.method), choice.held
            group.held[name] = form
            if not can_wait(form, LARGE):
                form.sq_norms  # noqa: B018
            if last:
                self._ready[number] = held
                if sum(self._ready.values()) > self._chunk_bytes:
                    groups = list(self._ready)
                    self._add(micro, groups, self._norms(micro, self._squares(micro, groups)))

    def finish(self, micro: MicroBatch) -> None:
        """Clip the remaining groups, and pass the norms to `observe`."""
        if micro is not self._micro:
            self._begin(micro)
        left = [number for number, group in enumerate(self._open) if group.norms is None]
        if left:
            found = self._norms(micro, self._squares(micro, left))
            if self._shards is None:
                self._add(micro, left, found)
            else:
                self._scatter(micro, found, self._shards)
        if self._observe is not None:
            self._observe(torch.stack([group.norms for group in self._open if group.norms is not None]))
        self._micro, self._open = None, []
        self.seen += micro.records

    def _begin(self, micro: MicroBatch) -> None:
        if not self.seen:
            self._drop_unfit()
        self._micro, self._budget, self._ready, self._added = micro, None, {}, False
        self._open = [GroupInProgress(set(members)) for members in self._groups.members]

    def _drop_unfit(self) -> None:
        """Free the sums of parameters that have moved to another device."""
        for name, parameter in self._parameters.items():
            running = self._sums.get(name)
            if running is not None and running.block.device != parameter.device:
                del self._sums[name]

    def _clip_chunks(
        self, micro: MicroBatch, group: int, name: str, form: Form, method: str, chunks: list[slice]
    ) -> None:
        """Clip and add a group whose last form is computed for some records at a time."""
        others, parts = self._squares(micro, [group])[0], []
        for some in chunks:
            part = form.rows(some).by(method)
            parts.append(self._norms(micro, (others[some] + part.sq_norms).unsqueeze(0), some))
            self._sum(micro, [{name: part}], parts[-1], [group], self._sums)
        together = torch.cat([norms.values for norms in parts], 1)
        self._add(micro, [group], Norms(together, all(norms.usual for norms in parts)))

    def _add(self, micro: MicroBatch, groups: list[int], norms: "Norms") -> None:
        """Clip the forms held for these groups by the norms, and add them to the sums."""
        held = [self._open[group].held for group in groups]
        self._sum(micro, held, norms, groups, self._sums)
        for row, number in enumerate(groups):
            group = self._open[number]
            group.norms, group.held = norms.values[row], {}
            self._ready.pop(number, None)

    def _sum(
        self,
        micro: MicroBatch,
        held: list[dict[str, Form]],
        norms: "Norms",
        groups: list[int],
        sums: "dict[str, RunningSum]",
    ) -> None:
        """Add each group's forms, weighted by the factors; records whose norm is infinite add nothing."""
        if not any(held):
            return
        factors, values, finite = self._factors(norms.values, groups), norms.values, None
        self._added = True
        if not norms.usual and values.numel():
            factors = factors.masked_fill(values == 0, 0.0)
            finite = values < torch.inf if float(values.max()) == torch.inf else None
        records = values.shape[1]
        most = max([_terms(form) for forms in held for form in forms.values()])
        size = BLOCK if most == 1 else max(1, int(BLOCK / most**0.5))
        for first in range(0, records, size):
            some, addends = slice(first, min(first + size, records)), []
            for row, forms in enumerate(held):
                own = factors[row] if records <= size else factors[row, some]
                for name, form in forms.items():
                    running, parameter = sums.get(name), self._parameters[name]
                    if running is None:
                        running = sums[name] = RunningSum(parameter)
                    few = form if records <= size else form.rows(some)
                    few = few if finite is None else few.keep(finite[row, some])
                    beta = running.make_room(some.stop - first, most)
                    addends.append(Addend(few, running.block, own, beta))
            add_all(addends, micro.scale)

    def _scatter(self, micro: MicroBatch, norms: "Norms", shards: Shards) -> None:
        """Clip everything by the norms of all groups, and add this process's part of each sum over all processes."""
        self._added = True
        shards.divide()
        for name, part in shards.scattered(self._one_by_one(micro, norms)):
            running = self._sums.get(name)
            if running is None:
                running = self._sums[name] = RunningSum(self._parameters[name], shards.shape(name))
            if running.make_room(max(1, micro.records), 1):
                running.block += part
            else:
                running.block.copy_(part)
        for group, own in zip(self._open, norms.values, strict=True):
            group.norms = own

    def _one_by_one(self, micro: MicroBatch, norms: "Norms") -> Iterator[tuple[str, Tensor]]:
        """Every parameter's clipped sum, in memory of its own, zeros where it has none. What was held for it is dropped."""
        for name, parameter in self._parameters.items():
            number, sums = self._groups.group_of[name], dict[str, RunningSum]()
            form = self._open[number].held.pop(name, None)
            if form is not None:
                own = Norms(norms.values[number : number + 1], norms.usual)
                self._sum(micro, [{name: form}], own, [number], sums)
            total = (sums[name] if sums else RunningSum(parameter)).total()
            yield name, total.to(widest(total.device))

    def _squares(self, micro: MicroBatch, groups: list[int]) -> Tensor:
        """Squared norms of the forms held for these groups, [g,b]."""
        forms = [(row, form) for row, number in enumerate(groups) for form in self._open[number].held.values()]
        if not forms:
            return torch.zeros(len(groups), micro.records, dtype=widest(self._device), device=self._device)
        return squares_of(forms, len(groups), micro.records)

    def _norms(self, micro: MicroBatch, squares: Tensor, some: slice = slice(None)) -> "Norms":
        """Norms of some records: infinite if the norm or the record's data are not finite, zero if too small to count."""
        values, usual = norms(squares, self._dtype, micro.scale, least_norm(self._dtype))
        if micro.broken is None:
            return Norms(values, usual)
        return Norms(values.masked_fill_(micro.broken[some], torch.inf), usual=False)


class Norms(NamedTuple):
    """The norms of some records in some groups, [g,b]; in the `usual` case none of them is zero or infinite."""

    values: Tensor
    usual: bool


@dataclass
class GroupInProgress:
    """A group that is not clipped yet: the parameters it is `waiting` for, and the forms held until they arrive."""

    waiting: set[str]
    held: dict[str, Form] = field(default_factory=dict)
    norms: Tensor | None = None


def _terms(form: Form) -> int:
    """How many terms of each record `form.add_to` adds one by one; the most frequent forms are not asked."""
    if isinstance(form, OuterProducts):
        return form.given_acts.shape[1] if form.given_acts.dim() == 3 else 1
    return 1 if isinstance(form, Instantiated) else form.terms


class RunningSum:
    """The sum of one parameter's clipped gradients over a logical batch, or a part of it of some `shape`.

    A few additions are made in float32, in `block`, and many in float64, in `blocks`. Leaving out a record may round every
    later addition to a block otherwise, each by at most 2^-24 of what the block then holds, which is one threshold for each
    of its records. `rounding` adds up these numbers of records, and a block with more than `MOST` of them is moved. A chunk
    of `CHUNK` terms is one addition; what is rounded within it is smaller (native/rows.c).

    The block's memory is reused at every step: page faults in a new tensor take longer than drawing the noise. A part of a
    sum over processes, which has a `shape`, is in float64.
    """

    def __init__(self, parameter: nn.Parameter, shape: tuple[int, ...] | None = None) -> None:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        dtype = dtype if shape is None else widest(parameter.device)
        self.block = torch.empty(parameter.shape if shape is None else shape, dtype=dtype, device=parameter.device)
        self.blocks: Tensor | None = None
        self.records, self.rounding = 0, 0.0

    def make_room(self, records: int, terms: int) -> int:
        """Make room for so many records of so many terms each, moving the block to `blocks` if needed.

        Returns the factor for what is in the block: 1 to add to it, 0 to overwrite it.
        """
        additions = -(-records * terms // CHUNK)
        own = records * (additions + 1) / 2
        rounding = self.rounding + additions * self.records + own
        if self.records and (rounding <= MOST or self.block.dtype is not torch.float32):
            self.records, self.rounding = self.records + records, rounding
            return 1
        if self.records:
            self._move()
        self.records, self.rounding = records, own
        return 0

    def total(self) -> Tensor:
        """The sum over all records so far: in the block's memory, or in float64 if it has been moved."""
        if self.blocks is None:
            return self.block if self.records else self.block.zero_()
        if self.records:
            self._move()
        return self.blocks

    def _move(self) -> None:
        self.records = 0
        if self.blocks is None:
            self.blocks = self.block.to(widest(self.block.device), copy=True)
        else:
            self.blocks += self.block

"""The second engine: norms estimated by random projections in forward mode, then one plain backward pass.

For each of r normal vectors u the model is run again in forward mode, with the inputs, modes and random numbers of the
user's own pass, which gives ⟨g_i, u⟩ for the gradient g_i of every record's loss. M_i² is their mean square. One backward
pass of the losses weighted by the factors gives the clipped sum. Every step checks itself: ⟨Σ c_i g_i, u⟩ must be
Σ c_i ⟨g_i, u⟩.

A share is bounded by the threshold times √(r/χ²_r), not by the threshold: see accounting/projections.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipless.clipped import LossFunction
from clipless.clipping import least_norm
from clipless.errors import Misuse
from clipless.gradients.capture import messages
from clipless.gradients.capture.hooks import Hooks
from clipless.gradients.capture.micro_batch import MicroBatch
from clipless.gradients.capture.model_map import Layer, ModelMap
from clipless.gradients.capture.receiver import TRAINING
from clipless.gradients.capture.refusals import refuse_module
from clipless.gradients.capture.stand_ins import StandIns
from clipless.gradients.capture.watch import StateWatch, StructureWatch
from clipless.gradients.checks.leaves import LossGraph, refuse_foreign_leaves, rows_among
from clipless.gradients.checks.passes import ForwardPass, Rerun
from clipless.gradients.checks.seeds import sketch
from clipless.gradients.checks.self_check import CheckSchedule, Met, kind_of
from clipless.gradients.checks.totals import refuse_dependent
from clipless.gradients.checks.whole_step import WholeStep
from clipless.gradients.engine import no_batch, refuse_losses
from clipless.gradients.projections.forward_mode import ForwardMode
from clipless.gradients.projections.losses import Alias, Losses
from clipless.gradients.projections.messages import differs, plain_backward, refuse_inputs, refuse_narrow
from clipless.gradients.projections.repeated import sum_again, sum_without
from clipless.gradients.records import is_square, readings, resized
from clipless.gradients.sums import Factors, Observe
from clipless.gradients.trees import closed, opened, shapes_of
from clipless.random_state import own_generators
from clipless.sampling.loader import DrawnPart
from clipless.sampling.rows import tensors_of
from clipless.torch_internals import current_graph_task, pytree

# Forward and backward mode may differ by so much, relative to the length of the clipped norms.
TOLERANCE = 2e-3
# And so much may rounding next to kinks change the sum of a pass that is run again with other kernels.
NEAR = 0.05
# Without others in its batch a record's output changes in its last digits only: 3e-7 for an LSTM of two layers.
DEPENDENT = 1e-5

Directions = Callable[[int, Sequence[Tensor]], list[Tensor]]


@dataclass
class Part(MicroBatch):
    """A micro-batch, with the passes through the model that its losses are computed from."""

    passes: list[ForwardPass] = field(default_factory=list)


class ProjectionEngine:
    """Turns backward passes of an ordinary model into clipped sums, as `Engine` does.

    `directions(j, like)` gives the j-th vector of the step, shaped like the parameters: the same numbers for all
    micro-batches of a step. Flat clipping only.
    """

    def __init__(
        self,
        model: nn.Module,
        factors: Factors,
        observe: Observe | None,
        directions: Directions,
        projections: int,
    ) -> None:
        layers, self._model = ModelMap(model), model
        self._map = layers
        self.parameters, self.modules = layers.parameters, layers.modules
        refuse_narrow(self.parameters)
        self._hooks = Hooks(layers, stray=plain_backward)
        self._factors, self._observe, self._directions = factors, observe, directions
        self._projections = projections
        self._watch, self._structure, self._stand_ins = StateWatch(model), StructureWatch(model), StandIns(self._hooks)
        self._generators, self._schedule, self._number = own_generators(self.modules), CheckSchedule(), 0
        self._forward = ForwardMode()
        self._inside: list[tuple[Layer, ForwardPass | None, bool]] = []
        self._part: Part | None = None
        self._sums: dict[str, Tensor] = {}
        self._functions: list[WholeStep] = []
        self._met, self._told = Met(), set[str]()
        self.seen = 0

    def attach(self) -> None:
        """Put hooks on the model, or raise and leave it as it was."""
        self._hooks.attach()
        self._structure.open()
        self._hooks.listener = self

    def detach(self) -> None:
        """Take all hooks off the model."""
        self._hooks.detach()
        self._hooks.listener = None
        self.clear()

    def intact(self) -> bool:
        """Whether every hook is where `attach` put it."""
        return self._hooks.intact()

    def clear(self) -> None:
        """Forget the sums: no micro-batch is open until the next logical batch begins."""
        self._part, self._sums, self.seen, self._inside, self._functions = None, {}, 0, [], []
        self._watch.close()

    def open(self, records: int, averaged: bool | None) -> None:
        """The next forward and backward pass is on so many records."""
        self._number += 1
        due = self._schedule.due(records)
        self._part, self._inside, self._hooks.empty = Part(records, due=due), [], records == 0
        if self._watch.is_open:
            self._watch.counters.rewind()
        else:
            self._watch.open(closely=due)

    def silenced(self) -> AbstractContextManager[None]:
        """Inside, the model runs as if it were not private."""
        return self._hooks.silenced()

    @property
    def due(self) -> bool:
        """Whether the open micro-batch is to be checked."""
        return self._part is not None and self._part.due

    def refuse_missed(self) -> None:
        """Does nothing: only a sharded model needs it, and none is trained with projections."""

    def refuse_unsound(self) -> int:
        """Raise if the batch has written into the model."""
        self._watch.refuse_step()
        for whole in self._functions:
            with self._hooks.silenced():
                whole.refuse(self.parameters, self.parameters)
        self._watch.counters.count()
        return len(self._functions)

    def complete(self) -> dict[str, Tensor]:
        """The clipped sum of every parameter, zeros for those that no record reached."""
        sums = {}
        for name, parameter in self.parameters.items():
            kind = torch.promote_types(parameter.dtype, torch.float32)
            found = self._sums.get(name)
            sums[name] = torch.zeros_like(parameter, dtype=kind) if found is None else found
        return sums

    # The user's forward pass.

    def approach(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Does nothing: it is called for sharded models only."""

    def enter(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a module's forward: note the inputs of the outermost one. Returns those to take instead, for no records."""
        if layer.suspect:
            refuse_module(layer.module, layer.name)
        outermost = torch.is_grad_enabled() and not any(armed for _, _, armed in self._inside)
        part, changed, begun = self._part, None, None
        if outermost and part is not None and current_graph_task() == -1:
            self._structure.refuse_changes()
            if layer.module is not self._model and not part.by_function and self._map.trains(layer.module):
                raise messages.called_in_parts(layer.name)
            inputs = (args, kwargs)
            messages.refuse_unfit_inputs(layer.name, inputs, part.records)
            refuse_inputs(layer.name, inputs)
            if part.records == 0:
                inputs = changed = self._stand_ins.inputs(layer.module, inputs)
            reading = next(readings(inputs, part.records), {})
            rerun = Rerun.of(layer.module, inputs, self._generators)
            begun = ForwardPass(layer.name, part.records, reading, is_square(inputs, part.records), rerun=rerun)
            part.modes = list(map(TRAINING, self.modules))
        self._inside.append((layer, begun, torch.is_grad_enabled()))
        return changed

    def leave(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After a module's forward: note the outputs of the outermost one."""
        if not self._inside or self._inside[-1][0] is not layer:
            return None
        _, begun, _ = self._inside.pop()
        part = self._part
        if begun is None or part is None or output is None:
            return None
        self._watch.refuse_pass(part.records)
        output = opened(output)
        messages.refuse_hidden(layer.name, output)
        if part.records == 0:
            return closed(resized(output, {k: 0 for k, shape in enumerate(shapes_of(output)) if shape[:1] == (1,)}, 0))
        leaves, spec = pytree.tree_flatten(output)
        found = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        begun.places = [place for place, k in enumerate(found) if leaves[k].requires_grad]
        places = [found[place] for place in begun.places]
        if not places:
            return None
        begun.outputs = tuple(leaves[k] for k in places)
        begun.out_dims = tuple(_dim(output, part.records) for output in begun.outputs)
        pairs = zip(begun.outputs, begun.out_dims, strict=True)
        begun.values = [sketch(output, dim or 0) for output, dim in pairs] if part.due else []
        begun.drawn = begun.rerun.now() if part.due and begun.rerun else None
        part.passes.append(begun)
        for k, value in zip(places, Alias.apply(*begun.outputs), strict=True):  # type: ignore[no-untyped-call]
            leaves[k] = value
        return closed(pytree.tree_unflatten(leaves, spec))

    # The backward pass.

    def run(self, function: LossFunction, batch: Any, drawn: DrawnPart | None) -> None:
        """Compute the losses of the open micro-batch by a function of the model and the batch, and add the clipped sum."""
        part = self._part
        if part is None:
            raise no_batch()
        if not part.records:
            part.done = True
            return
        part.by_function, whole = True, None
        if self._met.add(kind_of(function), part.records) or part.due:
            shared = self._generators, self._told
            whole = WholeStep(function, self._model, batch, part.records, self._number, drawn, *shared)
        losses = function(self._model, batch)
        refuse_losses(losses, part, "record_losses")
        if whole is not None:
            whole.returned(losses)
        with torch.autocast(next(iter(self.parameters.values())).device.type, enabled=False):
            self._backward(losses, function, tensors_of(batch))
        if whole is not None:
            self._functions.append(whole)

    def backward(self, losses: Tensor) -> None:
        """From one loss for each record: estimate the norms, and add the clipped sum."""
        self._backward(losses, None, ())

    def _backward(self, losses: Tensor, function: LossFunction | None, given: Sequence[object]) -> None:
        part = self._part
        refuse_losses(losses, part)
        assert part is not None
        if part.done:
            raise Misuse(
                "a second backward() on the same records: their gradients would count twice. Add the losses and call "
                "backward() once, or split the batch with private.loader.microbatches(n)."
            )
        if part.modes and part.modes != list(map(TRAINING, self.modules)):
            raise messages.modes_changed()
        if part.records:
            leaves = LossGraph(losses, ()).leaves
            given = rows_among(leaves, part.records) if function is None else given
            known = {*map(id, given), *map(id, self.parameters.values())}
            refuse_foreign_leaves(leaves, known, part.due, function)
            if not part.passes:
                raise Misuse("the losses do not come from this model: compute them from what model(x) returned.")
            with self._hooks.silenced():
                self._add(part, losses)
        part.done, part.passes = True, []
        self.seen += part.records

    def _add(self, part: Part, losses: Tensor) -> None:
        function = Losses(losses, part.passes)
        if part.due:
            function.refuse_mixed(self._number)
            for one in part.passes:
                if not one.square:
                    refuse_dependent(one, DEPENDENT)
        trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        first, products, squares = self._projected(function, part, trainable)
        norms = (squares / self._projections).sqrt().to(self._map.dtype)
        norms = norms.nan_to_num(nan=torch.inf, posinf=torch.inf)
        norms = F.threshold(norms, least_norm(norms.dtype), 0.0).unsqueeze(0)
        finite = norms < torch.inf
        factors = self._factors(norms, [0]).masked_fill((norms == 0) | ~finite, 0.0)[0]
        weights = factors.to(losses.dtype)
        values, pulled, kernels = list(trainable.values()), function.pulled(weights), self._forward.kernels()
        if bool(finite.all()):
            grads = _dense(torch.autograd.grad(losses, values, weights, allow_unused=True))
        else:
            grads = _dense(sum_without(~finite[0], part.passes, pulled, values))
        estimates = (first, weights, products, norms[0])
        if not self._agree(grads, *estimates):
            # Other kernels round differently, and next to a kink that is another gradient: take the one that was estimated.
            again = _dense(sum_again(kernels, part.passes, pulled, values)) if bool(finite.all()) else grads
            if not self._agree(again, *estimates) or not _near(again, grads):
                raise differs()
            grads = again
        for name, grad in zip(trainable, grads, strict=True):
            if grad is not None:
                wide = torch.float64 if grad.is_cpu or grad.is_cuda else torch.float32
                self._sums[name] = grad.to(wide) if name not in self._sums else self._sums[name] + grad.to(wide)
        if self._observe is not None:
            self._observe(norms)

    def _projected(
        self, function: Losses, part: Part, trainable: dict[str, nn.Parameter]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """The first vector, every record's product with it, [b], and the sum of the squares of all products, [b]."""
        kept: list[Tensor] = []
        products = squares = torch.zeros(())
        for number in range(self._projections):
            vectors = dict(zip(self.parameters, self._directions(number, list(self.parameters.values())), strict=True))
            directions = {id(parameter): vectors[name] for name, parameter in trainable.items()}
            moved: list[Tensor | None] = []
            for one in part.passes:
                assert one.rerun is not None
                found = self._forward.tangents(one.rerun, one.name, directions)
                if len(found) <= max(one.places):
                    raise differs()
                moved += [found[place] for place in one.places]
            product = function.moved(moved).double()
            if number == 0:
                kept, products, squares = [vectors[name] for name in trainable], product, torch.zeros_like(product)
            squares = squares + product.square()
        return kept, products, squares

    def _agree(
        self, grads: Sequence[Tensor | None], first: list[Tensor], weights: Tensor, products: Tensor, norms: Tensor
    ) -> bool:
        """Whether the sum's product with the first vector is that of the records' products."""
        used = weights != 0
        ours = float((weights.double() * products)[used].sum())
        theirs = sum(float((g.double() * u.double()).sum()) for g, u in zip(grads, first, strict=True) if g is not None)
        size = float((weights.double() * norms.double())[used].norm()) + abs(ours)
        return abs(ours - theirs) <= TOLERANCE * size + 1e-30


def _dim(output: Tensor, records: int) -> int | None:
    return output.shape.index(records) if records in output.shape else None


def _dense(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]


def _near(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    """Whether two sums are the same but for rounding next to kinks."""
    if any((a is None) != (b is None) for a, b in zip(one, other, strict=True)):
        return False
    pairs = [(a.double(), b.double()) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return apart <= NEAR**2 * sum(float(b.square().sum()) for _, b in pairs)

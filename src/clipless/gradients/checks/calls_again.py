"""A function from batch to losses, called again under the circumstances of its first call."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clipless.clipped import LossFunction
from clipless.gradients.checks.constant_draws import constant_draws
from clipless.gradients.checks.passes import Rerun
from clipless.gradients.checks.reach import generators_of
from clipless.random_state import Generator, RandomState, nothing_drawn
from clipless.sampling.rows import copied


class CallResult(NamedTuple):
    """The losses of a call; whether it drew random numbers; and whether it drew as many as the first call."""

    losses: Tensor
    random: bool
    as_many: bool


class CallsAgain:
    """Calls the function again: on copies of batches, in the modes of the first call, from its random state and with its
    autocast.

    `random` says whether the first call drew random numbers, and `half` whether it computed, or may have computed, with
    16 bits. The generators that the function reaches are restored like the global ones.
    """

    def __init__(self, function: LossFunction, model: nn.Module, batch: Any, generators: Sequence[Generator]) -> None:
        own = {id(generator): generator for generator in (*generators, *generators_of(function))}
        self.function, self.model, self.batch, self.random = function, model, copied(batch), False
        self._circumstances = Rerun.of(model, ((), {}), list(own.values()))
        self._after = self._circumstances.random_state
        self.half = self._circumstances.autocast[1] or any(p.dtype.itemsize < 4 for p in model.parameters())

    def returned(self) -> None:
        """The first call has returned."""
        self._after = self.now()
        self.random = not nothing_drawn(self._circumstances.random_state, self._after)

    def now(self) -> RandomState:
        """The present state of everything that random numbers may be drawn from."""
        return self._circumstances.now()

    @property
    def generators(self) -> Sequence[Generator]:
        """The generators of the model and the function."""
        return self._circumstances.generators

    def __call__(self, batch: Any, calm: bool = False) -> CallResult:
        """The losses of a batch. `calm` has all modules in evaluation mode, and constants for torch's random numbers."""
        try:
            return self._once(batch, calm)
        except RuntimeError:
            if torch.is_grad_enabled():
                raise
        with torch.enable_grad():  # the function differentiates something itself
            return self._once(batch, calm)

    def attempt(self, batch: Any, records: int, calm: bool = False) -> CallResult | None:
        """The losses of other records; None if the function does not take them."""
        try:
            outcome = self(batch, calm)
        except Exception:
            return None
        fits = isinstance(outcome.losses, Tensor) and outcome.losses.shape == (records,)
        return outcome if fits else None

    def noting_half(self) -> AbstractContextManager[object]:
        """Inside, it is noted if a call computes with 16 bits."""
        return _HalfNoted(self)

    def _once(self, batch: Any, calm: bool) -> CallResult:
        drawing: AbstractContextManager[object] = constant_draws() if calm else nullcontext()

        def call() -> Tensor:
            with drawing:
                return self.function(self.model, copied(batch))

        losses, after = self._circumstances(evaluate=calm, run=call)
        before = self._circumstances.random_state
        return CallResult(losses, not nothing_drawn(before, after), nothing_drawn(self._after, after))


class _HalfNoted(TorchFunctionMode):
    """Notes whether any operation returns floating-point numbers of 16 bits."""

    def __init__(self, calls: CallsAgain) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
                self._calls.half = True
        return result

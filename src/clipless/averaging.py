"""Which weights of a run are kept as samples, and predictions averaged over them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clipless.arguments import real, whole
from clipless.errors import InvalidArgument, InvalidType


@dataclass(frozen=True)
class Thinning:
    """After `burn_in` steps every `every`-th one is kept, up to step `steps`."""

    burn_in: int
    every: int
    steps: int

    @staticmethod
    def of(burn_in: float, every: int, steps: int) -> "Thinning":
        """From the share of the steps that is left out first. Raises if no step would be kept.

        >>> print(Thinning.of(0.5, 10, 100))
        5 samples, one in 10 steps after the first 50
        """
        share = real("burn_in", burn_in)
        if not 0 <= share < 1:
            raise InvalidArgument(f"burn_in is a share of the steps, at least 0 and below 1, got {burn_in!r}.")
        made = Thinning(round(share * steps), whole("thinning", every), steps)
        if made.burn_in + made.every > steps:
            raise InvalidArgument(
                f"no sample would be kept: {steps} steps, the first {made.burn_in} left out, one kept in {every}. Take more "
                "steps, or a smaller burn_in or thinning."
            )
        return made

    def keeps(self, step: int) -> bool:
        """Whether the weights after so many steps are kept."""
        return step > self.burn_in and (step - self.burn_in) % self.every == 0

    def __str__(self) -> str:
        count = (self.steps - self.burn_in) // self.every
        return f"{count} samples, one in {self.every} steps after the first {self.burn_in}"


@dataclass(frozen=True)
class Prediction:
    """The mean over `samples` outputs, and their standard deviation, which is 0 for a single one."""

    mean: Tensor
    stddev: Tensor
    samples: int


def averaged(
    model: nn.Module,
    samples: Sequence[Mapping[str, Tensor]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of: Callable[[Any], Any] | None = None,
) -> Prediction:
    """The model's output, or what `of` makes of it, over all samples of its weights. The model is left as it was."""
    mean = squares = torch.zeros(())
    with torch.no_grad(), _evaluating(model):
        for number, sample in enumerate(samples, start=1):
            output = functional_call(model, dict(sample), args, kwargs)
            output = output if of is None else of(output)
            if not isinstance(output, Tensor) or not output.is_floating_point():
                raise InvalidType(
                    f"predictions are averaged over floating-point tensors, got {type(output).__name__}: choose one with "
                    "of=lambda output: output['logits'].softmax(-1), for instance."
                )
            wide = output.double()
            change = wide - mean
            mean = mean + change / number
            squares = squares + change * (wide - mean)
    spread = (squares / max(len(samples) - 1, 1)).clamp(min=0).sqrt()
    return Prediction(mean.to(output.dtype), spread.to(output.dtype), len(samples))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode

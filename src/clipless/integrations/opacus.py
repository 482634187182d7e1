"""Opacus: clipless' rules and threshold policies inside an Opacus run, for those who cannot move yet.

Per-sample gradients and noise are Opacus' own; clipping, the sensitivity and the thresholds are clipless'. Opacus'
accountant is told the multiplier of the whole step, gradient and statistic together. Tested with opacus 1.6.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _generate_noise, _mark_as_processed
from torch import Tensor, nn

from clipless.accounting import gradient_multiplier
from clipless.arguments import whole
from clipless.clipping import Clipping, as_clipping, least_norm
from clipless.errors import InvalidArgument, InvalidType, Misuse
from clipless.partition import partition
from clipless.phases import policy_setting
from clipless.plan import noise_stddevs, sensitivity
from clipless.thresholds import Decay, Setting

_KEY = "clipless"
_BLOCK = 64


class ClippedOptimizer(DPOptimizer):
    """A DPOptimizer that clips by a rule and a threshold policy of clipless. Made by `clip_with`.

    `noise_multiplier` stays that of the whole step, which the accountant reads. If the policy releases a statistic, it and
    the gradient share that multiplier, so the gradient gets more noise. `max_grad_norm` is the sensitivity at the present
    thresholds; it follows from them and cannot be set.
    """

    def __init__(self, optimizer: DPOptimizer, names: Sequence[str], clipping: Clipping, steps: int) -> None:
        parameters = optimizer.params
        groups = partition(clipping.groups, names)
        self.clipping, self._steps = clipping, steps
        self._group_of = [groups.group_of[name] for name in names]
        sizes = [0] * len(groups)
        for parameter, group in zip(parameters, self._group_of, strict=True):
            sizes[group] += parameter.numel()
        self._dimensions = tuple(sizes)
        self._remainders: dict[int, tuple[Tensor, Tensor]] = {}
        self._statistic: Tensor | None = None
        self._released: Tensor | None = None
        self._batch = optimizer.expected_batch_size or 1
        clipping.start(len(groups))  # or raises: thresholds that do not fit the groups
        self._state = clipping.policy.init(Setting(len(groups)))
        super().__init__(
            optimizer.original_optimizer,
            noise_multiplier=optimizer.noise_multiplier,
            max_grad_norm=None,
            expected_batch_size=optimizer.expected_batch_size,
            loss_reduction=optimizer.loss_reduction,
            generator=optimizer.generator,
            secure_mode=optimizer.secure_mode,
        )
        self.step_hook = optimizer.step_hook
        self._multipliers()  # or raises: a statistic that takes more than the whole step

    @property
    def thresholds(self) -> Tensor:
        """The present thresholds, one row per group, [G,1]: constants or released values, safe to show."""
        return self.clipping.policy.thresholds(self._state).clone()

    @property
    def max_grad_norm(self) -> float:
        """How far one record can move the clipped sum."""
        return float(sensitivity(self.thresholds))

    @max_grad_norm.setter
    def max_grad_norm(self, value: object) -> None:
        if value is not None:  # Opacus' constructor sets it once
            raise Misuse(
                "max_grad_norm follows from the clipping's thresholds: leave schedulers of it out, and choose the threshold "
                "by clip_with(clipping=...), for instance clipless.decay() for one that shrinks."
            )

    def _multipliers(self) -> tuple[Setting, float, float | None]:
        """What the policy knows, and the noise multipliers of gradient and statistic at the step's present one."""
        total, shape = self.noise_multiplier, (self.clipping, self._dimensions, self._batch, self._steps)
        statistic = self.clipping.policy.statistic_multiplier(total, policy_setting(*shape, total))
        gradient = total if statistic is None else gradient_multiplier(total, statistic)
        return policy_setting(*shape, gradient), gradient, statistic

    def clip_and_accumulate(self) -> None:
        """Add the batch's clipped gradients to `p.summed_grad`, and its statistic to that of the logical batch.

        One record changes how all that come after it are rounded, which in half precision moves the sum by many times the
        sensitivity. So sums are in float64: `p.summed_grad` in float32 at least, and a remainder.
        """
        parameters, samples = self.params, self.grad_samples
        squares = torch.zeros(len(self._dimensions), len(samples[0]), dtype=torch.float64, device=samples[0].device)
        for sample, group in zip(samples, self._group_of, strict=True):
            norms = torch.linalg.vector_norm(sample.flatten(1), dim=1, dtype=torch.float64)
            squares[group] += norms.to(squares.device) ** 2
        norms = squares.sqrt()
        norms = norms.masked_fill(norms < least_norm(torch.promote_types(samples[0].dtype, torch.float32)), 0.0)
        factors = self.clipping.factors(norms, self.thresholds.to(norms), range(len(norms))).masked_fill(
            norms == 0, 0.0
        )
        observed = self.clipping.policy.observe(self._state, norms)
        if observed is not None:
            self._statistic = observed if self._statistic is None else self._statistic + observed
        for parameter, sample, group in zip(parameters, samples, self._group_of, strict=True):
            _check_processed_flag(parameter.grad_sample)
            finite = norms[group].isfinite().to(sample.device)
            kept = sample if bool(finite.all()) else sample.masked_fill(~_as(finite, sample), 0.0)
            clipped = _weighted_sum(factors[group].to(sample.device), kept).to(parameter.device)
            if parameter.summed_grad is None:
                kind = torch.promote_types(parameter.dtype, torch.float32)
                parameter.summed_grad = torch.zeros_like(parameter, dtype=kind)
            clipped += self._sum(parameter)
            parameter.summed_grad.copy_(clipped)  # in place: Opacus marks tensors that have been used
            self._remainders[id(parameter)] = parameter.summed_grad, clipped - parameter.summed_grad
            _mark_as_processed(parameter.grad_sample)

    def _sum(self, parameter: Any) -> Tensor:
        """What was added up so far, in float64."""
        total, remainder = self._remainders.get(id(parameter), (None, None))
        exact: Tensor = parameter.summed_grad.double()
        return exact if remainder is None or total is not parameter.summed_grad else exact + remainder

    def add_noise(self) -> None:
        """Add Opacus' noise to sums and statistic, at the present thresholds."""
        _, gradient, statistic = self._multipliers()
        stddevs = noise_stddevs(self.thresholds, gradient, self.clipping.allocation).flatten().tolist()
        for parameter, group in zip(self.params, self._group_of, strict=True):
            _check_processed_flag(parameter.summed_grad)
            noised = self._sum(parameter) + self._noise(stddevs[group], parameter.summed_grad)
            parameter.grad = noised.view_as(parameter).to(parameter.dtype)
            _mark_as_processed(parameter.summed_grad)
        if statistic is not None:
            assert self._statistic is not None
            self._released = (self._statistic + self._noise(statistic, self._statistic)).cpu()

    def _noise(self, stddev: float, like: Tensor) -> Tensor:
        return _generate_noise(std=stddev, reference=like, generator=self.generator, secure_mode=self.secure_mode)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As Opacus' own; a statistic is kept between the parts of one logical batch, like the sums."""
        super().zero_grad(set_to_none)
        if not self._is_last_step_skipped:
            self._statistic = None
            self._remainders.clear()

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool | None:
        """As Opacus' own; after a step that was not skipped the policy learns from the noised statistic."""
        stepped: bool | None = super().pre_step(closure)
        if stepped:
            self._state = self.clipping.policy.update(self._state, self._released, self._multipliers()[0])
            self._statistic = self._released = None
        return stepped

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the policy's under "clipless"."""
        return super().state_dict() | {_KEY: {name: value.clone() for name, value in self._state.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if _KEY not in state_dict:
            raise InvalidArgument(
                "the state is of an optimizer without clip_with, so it has no thresholds: load it before clip_with."
            )
        super().load_state_dict({name: value for name, value in state_dict.items() if name != _KEY})
        self._state = {name: value.clone() for name, value in state_dict[_KEY].items()}


def clip_with(
    optimizer: DPOptimizer, model: nn.Module, clipping: str | Clipping = "auto-s", *, steps: int | None = None
) -> ClippedOptimizer:
    """The optimizer of an Opacus run, from `PrivacyEngine.make_private` or `make_private_with_epsilon`, with a clipping of
    clipless: a name such as "auto-s" or "dc-e", or an object such as `clipless.auto_v(groups="per-layer")`.

    Use the result instead of the optimizer given; `max_grad_norm=` given to Opacus then has no meaning. Epsilon is still
    Opacus', `engine.get_epsilon(delta)`. `steps`, all that will be taken, is needed by `clipless.decay` alone.
    """
    if type(optimizer) is not DPOptimizer:
        raise InvalidType(
            "clip_with takes the DPOptimizer of make_private(clipping='flat', grad_sample_mode='hooks') in one process, got "
            f"{type(optimizer).__name__}: ghost clipping, per-layer, adaptive and distributed optimizers clip elsewhere. "
            "Groups are given by the clipping, clipless.auto_s(groups='per-layer'); clipless.make_private does the rest."
        )
    if optimizer.step_hook is None:
        raise Misuse(
            "no accountant is attached to this DPOptimizer: use the one that PrivacyEngine.make_private returns."
        )
    chosen = as_clipping(clipping)
    if isinstance(chosen.policy, Decay) and steps is None:
        raise InvalidArgument(f"{chosen.name} needs steps=, the number of all steps of the run: it shrinks over them.")
    count = 1 if steps is None else whole("steps", steps)
    if any(relative != 1 for relative, _ in chosen.policy.noise_schedule(count)):
        raise InvalidArgument(
            "a noise multiplier that changes was not part of Opacus' calibration: use noise_rho=1, or clipless.make_private."
        )
    return ClippedOptimizer(optimizer, _names(optimizer, model), chosen, count)


def _names(optimizer: DPOptimizer, model: nn.Module) -> list[str]:
    """The names of the optimizer's parameters in the model, without the wrapper that Opacus has put around it."""
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be the module that Opacus trains, got {type(model).__name__}.")
    names = {id(p): name.removeprefix("_module.") for name, p in model.named_parameters()}
    missing = [p for p in optimizer.params if id(p) not in names]
    if missing:
        raise InvalidArgument(
            "the optimizer holds parameters that are not this model's: give the model that it trains."
        )
    return [names[id(p)] for p in optimizer.params]


def _weighted_sum(factors: Tensor, samples: Tensor) -> Tensor:
    """The weighted sum in float64, of some records at a time."""
    total = torch.zeros(samples.shape[1:], dtype=torch.float64, device=samples.device)
    for weights, block in zip(factors.double().split(_BLOCK), samples.split(_BLOCK), strict=True):
        total += torch.einsum("i,i...", weights, block.double())
    return total


def _as(mask: Tensor, sample: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (sample.dim() - 1))

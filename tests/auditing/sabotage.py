"""A zoo of broken privacy: each function breaks one thing inside clipless, by monkeypatch, and says which seam it uses.

Everything that knows the inside of the library stands here, so that the tests and the audit know its outside only.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import clipless.plan
from clipless.gradients.capture import refusals
from clipless.gradients.checks.self_check import SelfCheck
from clipless.noise import NoiseSource
from clipless.private import Private
from clipless.sampling.loader import Batch, PoissonSampler

NEXT_TO_NOTHING = 1e-9


def scaled_noise(patch: pytest.MonkeyPatch, factor: Callable[[int], float], *, stream: str = "gradient") -> None:
    """Seam: `release` of the noise source. The noise of tensor n of a stream is multiplied by `factor(n)`."""
    patch.setattr(NoiseSource, "release", _scaled(NoiseSource.release, factor, stream))


def _scaled(release: Callable[..., list[Tensor]], factor: Callable[[int], float], stream: str) -> Any:
    def broken(
        self: Any, name: str, step: int, values: Sequence[Tensor], stddevs: Sequence[float], **further: Any
    ) -> list[Tensor]:
        if name == stream:
            stddevs = [stddev * factor(number) for number, stddev in enumerate(stddevs)]
        return release(self, name, step, values, stddevs, **further)

    return broken


def no_noise(patch: pytest.MonkeyPatch) -> None:
    scaled_noise(patch, lambda _: NEXT_TO_NOTHING)


def noise_of_one_rank(patch: pytest.MonkeyPatch, ranks: int = 2) -> None:
    """Each of W ranks is to add its share of the variance, and only one does."""
    scaled_noise(patch, lambda _: ranks**-0.5)


def noise_of_every_rank(patch: pytest.MonkeyPatch, ranks: int = 2) -> None:
    """Each of W ranks adds all of the noise."""
    scaled_noise(patch, lambda _: ranks**0.5)


def skipped_layer(patch: pytest.MonkeyPatch) -> None:
    """The second parameter gets no noise."""
    scaled_noise(patch, lambda number: NEXT_TO_NOTHING if number == 1 else 1.0)


def statistic_without_noise(patch: pytest.MonkeyPatch) -> None:
    scaled_noise(patch, lambda _: NEXT_TO_NOTHING, stream="statistic")


def noise_by_realised_batch(patch: pytest.MonkeyPatch) -> None:
    """Seam: `Private._noised_gradients`. The noise of a step grows with the number of records drawn."""
    ratio = [1.0]
    original = Private._noised_gradients

    def broken(self: Private, *arguments: Any) -> dict[str, Tensor]:
        assert self._batch is not None
        ratio[0] = max(self._batch.records / self.plan.expected_batch, NEXT_TO_NOTHING)
        return original(self, *arguments)

    patch.setattr(Private, "_noised_gradients", broken)
    scaled_noise(patch, lambda _: ratio[0])


def underestimated_norms(patch: pytest.MonkeyPatch, factor: float = 0.9) -> None:
    """Seam: `Private._factors`, which turns norms into factors."""
    original = Private._factors
    patch.setattr(Private, "_factors", lambda self, norms, groups: original(self, norms * factor, groups))


def layer_missing_from_norm(patch: pytest.MonkeyPatch) -> None:
    """One of the two layers, which share a canary's norm equally, is left out of it."""
    underestimated_norms(patch, 0.5**0.5)


def records_twice(patch: pytest.MonkeyPatch) -> None:
    """Seam: `PoissonSampler.batch`."""
    original = PoissonSampler.batch

    def broken(self: PoissonSampler, draw: int) -> tuple[Batch, Tensor]:
        batch, indices = original(self, draw)
        return replace(batch, records=2 * batch.records), indices.repeat(2)

    patch.setattr(PoissonSampler, "batch", broken)


def shuffled_batches(patch: pytest.MonkeyPatch) -> None:
    """Seam: `PoissonSampler.batch`. Every epoch deals out all records in batches of equal size."""

    def broken(self: PoissonSampler, draw: int) -> tuple[Batch, Tensor]:
        size = round(self.rate * self.size)
        per_epoch = self.size // size
        seed = int.from_bytes(self.source.sample_key(draw // per_epoch)[:7])
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(seed))
        return Batch(draw, size, self.name, self.rate), order[draw % per_epoch * size :][:size].sort().values

    patch.setattr(PoissonSampler, "batch", broken)


def per_layer_sensitivity_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Seam: `clipless.plan.noise_stddevs`. Each group's noise is in proportion to its own threshold."""
    patch.setattr(clipless.plan, "noise_stddevs", lambda thresholds, multiplier, _: multiplier * thresholds.double())


def thresholds_from_true_norms(patch: pytest.MonkeyPatch) -> None:
    """Seam: `Private._release`. The statistic is released with noise, and the policy learns from the one without."""
    original = Private._release

    def broken(self: Private, step: int) -> None:
        before, true = self._policy_state, self._statistic
        original(self, step)
        assert true is not None
        self._set_policy(self.plan.clipping.policy.update(before, true, self.plan.setting))

    patch.setattr(Private, "_release", broken)


def noise_reused_after_resume(patch: pytest.MonkeyPatch) -> None:
    """Seams: `Private.load_state_dict`, `release`. After a resume the source counts steps from 0 again."""
    offset = [0]
    load = Private.load_state_dict

    def resumed(self: Private, state: dict[str, Any]) -> None:
        load(self, state)
        offset[0] = self.ledger.steps

    patch.setattr(Private, "load_state_dict", resumed)
    release = NoiseSource.release

    def broken(self: NoiseSource, name: str, step: int, *rest: Any, **further: Any) -> list[Tensor]:
        return release(self, name, step - offset[0], *rest, **further)

    patch.setattr(NoiseSource, "release", broken)


def batch_norm_let_through(patch: pytest.MonkeyPatch) -> None:
    """Seams: the refusals by name and the self-check of the first steps, both turned off."""
    patch.setattr(refusals, "_SUSPECTS", ())
    patch.setattr(SelfCheck, "due", lambda self, records: False)
    patch.setattr(SelfCheck, "wanted", lambda self, forward_pass, micro: False)


def correlated_coordinates(patch: pytest.MonkeyPatch) -> None:
    """Seam: `release`. The same numbers for every tensor of the same shape."""
    release = NoiseSource.release

    def broken(
        self: NoiseSource,
        name: str,
        step: int,
        values: Sequence[Tensor],
        stddevs: Sequence[float],
        divisor: float = 1.0,
        *further: Any,
        **more: Any,
    ) -> list[Tensor]:
        if name != "gradient":
            return release(self, name, step, values, stddevs, divisor, *further, **more)
        (noise,) = release(self, name, step, [torch.zeros_like(values[0])], stddevs[:1], divisor)
        return [value / divisor + noise for value in values]

    patch.setattr(NoiseSource, "release", broken)

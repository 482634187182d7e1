"""The step game on any small model: releases with and without one given record, told apart by a learned direction.

In the canary model the direction of a record's gradient is known. Here it is learned: it is the difference of the mean
releases of the first third. So it also sees a record that acts through others, as in a batch norm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless.arguments import whole
from clipless.arrays import Floats
from clipless.auditing.step_game import Releases
from clipless.auditing.watching import Watcher
from clipless.clipping import Clipping
from clipless.errors import InvalidArgument

LEARNING = 1 / 3


@dataclass(frozen=True)
class ModelGame:
    """Records, each a tensor for every argument of `losses(model, *batch)`, and one more that is in or out. Full batches.

    Buffers and weights stay as `make_model` returns them (the learning rate is 0), so it must always return the same model.
    """

    make_model: Callable[[], nn.Module]
    losses: Callable[..., Tensor]
    records: Sequence[Tensor]
    canary: Sequence[Tensor]
    clipping: str | Clipping = "auto-s"
    noise_multiplier: float = 1.0
    noise: str | None = None
    seed: int | None = None
    delta: float = 1e-5


def play_model(game: ModelGame, releases: int) -> Releases:
    """Play `releases` times with the record and as often without it."""
    number = whole("releases", releases)
    there, plan = _releases(game, number, present=True)
    gone, _ = _releases(game, number, present=False)
    first = int(LEARNING * number)
    if there.shape[1] > first:
        raise InvalidArgument(
            f"{number} releases are too few to learn a direction among {there.shape[1]} parameters: play at least "
            f"{round(there.shape[1] / LEARNING)}, or use a smaller model."
        )
    direction = there[:first].mean(0) - gone[:first].mean(0)
    direction /= max(float(np.linalg.norm(direction)), 1e-12)
    noise = gone - gone.mean(0)
    return Releases(
        inside=there[first:] @ direction,
        outside=gone[first:] @ direction,
        noise=noise * (number / (number - 1)) ** 0.5,
        groups=np.zeros(noise.shape[1], dtype=np.int64),
        thresholds_follow=True,
        noise_multiplier=plan.noise_multiplier,
        sample_rate=1.0,
        steps=2 * number,
    )


def _releases(game: ModelGame, steps: int, *, present: bool) -> tuple[Floats, clipless.PrivacyPlan]:
    """Gradients over the claimed standard deviation of their noise, [steps, parameters]."""
    model = game.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pairs = zip(game.records, game.canary, strict=True)
    data = [torch.cat([record, one.unsqueeze(0)]) if present else record for record, one in pairs]
    private = clipless.make_private(
        model,
        optimizer,
        TensorDataset(*data),
        noise_multiplier=game.noise_multiplier,
        delta=game.delta,
        batch_size=len(data[0]),
        steps=steps,
        clipping=game.clipping,
        accountant="gdp",
        seed=None if game.seed is None else 2 * game.seed + present,
        group=False,
        **({} if game.noise is None else {"noise": game.noise}),  # type: ignore[arg-type]
    )
    seen = []
    watchers = [Watcher(private, [named]) for named in model.named_parameters()]
    for batch in private.loader:
        optimizer.zero_grad()
        for watcher in watchers:
            watcher.before_step()
        private.backward(game.losses(model, *batch))
        optimizer.step()
        seen.append(np.concatenate([watcher.after_step().ravel() for watcher in watchers]))
    private.detach()
    return np.stack(seen), private.plan

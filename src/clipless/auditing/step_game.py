"""The step game: many releases of one step, with and without the record that moves it most.

All of it goes through `make_private`, and only what an adversary sees is read: the released gradient and statistic.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import TensorDataset

import clipless
from clipless.arguments import whole
from clipless.arrays import Floats, Integers
from clipless.auditing.canary_model import CanaryModel, along, worst_norms
from clipless.auditing.watching import Watcher, replayed_states, thresholds_follow
from clipless.clipping import Clipping, as_clipping
from clipless.errors import InvalidArgument
from clipless.thresholds import Setting, State

CANARIES = 64
# A run keeps the statistics of about this many steps, from which thresholds are recomputed: longer games take several runs.
MOST_STEPS = 4000
SPARE = 32  # coordinates of each layer that no record touches: there noise is seen alone


@dataclass(frozen=True)
class StepGame:
    """What is played: a step of this multiplier at this rate, under this clipping.

    With a full batch (`sample_rate=1`) and a policy with a statistic there is one canary, and gradient and statistic are
    seen together. Otherwise every release holds `canaries` independent games, one along each coordinate, and a statistic
    is ignored. `resume_after` interrupts the run after that many steps and continues from its state. `group` is that of
    `make_private`: False plays in this process alone, None in all that are initialised, on each of which the game is played.
    """

    clipping: str | Clipping = "auto-s"
    noise_multiplier: float = 1.0
    sample_rate: float = 1.0
    layers: int = 2
    canaries: int = CANARIES
    noise: str | None = None
    seed: int | None = None
    delta: float = 1e-5
    resume_after: int | None = None
    group: ProcessGroup | bool | None = False

    @property
    def joint(self) -> bool:
        """Whether the statistic is part of what is seen."""
        policy, setting = as_clipping(self.clipping).policy, Setting(1, gradient_multiplier=self.noise_multiplier)
        return self.sample_rate == 1 and policy.statistic_multiplier(self.noise_multiplier, setting) is not None


@dataclass(frozen=True)
class Releases:
    """Scores of games with (`inside`) and without (`outside`) the record. By the claim they are normal with variance 1, and
    mean 1/noise_multiplier wherever the record takes part, else 0.

    `noise` [steps, coordinates] and `groups` are residuals for `gaussian_fit`, those of a statistic under `-1`.
    `thresholds_follow` says whether every threshold was the one that the released statistics lead to.
    """

    inside: Floats
    outside: Floats
    noise: Floats
    groups: Integers
    thresholds_follow: bool
    noise_multiplier: float
    sample_rate: float
    steps: int


def play(game: StepGame, releases: int, on_step: Callable[[], None] = lambda: None) -> Releases:
    """Play at least `releases` games of each kind, and return what was seen."""
    number = whole("releases", releases)
    most = MOST_STEPS if game.joint else MOST_STEPS * whole("canaries", game.canaries)
    if number > most:
        later = replace(game, seed=None if game.seed is None else game.seed + 1)
        return _joined(play(game, most, on_step), play(later, number - most, on_step))
    if not game.joint:
        return _many_canaries(game, math.ceil(number / whole("canaries", game.canaries)), on_step)
    there, gone = (_one_canary(game, number, present, on_step) for present in (True, False))
    return Releases(
        there.inside,
        gone.inside,
        np.concatenate([there.noise, gone.noise]),
        gone.groups,
        there.thresholds_follow and gone.thresholds_follow,
        there.noise_multiplier,
        there.sample_rate,
        there.steps + gone.steps,
    )


def _joined(first: Releases, second: Releases) -> Releases:
    """What was seen in two runs of one game."""
    return replace(
        first,
        inside=np.concatenate([first.inside, second.inside]),
        outside=np.concatenate([first.outside, second.outside]),
        noise=np.concatenate([first.noise, second.noise]),
        thresholds_follow=first.thresholds_follow and second.thresholds_follow,
        steps=first.steps + second.steps,
    )


def _many_canaries(game: StepGame, steps: int, on_step: Callable[[], None]) -> Releases:
    """One half of the slots holds canaries, the other records of zero gradient: adding or removing one, slot by slot."""
    model = CanaryModel(game.layers, 2 * game.canaries + SPARE)
    records, weights = slots(game, model)
    run = _run(game, model, records, steps, on_step)
    scores = np.einsum("l,tlc->tc", weights, run.gradients)
    return Releases(
        scores[:, : game.canaries].ravel(),
        scores[:, game.canaries : 2 * game.canaries].ravel(),
        run.gradients[:, :, game.canaries :].reshape(steps, -1),
        np.repeat(run.group_of, model.width - game.canaries),
        thresholds_follow(run.private, replayed_states(run.private), run.thresholds),
        _claimed(run.private, steps),
        run.private.plan.sample_rate,
        steps,
    )


def slots(game: StepGame, model: CanaryModel) -> tuple[Tensor, Floats]:
    """The records of a data set with canaries in the first half of its slots, and the weights of the layers in a score."""
    reach, weights = _direction(game, model)
    records = torch.zeros(2 * game.canaries, game.layers, model.width)
    for slot in range(game.canaries):
        records[slot, :, slot] = reach
    return records, weights


def _one_canary(game: StepGame, steps: int, present: bool, on_step: Callable[[], None]) -> Releases:
    """A data set of one record of zero gradient, and the canary if `present`; the joint score of gradient and statistic."""
    model = CanaryModel(game.layers, 1 + SPARE)
    reach, weights = _direction(game, model)
    records = torch.zeros(2 if present else 1, game.layers, model.width)
    if present:
        records[0, :, 0] = reach
    run = _run(game, model, records, steps, on_step, seed=int(present))
    states = replayed_states(run.private)
    plan = run.private.plan
    norms = torch.zeros(len(plan.groups))
    for layer, group in enumerate(run.group_of):
        norms[group] = torch.hypot(norms[group], reach[layer])
    assert plan.statistic_multiplier is not None
    residuals, directions = _statistics(run.private, states, norms, present)
    residuals, directions = residuals / plan.statistic_multiplier, directions / plan.statistic_multiplier
    gradient = np.einsum("l,tl->t", weights, run.gradients[:, :, 0]) / plan.gradient_multiplier
    scores = (gradient + (residuals * directions).sum(1)) * plan.noise_multiplier
    alone = residuals - directions if present else residuals
    spare = run.gradients[:, :, 1:].reshape(steps, -1)
    return Releases(
        scores,
        scores,
        np.concatenate([spare, alone], axis=1),
        np.concatenate([np.repeat(run.group_of, SPARE), np.full(alone.shape[1], -1)]),
        thresholds_follow(run.private, states, run.thresholds),
        _claimed(run.private, steps),
        plan.sample_rate,
        steps,
    )


def _statistics(
    private: clipless.Private, states: Sequence[State], norms: Tensor, present: bool
) -> tuple[Floats, Floats]:
    """For each step the released statistic minus the bystander's share, and the canary's share, [steps, entries]."""
    policy, released = private.plan.clipping.policy, private.history["statistic"]
    residuals, directions = [], []
    for state, statistic in zip(states, released, strict=True):
        share, bystander = policy.observe(state, norms[:, None]), policy.observe(state, torch.zeros(len(norms), 1))
        assert share is not None
        assert bystander is not None
        residuals.append((statistic - bystander).flatten().double().numpy())
        directions.append(share.flatten().double().numpy())
    return np.stack(residuals), np.stack(directions)


def _direction(game: StepGame, model: CanaryModel) -> tuple[Tensor, Floats]:
    """The length of the canary in each layer, and the weights of the layers in the best score, as a unit vector."""
    clipping = as_clipping(game.clipping)
    groups = model.groups(clipping)
    thresholds = clipping.start(len(groups))
    reach = along(groups, worst_norms(clipping, thresholds))
    own = along(groups, thresholds.flatten().tolist()).double().numpy()
    if clipping.allocation == "equal-budget":
        own = np.array([1 / len(groups.members[groups.group_of[name]]) ** 0.5 for name, _ in model.named_parameters()])
    return reach, own / np.linalg.norm(own)


def _claimed(private: clipless.Private, steps: int) -> float:
    """The multiplier of the step with the least noise."""
    return min(private.plan.event(step).noise_multiplier for step in {0, steps - 1})


@dataclass(frozen=True)
class _Run:
    private: clipless.Private
    gradients: Floats
    thresholds: list[Tensor]
    group_of: Integers


def _run(
    game: StepGame, model: CanaryModel, records: Tensor, steps: int, on_step: Callable[[], None], seed: int = 0
) -> _Run:
    """Release `steps` times; weights stay as they are, so that every release is one of the same mechanism."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = attached(game, model, optimizer, records, steps, seed)
    watcher = Watcher(private, list(model.named_parameters()))
    while watcher.private.steps_taken < steps:
        for (batch,) in watcher.private.loader:
            optimizer.zero_grad()
            watcher.before_step()
            watcher.private.backward(model(batch))
            optimizer.step()
            watcher.after_step()
            on_step()
            if watcher.private.steps_taken == game.resume_after:
                state = watcher.private.state_dict()
                watcher.private.detach()
                watcher.private = attached(game, model, optimizer, records, steps, seed)
                watcher.private.load_state_dict(state)
                break
    watcher.private.detach()
    group_of = [private.plan.groups.group_of[name] for name, _ in watcher.parameters]
    return _Run(watcher.private, np.stack(watcher.gradients), watcher.thresholds, np.array(group_of, dtype=np.int64))


def attached(
    game: StepGame, model: CanaryModel, optimizer: torch.optim.Optimizer, records: Tensor, steps: int, seed: int
) -> clipless.Private:
    """A private run of the canary model on these records, before its first step."""
    batch = round(game.sample_rate * len(records))
    if not 0 < batch <= len(records):
        raise InvalidArgument(
            f"sample_rate={game.sample_rate} of {len(records)} records gives no batch: raise the rate or `canaries`."
        )
    return clipless.make_private(
        model,
        optimizer,
        TensorDataset(records),
        noise_multiplier=game.noise_multiplier,
        delta=game.delta,
        batch_size=batch,
        steps=steps,
        clipping=game.clipping,
        accountant="gdp",
        seed=None if game.seed is None else 2 * game.seed + seed,
        group=game.group,
        **({} if game.noise is None else {"noise": game.noise}),  # type: ignore[arg-type]
    )

"""What an adversary sees of a private run: every released gradient, every released statistic, every threshold."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from clipless.arrays import Floats
from clipless.private import Private
from clipless.thresholds import State


@dataclass
class Watcher:
    """Reads the released gradients of some parameters, step by step (`before_step`, `optimizer.step()`, `after_step`), and
    keeps them unless told otherwise."""

    private: Private
    parameters: Sequence[tuple[str, Tensor]]
    keep: bool = True
    gradients: list[Floats] = field(default_factory=list)
    thresholds: list[Tensor] = field(default_factory=list)
    _stddevs: Floats = field(default_factory=lambda: np.empty(0))

    def before_step(self) -> None:
        """Note the thresholds and the claimed noise of the step to come."""
        plan, thresholds = self.private.plan, self.private.thresholds
        by_group = plan.stddevs(self.private.steps_taken, thresholds).flatten().numpy()
        self._stddevs = by_group[[plan.groups.group_of[name] for name, _ in self.parameters]]
        if self.keep:
            self.thresholds.append(thresholds)

    def after_step(self) -> Floats:
        """The gradients over the claimed standard deviation of their noise, [parameters, coordinates]."""
        released = np.stack([_flat(parameter) for _, parameter in self.parameters])
        seen = released * self.private.plan.expected_batch / self._stddevs[:, None]
        if self.keep:
            self.gradients.append(seen)
        return seen


def _flat(parameter: Tensor) -> Floats:
    assert parameter.grad is not None
    return parameter.grad.detach().double().flatten().numpy()


def replayed_states(private: Private) -> list[State]:
    """The policy's state before each step, computed from the released statistics alone."""
    plan = private.plan
    state = plan.clipping.policy.init(plan.setting)
    states = []
    released = private.history["statistic"] if "statistic" in private.history.names() else None
    for step in range(private.steps_taken):
        states.append(state)
        state = plan.clipping.policy.update(state, None if released is None else released[step], plan.setting)
    return states


def thresholds_follow(private: Private, states: Sequence[State], seen: Sequence[Tensor]) -> bool:
    """Whether every threshold seen is the one that the statistics released before it lead to."""
    policy = private.plan.clipping.policy
    return all(torch.equal(policy.thresholds(state), shown) for state, shown in zip(states, seen, strict=True))

"""What changes from step to step in a private run, in whatever library the gradients are computed."""

from abc import abstractmethod
from typing import Any

from torch import Tensor

from clipless import refusals
from clipless.accounting import Ledger, Spent, StepEvent
from clipless.errors import Misuse
from clipless.noise import NoiseSource
from clipless.phases import Phase
from clipless.plan import PrivacyPlan
from clipless.sampling.loader import Batch, PrivateLoader
from clipless.thresholds.history import History
from clipless.thresholds.policy import State


class RunState(refusals.Uncopyable):
    """The ledger, the policy's state, the keys of the noise, the number of draws.

    `_noise` caches the event, the standard deviations and the divisor of a step until the policy's state changes.
    """

    loader: PrivateLoader

    def __init__(self, plan: PrivacyPlan, source: NoiseSource, allow_overspend: bool) -> None:
        self.plan, self._allow_overspend = plan, allow_overspend
        self.ledger = Ledger()
        self.history = History()
        self._source = source
        self._batch: Batch | None = None
        self._policy_state: State = {}
        self._thresholds: Tensor
        self._noise: tuple[StepEvent, list[float], float] | None
        self._phase = plan.phases[0]
        self._set_policy(plan.clipping.policy.init(plan.setting))

    def _set_policy(self, state: State) -> None:
        self._policy_state, self._thresholds = state, self._phase.clipping.policy.thresholds(state)
        self._noise = None

    def _go_on(self, step: int, state: State) -> None:
        """The policy's state before that step; from its beginning where another policy set the thresholds so far."""
        before, self._phase = self._phase, self.plan.phase(step)
        begins = self._phase.span != before.span
        self._set_policy(self._phase.clipping.policy.init(self._phase.setting) if begins else state)

    def _note(self, phase: Phase, statistic: Tensor | None) -> None:
        """Keep what was released after a step of a phase. Where policies change, what is not thresholds is kept under the
        number of its phase, counted from 1."""
        state = self._policy_state
        if self.plan.phases[-1].span:
            own = {f"{name} (phase {self._phase.number + 1})": value for name, value in state.items()}
            state = {"thresholds": self._thresholds, **{k: v for k, v in own.items() if not k.startswith("thresholds")}}
            if statistic is not None:
                state[f"statistic (phase {phase.number + 1})"], statistic = statistic, None
        self.history.append(state, statistic)

    def _noised_statistic(self, step: int, statistic: Tensor | None) -> Tensor | None:
        """The batch's statistic with noise; None if the policy needs none."""
        if statistic is None or self._phase.statistic_multiplier is None:
            return None
        (noised,) = self._source.release("statistic", step, [statistic], [self._phase.statistic_multiplier])
        return noised

    # What the loader announces, whatever the library.

    @property
    @abstractmethod
    def steps_taken(self) -> int:
        """Steps that led to the present weights."""

    @abstractmethod
    def _begin(self, batch: Batch | None) -> None:
        """Forget all sums. The next ones are of this batch, or of none."""

    def steps_left(self) -> int | None:
        """Steps until the budget is spent, None if overspending is allowed; raises `BudgetSpent` if there are none."""
        if self._allow_overspend:
            return None
        left = self.plan.steps - self.steps_taken
        if left <= 0:
            raise refusals.budget_spent(self.plan.steps, self.spent())
        return left

    def reopen_batch(self) -> None:
        """Start the open batch over."""
        if self._batch is None:
            raise Misuse("there is no batch to hand out again: the last one was stepped, so go on with the loader.")
        self._begin(self._batch)

    @property
    def epochs(self) -> int:
        """Passes over `loader` in the plan."""
        return self.plan.steps // self.plan.steps_per_pass

    @property
    def thresholds(self) -> Tensor:
        """The current thresholds, one row per group, [G,1]. They are constants or released values: safe to show."""
        return self._thresholds.clone()

    def spent(self) -> Spent:
        """The privacy spent so far, computed from the events in the ledger."""
        return self.ledger.spent(self.plan.delta, self.plan.accountant)

    def _state(self) -> dict[str, Any]:
        """The state to resume from."""
        return {
            "plan": self.plan.to_dict(),
            "ledger": self.ledger.to_dict(),
            "phase": self._phase.number,
            "policy": {name: value.clone() for name, value in self._policy_state.items()},
            "history": self.history.state_dict(),
            "draws": self.loader.draws,
            "noise": self._source.state_dict(),
        }

    def _take_state(self, state: dict[str, Any]) -> None:
        """Go on from a state, whose plan must be the same."""
        refusals.refuse_other_plan(state, self.plan.to_dict())
        self._source.load_state_dict(state["noise"])
        self.ledger = Ledger.from_dict(state["ledger"])
        self._phase = self.plan.phases[state.get("phase", 0)]
        self._set_policy({name: value.clone() for name, value in state["policy"].items()})
        self.history = History.from_state_dict(state["history"])
        self.loader.draws = state["draws"]

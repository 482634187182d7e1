"""One-run auditing: many canaries in one training, each put in or left out at random.

Each crafted canary has a coordinate of its own in a table beside the model, and is seen in the table's released gradients.
Random ones are inputs of noise with a random class, seen in the model's own gradients, or by how far their loss has fallen
at the end. A canary that is out stays in its place with its loss multiplied by zero: it adds nothing, and the number of
records, which is public, stays the same. So one coin adds or removes one record, and nothing else.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import clipless
from clipless.arguments import named, whole
from clipless.arrays import Booleans, Floats
from clipless.auditing.canary_model import worst_norms
from clipless.auditing.gauss import CanaryTrace, log_likelihood, steps_of
from clipless.auditing.watching import Watcher
from clipless.errors import InvalidArgument
from clipless.plan import PrivacyPlan

KINDS = ("crafted", "random")


@dataclass(frozen=True)
class Canaries:
    """How many, of which kind, and the seed of their coins and inputs."""

    number: int = 1000
    kind: str = "crafted"
    seed: int | None = None

    def __post_init__(self) -> None:
        whole("the number of canaries", self.number)
        named("kind of canary", self.kind, dict.fromkeys(KINDS))


@dataclass(frozen=True)
class Seen:
    """The coins, True for in, and the scores of all canaries: from released gradients, and from the losses of the first and
    the last model (None for crafted canaries, which lie outside the model). Only crafted canaries have a `trace`."""

    coins: Booleans
    white_box: Floats
    black_box: Floats | None
    trace: CanaryTrace | None
    plan: PrivacyPlan
    epsilon: float


class Audited(nn.Module):
    """The model, and beside it a table with one number for each crafted canary."""

    def __init__(self, model: nn.Module, canaries: int) -> None:
        super().__init__()
        self.model = model
        self.table = nn.Embedding(canaries + 1, 1)

    def forward(self, inputs: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(inputs), self.table(slots).squeeze(1)


def one_run(
    model: nn.Module,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    records: TensorDataset,
    canaries: Canaries,
    *,
    privacy: Mapping[str, Any],
    on_step: Callable[[int, int], None] = lambda step, steps: None,
) -> Seen:
    """Train a classifier on `records` (inputs, classes) and the canaries; `privacy` holds the arguments of `make_private`.

    Nothing is returned about a real record: scores are those of canaries.
    """
    _refuse(records)
    rng = np.random.default_rng(canaries.seed)
    coins = rng.random(canaries.number) < 0.5
    data = _with_canaries(records, canaries, rng)
    kind = _Crafted(model, canaries.number) if canaries.kind == "crafted" else _Random(model, data, canaries.number)
    optimizer = make_optimizer(kind.trained.parameters())
    private = clipless.make_private(kind.trained, optimizer, data, **privacy)
    weights = torch.cat([torch.ones(1), torch.from_numpy(coins).float()])
    try:
        kind.begin(private)
        for _ in range(private.epochs):
            for inputs, classes, slots in private.loader:
                optimizer.zero_grad()
                kind.before_step()
                private.backward(kind.losses(inputs, classes, slots) * weights[slots])
                optimizer.step()
                kind.after_step()
                on_step(private.steps_taken, private.plan.steps)
        spent = private.spent()
    finally:
        private.detach()
    return Seen(coins, kind.scores, kind.final_scores(), kind.trace(coins), private.plan, spent.epsilon)


def _refuse(records: TensorDataset) -> None:
    if not isinstance(records, TensorDataset) or len(records.tensors) != 2:
        raise InvalidArgument("one_run takes a TensorDataset of inputs and classes.")
    inputs, classes = records.tensors
    if len(inputs) == 0:
        raise InvalidArgument("there are no records to train on: play the step game, which needs none.")
    if not inputs.is_floating_point():
        raise InvalidArgument(
            f"canaries are inputs of normal noise, and these inputs are {inputs.dtype}: audit a model that takes "
            "floating-point inputs, or play the step game."
        )
    if classes.is_floating_point() or classes.dim() != 1:
        raise InvalidArgument("one_run audits a classifier: give one class number for each record, [N], as integers.")


def _with_canaries(records: TensorDataset, canaries: Canaries, rng: np.random.Generator) -> TensorDataset:
    """Inputs, classes and slots: 0 for a real record, 1, 2, … for canaries, whose inputs are noise."""
    inputs, classes = records.tensors[0], records.tensors[1]
    noise = torch.from_numpy(rng.standard_normal((canaries.number, *inputs.shape[1:]))).to(inputs.dtype)
    invented = torch.from_numpy(rng.integers(0, int(classes.max()) + 1, canaries.number)).to(classes.dtype)
    slots = torch.cat([torch.zeros(len(inputs), dtype=torch.long), torch.arange(1, canaries.number + 1)])
    return TensorDataset(torch.cat([inputs, noise]), torch.cat([classes, invented]), slots)


class _Crafted:
    """A canary's gradient lies along its own number of the table, with the norm whose clipped gradient is largest."""

    def __init__(self, model: nn.Module, canaries: int) -> None:
        self.trained = Audited(model, canaries)
        self.scores: Floats = np.zeros(canaries)
        self._squares: Floats = np.zeros(canaries)

    def begin(self, private: clipless.Private) -> None:
        clipping = private.plan.clipping
        if len(private.plan.groups) > 1:
            raise InvalidArgument("crafted canaries lie in one layer: audit groups='flat', or play the step game.")
        self._reach = worst_norms(clipping, clipping.start(1))[0]
        self._private = private
        self._watcher = Watcher(private, [("table.weight", self.trained.table.weight)], keep=False)

    def losses(self, inputs: Tensor, classes: Tensor, slots: Tensor) -> Tensor:
        outputs, numbers = self.trained(inputs, slots)
        return torch.where(slots > 0, self._reach * numbers, cross_entropy(outputs, classes, reduction="none"))

    def before_step(self) -> None:
        self._watcher.before_step()

    def after_step(self) -> None:
        plan, seen = self._private.plan, self._watcher.after_step()[0, 1:]
        multiplier = plan.event(self._private.steps_taken - 1).gradient_multiplier
        self.scores += log_likelihood(seen, multiplier, plan.sample_rate)
        self._squares += seen**2

    def final_scores(self) -> None:
        """None: these canaries lie outside the model."""

    def trace(self, coins: Booleans) -> CanaryTrace | None:
        """None where norms are estimated: a canary then moves a release by a random amount."""
        plan = self._private.plan
        return None if plan.projections is not None else CanaryTrace(steps_of(plan), self._squares[~coins])


class _Random:
    """A canary is an input of noise with a random class. Its score is the sum of dot products of its gradient with the
    released gradients, by forward-mode differentiation of its loss; or how far its loss has fallen at the end."""

    def __init__(self, model: nn.Module, data: TensorDataset, canaries: int) -> None:
        self.trained = model
        self.scores: Floats = np.zeros(canaries)
        self._plain = copy.deepcopy(model).eval()
        inputs, classes = data.tensors[0], data.tensors[1]
        self._inputs, self._classes = inputs[-canaries:], classes[-canaries:]
        self._at: dict[str, Tensor] = {}
        self._first = self._present_losses()

    def begin(self, private: clipless.Private) -> None:
        """Nothing of the plan is needed."""

    def losses(self, inputs: Tensor, classes: Tensor, slots: Tensor) -> Tensor:
        return cross_entropy(self.trained(inputs), classes, reduction="none")

    def before_step(self) -> None:
        self._at = {name: p.detach().clone() for name, p in self.trained.named_parameters() if p.requires_grad}

    def after_step(self) -> None:
        released = {name: p.grad for name, p in self.trained.named_parameters() if p.grad is not None}
        with warnings.catch_warnings():  # torch's forward differentiation loads code that torch itself deprecates
            warnings.filterwarnings("ignore", message="`torch.jit.script` is", category=DeprecationWarning)
            products = torch.func.jvp(self._canary_losses, (self._at,), (released,))[1]
        self.scores += products.double().numpy()

    def trace(self, coins: Booleans) -> None:
        """None: gradients of these canaries overlap, so the noise along them is not independent."""

    def final_scores(self) -> Floats:
        return self._first - self._present_losses()

    def _present_losses(self) -> Floats:
        self.before_step()
        with torch.no_grad():
            return self._canary_losses(self._at).double().numpy()

    def _canary_losses(self, weights: dict[str, Tensor]) -> Tensor:
        outputs = torch.func.functional_call(self._plain, weights, (self._inputs,))
        return cross_entropy(outputs, self._classes, reduction="none")

"""DP-SGLD: samples of a posterior whose Langevin noise is the noise that makes each step private.

A step is w ← w − η·(Σ c_i g_i / B + w / (N·prior²)) + N(0, s²) with s² = 2·η·τ/N. The noise enters once, in the private
gradient: a noise multiplier z gives it the standard deviation η·z·R/B on the weights, R the sensitivity. So

    z = √(2τ/(N·η)) · B/R    and    η = 2·τ·B² / (N·z²·R²),

a budget fixes the step size, or the step size the budget. Where N is secret, B divided by the rate stands for it. For small
steps the samples have the law exp(−U/τ), U being the sum of all losses less the logarithm of the prior, if no gradient is
clipped: clipped ones are in general the gradient of no function, and then no such law is known (docs/langevin.md).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset

from clipless import defaults, refusals
from clipless.accounting import Spent
from clipless.arguments import named, positive, whole
from clipless.averaging import Prediction, Thinning, averaged
from clipless.clipped import LossFunction
from clipless.clipping import Clipping
from clipless.distributed import is_sharded
from clipless.errors import InvalidArgument, Misuse
from clipless.neighbours import ZERO_OUT, refuse_unclear_rate
from clipless.partition import partition
from clipless.phases import Schedule, as_schedule
from clipless.plan import PrivacyPlan, noise_stddevs
from clipless.private import Private, make_private
from clipless.runs.checkpoint import read_checkpoint
from clipless.sampling.fetching import source_of
from clipless.sampling.loader import PrivateLoader
from clipless.thresholds import Constant

TEMPERATURES = ("posterior", "paper-tempered")


@dataclass(frozen=True)
class LangevinPlan:
    """The numbers of a sampler. `stddev` is that of the noise that a step adds to every weight."""

    step_size: float
    temperature: float
    prior_stddev: float
    stddev: float
    thinning: Thinning

    def __str__(self) -> str:
        law = "the posterior" if self.temperature == 1 else f"a posterior tempered by {self.temperature:.4g}"
        return (
            f"  samples     of {law} if no gradient is clipped: step size {self.step_size:.4g}, noise "
            f"{self.stddev:.4g} on each weight, prior N(0, {self.prior_stddev:.4g}²)\n  kept        {self.thinning}"
        )


def sgld(
    model: nn.Module,
    dataset: Dataset[Any] | DataLoader[Any],
    *,
    step_size: float | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    temperature: float | str = "posterior",
    prior_stddev: float = 1.0,
    burn_in: float = 0.5,
    thinning: int = 10,
    delta: float | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    clipping: str | Clipping | Schedule = "abadi",
    accountant: str = defaults.ACCOUNTANT,
    neighbours: str = ZERO_OUT,
    sample_rate: float | None = None,
    noise: str | None = None,
    seed: int | None = None,
    gradients: str = "exact",
    projections: int = defaults.PROJECTIONS,
) -> "PosteriorSampler":
    """Sample weights from a posterior with differential privacy, by stochastic gradient Langevin dynamics.

    Give one of `step_size`, `epsilon` and `noise_multiplier`; it fixes the others. Losses are negative log-likelihoods, one
    per record; the prior is normal. `temperature` is "posterior" (τ = 1), "paper-tempered" (τ = N/2, as GLOBAL's listing
    has it) or a number. After the share `burn_in` of the steps every `thinning`-th weights are kept. Thresholds must be
    constant; any rule and partition will do. See docs/langevin.md.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> sampler = sgld(model, list(torch.randn(64, 2)), step_size=0.01, batch_size=16, steps=4, burn_in=0.5, thinning=1)
    >>> for x in sampler.loader:
    ...     sampler.backward(model(x)[:, 0].square() / 2)
    ...     sampler.step()
    >>> len(sampler.samples)
    2
    """
    if is_sharded(model):
        raise InvalidArgument(
            "sgld keeps samples of all weights, and this model is sharded over processes: leave fully_shard out."
        )
    data, own_batch_size, _ = source_of(dataset)
    refuse_unclear_rate(neighbours, sample_rate, delta)
    batch = refusals.one_batch_size(batch_size, own_batch_size)
    if batch is None:
        raise InvalidArgument("give batch_size=, the expected number of records in a batch.")
    records = len(data) if sample_rate is None else whole("batch_size", batch) / sample_rate  # type: ignore[arg-type]
    if sum(given is not None for given in (step_size, epsilon, noise_multiplier)) != 1:
        raise InvalidArgument(
            "give one of step_size=, epsilon= and noise_multiplier=: at a given temperature each of them fixes the others. "
            "To have another step size at the same budget, change temperature=."
        )
    parameters = refusals.trainable(model)
    _refuse_narrow(parameters)
    how, tau = as_schedule(clipping), _temperature(temperature, records)
    bound, prior = _sensitivity(how, parameters), positive("prior_stddev", prior_stddev)
    if step_size is not None:
        noise_multiplier = math.sqrt(2 * tau / (records * positive("step_size", step_size))) * batch / bound
    optimizer = SGD(parameters.values(), lr=1.0, weight_decay=1 / (records * prior**2))
    watch = _Watch()
    optimizer.register_step_pre_hook(watch)
    private = make_private(
        model, optimizer, dataset, epsilon=epsilon, delta=delta, noise_multiplier=noise_multiplier, batch_size=batch,
        epochs=epochs, steps=steps, clipping=how, accountant=accountant, neighbours=neighbours, sample_rate=sample_rate,
        noise=noise, seed=seed, gradients=gradients, projections=projections,
    )  # fmt: skip
    try:
        eta = step_size or 2 * tau * (batch / (private.plan.noise_multiplier * bound)) ** 2 / records
        _refuse_divergence(eta, records, prior)
        kept = Thinning.of(burn_in, thinning, private.plan.steps)
        plan = LangevinPlan(float(eta), tau, prior, math.sqrt(2 * eta * tau / records), kept)
    except Exception:
        private.detach()
        raise
    optimizer.param_groups[0]["lr"] = plan.step_size
    watch.begin(optimizer)
    return PosteriorSampler(model, optimizer, private, plan)


class PosteriorSampler:
    """A private run that keeps samples of the weights. Made by `clipless.sgld`.

    `samples` are the kept weights, by parameter name. They are released values: what is computed from them is private too.
    """

    def __init__(self, model: nn.Module, optimizer: SGD, private: Private, langevin: LangevinPlan) -> None:
        self.optimizer, self.private, self.langevin = optimizer, private, langevin
        self.samples: list[dict[str, Tensor]] = []
        self._model = model
        self._handle = optimizer.register_step_post_hook(self._after_step)

    @property
    def loader(self) -> PrivateLoader:
        """The batches to train on."""
        return self.private.loader

    @property
    def epochs(self) -> int:
        """Passes over `loader` in the plan."""
        return self.private.epochs

    @property
    def plan(self) -> PrivacyPlan:
        """What is promised."""
        return self.private.plan

    @property
    def step_size(self) -> float:
        """η."""
        return self.langevin.step_size

    @property
    def temperature(self) -> float:
        """τ: where no gradient is clipped, samples have the law exp(−U/τ)."""
        return self.langevin.temperature

    def backward(self, losses: Tensor) -> None:
        """From the negative log-likelihood of each record, (B,)."""
        self.private.backward(losses)

    def step(self, record_losses: LossFunction | None = None, batch: Any = None) -> None:
        """Take a step, and store the weights if thinning selects it.

        Args:
            record_losses: `record_losses(model, batch)` returns the negative log-likelihood of each record, (B,). Without it
                `backward` must have been called.
            batch: What `loader` yields.
        """
        if record_losses is None:
            self.optimizer.step()
        else:
            self.private.step(record_losses, batch)

    def spent(self) -> Spent:
        """The privacy spent so far."""
        return self.private.spent()

    def predict(self, *inputs: Any, of: Any = None, **named_inputs: Any) -> Prediction:
        """The mean of the model's output over the kept samples, in eval mode, and how far it spreads.

        `of` is applied to the output first: `of=lambda logits: logits.softmax(-1)` averages probabilities.
        """
        if not self.samples:
            raise Misuse(
                f"no sample has been kept yet: {self.langevin.thinning}. Train further, or choose a shorter burn_in."
            )
        return averaged(self._model, self.samples, inputs, named_inputs, of)

    def save_to(self, path: str | Path) -> None:
        """From now on write every event to this ledger file before its result can be seen."""
        self.private.save_to(path)

    def save_checkpoint(self, path: str | Path, extra: Any = None) -> None:
        """As `Private.save_checkpoint`, with the kept samples."""
        self.private.save_checkpoint(path, {"langevin": self._written(), "samples": self.samples, "extra": extra})

    def load_checkpoint(self, path: str | Path, *, ledger: str | Path | None = None, reseed: bool = False) -> Any:
        """As `Private.load_checkpoint`, in a fresh `sgld` with the same arguments."""
        saved = read_checkpoint(Path(path)).extra
        if not isinstance(saved, dict) or saved.get("langevin") != self._written():
            raise InvalidArgument(
                f"{path} belongs to a sampler with other settings, or to a run that keeps no samples: call sgld with the "
                "arguments that it was saved with."
            )
        self.private.load_checkpoint(path, ledger=ledger, reseed=reseed)
        self.samples = [dict(sample) for sample in saved["samples"]]
        return saved["extra"]

    def detach(self) -> None:
        """Remove every hook; the samples stay."""
        self._handle.remove()
        self.private.detach()

    def _written(self) -> dict[str, float]:
        plan, kept = self.langevin, self.langevin.thinning
        numbers = (plan.step_size, plan.temperature, plan.prior_stddev, kept.burn_in, kept.every)
        return dict(zip(("step_size", "temperature", "prior_stddev", "burn_in", "thinning"), numbers, strict=True))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.langevin.thinning.keeps(self.private.steps_taken):
            named_parameters = self._model.named_parameters()
            self.samples.append({name: p.detach().clone() for name, p in named_parameters if p.requires_grad})

    def __str__(self) -> str:
        return f"{self.plan}\n{self.langevin}"


class _Watch:
    """Before each step: refuses settings of the optimizer that are not the planned ones, since with another step size the
    same noise belongs to another temperature."""

    def __init__(self) -> None:
        self._settings: list[dict[str, Any]] = []

    def begin(self, optimizer: Optimizer) -> None:
        """These are the planned ones."""
        self._settings = _settings(optimizer)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _settings(optimizer) != self._settings:
            raise Misuse(
                "the step size or another setting of the optimizer was changed, by a scheduler for instance: noise and step "
                "size belong together, and another one samples at another temperature. Leave optimizer.param_groups alone."
            )


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    wanted = ("lr", "weight_decay", "momentum", "maximize")
    return [{name: group[name] for name in wanted} for group in optimizer.param_groups]


def _temperature(temperature: float | str, records: float) -> float:
    if isinstance(temperature, str):
        return named("temperature", temperature, dict(zip(TEMPERATURES, (1.0, records / 2), strict=True)))
    return positive("temperature", temperature)


def _sensitivity(how: Schedule, parameters: dict[str, nn.Parameter]) -> float:
    """What the noise of every step is a multiple of. Raises for a clipping whose thresholds, or noise, are not the same in
    all steps and weights."""
    groups = len(partition(how.groups, parameters))
    bounds = {float(noise_stddevs(part.start(groups), 1.0, "uniform")[0, 0]) for _, part in how.parts}
    if len(bounds) > 1 or not all(isinstance(clipping.policy, Constant) for _, clipping in how.parts):
        raise InvalidArgument(
            "sgld needs one constant threshold, since the step size follows from it: use 'abadi', 'global', 'auto-s' or "
            "'auto-v', with one threshold in all phases of a schedule."
        )
    if groups > 1 and any(clipping.allocation != "uniform" for _, clipping in how.parts):
        raise InvalidArgument("sgld needs the same noise on every weight: use allocation='uniform'.")
    return bounds.pop()


def _refuse_narrow(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype.itemsize < 4:
            raise InvalidArgument(
                f"parameter {name!r} is {parameter.dtype}: steps as small as those of Langevin dynamics are lost in its "
                "rounding. Use model.float()."
            )


def _refuse_divergence(step_size: float, records: float, prior_stddev: float) -> None:
    """Raise where the prior alone makes the weights grow without bound."""
    if not step_size < 2 * records * prior_stddev**2:
        raise InvalidArgument(
            f"a step size of {step_size:.4g} diverges, as it is more than 2·N·prior_stddev² = "
            f"{2 * records * prior_stddev**2:.4g}: lower the temperature, the budget or the batch size."
        )

"""The training loop of the command line and the experiments, private or not.

Only test records are measured. The training loss, the size of a batch and the fraction of clipped records reveal something
about single training records, so they are neither computed nor logged.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from clipless.accounting import Spent
from clipless.app import clippings, models
from clipless.app.data import Data
from clipless.app.settings import TrainingSettings
from clipless.app.threads import torch_threads
from clipless.app.training.fitting import refuse_misfit
from clipless.app.training.own_loss import refuse_unsound_loss
from clipless.app.training.reliability import reliability_bins
from clipless.app.training.result import Result, refuse_unstorable
from clipless.app.training.saving import LoopState, RunSaver, Saving
from clipless.app.training.settings import base_lr, losses_for, lr_factor, make_optimizer, optimizer_for
from clipless.app.training.tasks import TASKS, evaluate
from clipless.distributed import Alone, Ranks, ranks_of
from clipless.errors import Interrupted, InvalidArgument
from clipless.private import Private, make_private

SMALL_BATCH = 100_000


@dataclass(frozen=True)
class TrainingProgress:
    """Where a run stands.

    `epsilon` and `score`, the task's metric on the test records, are those of the last test, None before the first;
    `epsilon` is None without privacy, and `tested` is the step of that test. `threshold` is the length of the current
    threshold vector, a constant or a released value; None without privacy.
    """

    step: int
    steps: int
    epsilon: float | None = None
    score: float | None = None
    threshold: float | None = None
    tested: int = 0


def train(
    data: Data,
    settings: TrainingSettings,
    on_progress: Callable[[TrainingProgress], None] | None = None,
    saving: Saving | None = None,
    stop: Callable[[], bool] = lambda: False,
    group: bool | None = None,
    research: Callable[[nn.Module, TrainingProgress], None] | None = None,
) -> Result:
    """Train a fresh model and test it once an epoch; the same seed gives the same run on the same machine.

    `on_progress` is called after every step and every test. With `saving`, a private run writes its ledger and
    checkpoints to a folder and can be resumed from there. `stop` is called before the first step and after each: when it
    returns True, everything is saved and `Interrupted` raised. Raises InvalidArgument before training if the settings
    cannot be used. The state of torch's global generator is left as it was. `group` is that of `make_private`; of several
    ranks the first one writes, and if one is asked to stop, all do. `research` is called with the model before the first
    step and after every test; what it computes from training records is not private.
    """
    _refuse_unusable(settings, data)
    ranks = _ranks(settings, group)
    model_seed, shuffle_seed, noise_seed = ranks.shared(_seeds(settings.seed))
    report, look = on_progress or (lambda _: None), research or (lambda *_: None)
    losses_of = losses_for(settings, data)
    with torch.random.fork_rng(devices=[]), torch_threads(_threads(settings.batch_size * math.prod(data.shape))):
        torch.manual_seed(model_seed)
        model = models.build(settings.model, data.shape, data.classes, data.vocabulary)
        refuse_misfit(model, settings.model, data, losses_of, own_loss=settings.loss is not None)
        if settings.private and settings.loss is not None:
            refuse_unsound_loss(settings.loss, losses_of, model, data, clippings.parse(settings.clipping))
        optimizer = make_optimizer(settings, model.parameters())
        private = _attach(model, optimizer, data, settings, noise_seed, group) if settings.private else None
        loader = private.loader if private else _shuffled(data.train, settings.batch_size, shuffle_seed)
        about = {"data": data.name, "settings": asdict(settings)}
        saver = RunSaver(private, saving, about, stop, ranks)
        try:
            state = saver.begin()
            run = _Run(model, optimizer, data, settings, private, state, total=settings.epochs * len(loader))
            progress = TrainingProgress(step=private.steps_taken if private else 0, steps=run.total)
            look(model, progress)
            while progress.step < run.total:
                for x, y in islice(loader, len(loader) - progress.step % len(loader)):
                    run.set_lr(progress.step)
                    optimizer.zero_grad()
                    losses = losses_of(model(x), y)
                    private.backward(losses) if private else losses.mean().backward()
                    optimizer.step()
                    progress = run.stepped(progress)
                    report(progress)
                    saver.before_test(last=progress.step == run.total)
                    if progress.step % (settings.test_every * len(loader)) == 0:
                        progress = run.tested(progress)
                        report(progress)
                        look(model, progress)
                    saver.after_step(epoch_ended=progress.step % len(loader) == 0)
            if state.tested != run.total:
                progress = run.tested(progress)
            seconds = saver.seconds()
            spent = private.spent() if private else None
        except Interrupted:
            raise
        except Exception:
            saver.abandon()
            raise
        finally:
            if private:
                private.detach()
    model.load_state_dict(state.average, strict=False)
    return _result(run, progress.step, seconds, spent)


@dataclass
class _Run:
    """What the loop does around each step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Data
    settings: TrainingSettings
    private: Private | None
    state: LoopState
    total: int

    def set_lr(self, step: int) -> None:
        """The learning rate of step number `step`, counted from 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = base_lr(self.settings) * lr_factor(self.settings, step, self.total)

    def stepped(self, progress: TrainingProgress) -> TrainingProgress:
        if self.settings.averaging:
            self._average(progress.step)
        if self.private is None:
            return replace(progress, step=progress.step + 1)
        return replace(progress, step=self.private.steps_taken, threshold=float(self.private.thresholds.norm()))

    def tested(self, progress: TrainingProgress) -> TrainingProgress:
        tested = _WithWeights(self.model, self.state.average) if self.state.average else self.model
        self.state.scores.append(evaluate(tested, self.data.test, TASKS[self.data.task]))
        self.state.tested = progress.step
        spent = self.private.spent().epsilon if self.private else None
        return replace(progress, epsilon=spent, score=self.state.scores[-1], tested=progress.step)

    @torch.no_grad()
    def _average(self, step: int) -> None:
        """Move the average towards the current weights, faster in the first steps, so that it forgets the initial ones. It
        is computed from released weights and costs no privacy."""
        share = max(1 - self.settings.averaging, 9 / (10 + step))
        for name, weight in self.model.named_parameters():
            old = self.state.average.get(name)
            self.state.average[name] = weight.detach().clone() if old is None else old.lerp_(weight, share)


class _WithWeights(nn.Module):
    """A model with other weights, for tests only. The model itself is left as it is."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._model, self._weights = model, weights

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self._model, self._weights, (x,))


def _result(run: "_Run", steps: int, seconds: float, spent: Spent | None) -> Result:
    private = run.private
    return Result(
        data=run.data.name,
        settings=run.settings,
        scores=tuple(run.state.scores),
        metric=TASKS[run.data.task].metric,
        steps=steps,
        seconds=seconds,
        epsilon=spent.epsilon if spent else None,
        delta=spent.delta if spent else None,
        plan=private.plan.to_dict() if private else None,
        ledger=private.ledger.to_dict() if private else None,
        history=private.history.to_dict() if private else None,
        model=run.model,
        ledger_file=private.ledger_file if private else None,
        reliability=reliability_bins(run.model, run.data.test) if run.data.task == "classes" else None,
        columns=run.data.columns,
    )


def _refuse_unusable(settings: TrainingSettings, data: Data) -> None:
    optimizer_for(settings, data)
    refuse_unstorable(data)


def _ranks(settings: TrainingSettings, group: bool | None) -> Alone | Ranks:
    """The processes that train together, which only private runs do."""
    ranks = ranks_of(group)
    if ranks.size > 1 and not settings.private:
        raise InvalidArgument("clipping none trains in one process: start it without torchrun, or train privately.")
    return ranks


def _seeds(seed: int | None) -> tuple[int, int, int | None]:
    """Independent seeds for the model, for shuffling, and for sampling and noise (None: `make_private` draws one).

    A seed of more than 32 bits is passed to the noise whole, since 32 bits can be searched.
    """
    model, shuffle, noise = (int(part) for part in np.random.SeedSequence(seed).generate_state(3))
    return model, shuffle, noise if seed is not None and seed < 2**32 else seed


def _threads(values: int) -> int:
    """One thread for small batches: waking a second one costs more than it saves, above all on a busy machine."""
    return 1 if values < SMALL_BATCH else torch.get_num_threads()


def _attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    settings: TrainingSettings,
    seed: int | None,
    group: bool | None,
) -> Private:
    return make_private(
        model,
        optimizer,
        data.train,
        epsilon=settings.epsilon if settings.noise_multiplier is None else None,
        noise_multiplier=settings.noise_multiplier,
        delta=settings.delta,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        clipping=clippings.parse(settings.clipping),
        accountant=settings.accountant,
        noise=settings.noise,
        seed=seed,
        group=group,
        unit_gradients=settings.unit_gradients,
    )


def _shuffled(dataset: TensorDataset, batch_size: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed))

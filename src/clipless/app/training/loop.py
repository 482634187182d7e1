"""The training loop of the command line and the experiments, private or not.

Only test accuracy is measured. The training loss, the size of a batch and the fraction of clipped records reveal something
about single training records, so they are neither computed nor logged.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clipless.app import models
from clipless.app.data import Data
from clipless.app.threads import torch_threads
from clipless.app.training.result import Result
from clipless.app.training.saving import LoopState, RunSaver, Saving
from clipless.app.training.settings import TrainingSettings
from clipless.distributed import Alone, Ranks, ranks_of
from clipless.errors import InvalidArgument
from clipless.private import Private, make_private

SMALL_BATCH = 100_000


@dataclass(frozen=True)
class TrainingProgress:
    """Where a run stands.

    `epsilon` and `accuracy` are those of the last finished epoch, None before the first; `epsilon` is None without
    privacy. `threshold` is the length of the current threshold vector, a constant or a released value; None without
    privacy.
    """

    step: int
    steps: int
    epsilon: float | None = None
    accuracy: float | None = None
    threshold: float | None = None


def train(
    data: Data,
    settings: TrainingSettings,
    on_progress: Callable[[TrainingProgress], None] | None = None,
    saving: Saving | None = None,
    stop: Callable[[], bool] = lambda: False,
    group: bool | None = None,
) -> Result:
    """Train a fresh model and test it once an epoch; the same seed gives the same run on the same machine.

    `on_progress` is called after every step and every test. With `saving`, a private run writes its ledger and
    checkpoints to a folder and can be resumed from there. `stop` is called before the first step and after each: when it
    returns True, everything is saved and `Interrupted` raised. Raises InvalidArgument before training if the settings
    cannot be used. The state of torch's global generator is left as it was. `group` is that of `make_private`; of several
    ranks the first one writes, and if one is asked to stop, all do.
    """
    choice = settings.optimizer_for(data)
    ranks = _ranks(settings, group)
    model_seed, shuffle_seed, noise_seed = ranks.shared(_seeds(settings.seed))
    report = on_progress or (lambda _: None)
    threads = _threads(settings.batch_size * math.prod(data.shape))
    with torch.random.fork_rng(devices=[]), torch_threads(threads):
        torch.manual_seed(model_seed)
        model = models.build(settings.model, data.shape, data.classes)
        optimizer = choice.make(model.parameters(), choice.lr if settings.lr is None else settings.lr)
        private = _attach(model, optimizer, data, settings, noise_seed, group) if settings.private else None
        loader = private.loader if private else _shuffled(data.train, settings.batch_size, shuffle_seed)
        about = {"data": data.name, "settings": asdict(settings)}
        try:
            saver = RunSaver(private, saving, about, stop, ranks)
            state = saver.begin()
            total = settings.epochs * len(loader)
            progress = TrainingProgress(step=private.steps_taken if private else 0, steps=total)
            while progress.step < total:
                for x, y in islice(loader, len(loader) - progress.step % len(loader)):
                    optimizer.zero_grad()
                    losses = F.cross_entropy(model(x), y, reduction="none")
                    private.backward(losses) if private else losses.mean().backward()
                    optimizer.step()
                    progress = _advance(progress, private)
                    report(progress)
                    if progress.step % len(loader) == 0:
                        progress = _test(progress, state, model, data, private)
                        report(progress)
                    saver.after_step(epoch_ended=progress.step % len(loader) == 0)
            if state.tested != total:
                progress = _test(progress, state, model, data, private)
            seconds = saver.seconds()
            spent = private.spent() if private else None
        finally:
            if private:
                private.detach()
    return Result(
        data=data.name,
        settings=settings,
        accuracies=tuple(state.accuracies),
        steps=progress.step,
        seconds=seconds,
        epsilon=spent.epsilon if spent else None,
        delta=spent.delta if spent else None,
        plan=private.plan.to_dict() if private else None,
        ledger=private.ledger.to_dict() if private else None,
        history=private.history.to_dict() if private else None,
        model=model,
        ledger_file=private.ledger_file if private else None,
    )


def _advance(progress: TrainingProgress, private: Private | None) -> TrainingProgress:
    if private is None:
        return replace(progress, step=progress.step + 1)
    return replace(progress, step=private.steps_taken, threshold=float(private.thresholds.norm()))


def _test(
    progress: TrainingProgress, state: LoopState, model: nn.Module, data: Data, private: Private | None
) -> TrainingProgress:
    state.accuracies.append(accuracy(model, data.test))
    state.tested = progress.step
    return replace(progress, epsilon=private.spent().epsilon if private else None, accuracy=state.accuracies[-1])


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset, batch_size: int = 1024) -> float:
    """The fraction of records classified correctly, in evaluation mode. The model's mode is restored."""
    training = model.training
    model.eval()
    parts = zip(*(tensor.split(batch_size) for tensor in dataset.tensors), strict=True)
    hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
    model.train(training)
    return hits / len(dataset)


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
        clipping=settings.clipping,
        accountant=settings.accountant,
        noise=settings.noise,
        seed=seed,
        group=group,
    )


def _shuffled(dataset: TensorDataset, batch_size: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed))

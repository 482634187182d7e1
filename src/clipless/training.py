"""Training as the command line and the experiments do it: one loop, private or not, and the files a run leaves.

What is measured is what may be shown: accuracy on the test records. The training loss, the size of a batch and the
share of clipped records say something about single training records, so they are neither computed nor logged.
"""

import math
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clipless import models
from clipless.accounting import ACCOUNTANTS
from clipless.clipping import CLIPPINGS
from clipless.data import Data
from clipless.durable import replace_file
from clipless.errors import InvalidArgument, unknown_name
from clipless.keeping import Keeper, Kept, Saving
from clipless.private import Private, make_private
from clipless.runs import RunFolder

SMALL_BATCH = 100_000
NOT_PRIVATE = {
    "metrics.test_accuracy": "computed from the test records, which the guarantee does not cover",
    "metrics.test_accuracy_per_epoch": "computed from the test records, which the guarantee does not cover",
}
SEEDED = {
    "arguments.seed": "whoever knows the seed can subtract the noise: do not publish such a run as private",
}
APPROXIMATION = "gdp is an approximation and may understate epsilon; pld and rdp are guarantees."


@dataclass(frozen=True)
class OptimizerChoice:
    """A torch optimizer by name, and the learning rate that suits it when none is given."""

    make: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    lr: float


OPTIMIZERS: dict[str, OptimizerChoice] = {
    "sgd": OptimizerChoice(lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), 0.15),
    "adam": OptimizerChoice(lambda p, lr: torch.optim.Adam(p, lr=lr), 0.01),
    "adamw": OptimizerChoice(lambda p, lr: torch.optim.AdamW(p, lr=lr), 0.01),
    "nadam": OptimizerChoice(lambda p, lr: torch.optim.NAdam(p, lr=lr), 0.01),
    "rmsprop": OptimizerChoice(lambda p, lr: torch.optim.RMSprop(p, lr=lr), 0.005),
    "adagrad": OptimizerChoice(lambda p, lr: torch.optim.Adagrad(p, lr=lr), 0.05),
}


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run besides the data.

    `clipping="none"` trains without privacy, and `epsilon`, `delta` and `accountant` are then unused. `delta=None`
    stands for N ** -1.1, `lr=None` for the optimizer's default, `seed=None` for randomness from the operating system.
    A `noise_multiplier` takes the place of `epsilon`.
    """

    model: str = "mlp"
    clipping: str = "auto-s"
    epsilon: float = 3.0
    delta: float | None = None
    epochs: int = 40
    batch_size: int = 256
    optimizer: str = "sgd"
    lr: float | None = None
    seed: int | None = None
    accountant: str = "pld"
    noise: str = "torch"
    noise_multiplier: float | None = None

    @property
    def private(self) -> bool:
        return self.clipping != "none"


@dataclass(frozen=True)
class Progress:
    """Where a run stands. `epsilon` and `accuracy` are those of the last finished epoch, None before and without.

    `threshold` is the length of the present threshold vector, a constant or a released value; None without privacy.
    """

    step: int
    steps: int
    epsilon: float | None = None
    accuracy: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Result:
    """A finished run. `plan`, `ledger`, `history` (of what a threshold policy released), `epsilon` and `delta` are None
    when the run was not private; `ledger_file`, the run, position and head of the ledger on disk, when there is none."""

    data: str
    settings: Settings
    accuracies: tuple[float, ...]
    steps: int
    seconds: float
    epsilon: float | None
    delta: float | None
    plan: dict[str, Any] | None
    ledger: dict[str, Any] | None
    history: dict[str, Any] | None
    model: nn.Module
    ledger_file: dict[str, Any] | None = None

    @property
    def accuracy(self) -> float:
        """On the test set, after the last epoch: never the best epoch, which would be a choice made by test records."""
        return self.accuracies[-1]

    @property
    def approximation(self) -> bool:
        """Whether epsilon can lie below the truth: then it is no guarantee."""
        return self.settings.private and ACCOUNTANTS[self.settings.accountant].approximation

    def metrics(self) -> dict[str, Any]:
        return {
            "test_accuracy": self.accuracy,
            "test_accuracy_per_epoch": list(self.accuracies),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }


def train(
    data: Data,
    settings: Settings,
    on_progress: Callable[[Progress], None] | None = None,
    saving: Saving | None = None,
    stop: Callable[[], bool] = lambda: False,
    group: bool | None = None,
) -> Result:
    """Train a fresh model and test it once an epoch; the same seed gives the same run on the same machine.

    `on_progress` is called after every step and every test. With `saving`, a private run keeps its ledger and
    checkpoints in a folder, and can be resumed there. `stop` is asked before the first step and after each: when it says
    yes, everything is saved and `Interrupted` raised. Raises InvalidArgument, before training, for settings that cannot be
    meant. The state of torch's global generator is left as it was. `group` is that of `make_private`.
    """
    choice = _checked(data, settings)
    model_seed, shuffle_seed, noise_seed = _seeds(settings.seed)
    report = on_progress or (lambda _: None)
    with torch.random.fork_rng(devices=[]), _threads(settings.batch_size * math.prod(data.shape)):
        torch.manual_seed(model_seed)
        model = models.build(settings.model, data.shape, data.classes)
        optimizer = choice.make(model.parameters(), choice.lr if settings.lr is None else settings.lr)
        private = _attach(model, optimizer, data, settings, noise_seed, group) if settings.private else None
        loader = private.loader if private else _shuffled(data.train, settings.batch_size, shuffle_seed)
        about = {"data": data.name, "settings": asdict(settings)}
        try:
            keeper = Keeper(private, saving, about, stop)
            kept = keeper.begin()
            total = settings.epochs * len(loader)
            progress = Progress(step=private.steps_taken if private else 0, steps=total)
            while progress.step < total:
                for x, y in islice(loader, len(loader) - progress.step % len(loader)):
                    optimizer.zero_grad()
                    losses = F.cross_entropy(model(x), y, reduction="none")
                    private.backward(losses) if private else losses.mean().backward()
                    optimizer.step()
                    progress = _stepped(progress, private)
                    report(progress)
                    if progress.step % len(loader) == 0:
                        progress = _tested(progress, kept, model, data, private)
                        report(progress)
                    keeper.after_step(epoch_ended=progress.step % len(loader) == 0)
            if kept.tested != total:
                progress = _tested(progress, kept, model, data, private)
            seconds = keeper.seconds()
            spent = private.spent() if private else None
        finally:
            if private:
                private.detach()
    return Result(
        data=data.name,
        settings=settings,
        accuracies=tuple(kept.accuracies),
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


def _stepped(progress: Progress, private: Private | None) -> Progress:
    if private is None:
        return replace(progress, step=progress.step + 1)
    return replace(progress, step=private.steps_taken, threshold=float(private.thresholds.norm()))


def _tested(progress: Progress, kept: Kept, model: nn.Module, data: Data, private: Private | None) -> Progress:
    kept.accuracies.append(accuracy(model, data.test))
    kept.tested = progress.step
    return replace(progress, epsilon=private.spent().epsilon if private else None, accuracy=kept.accuracies[-1])


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset, batch_size: int = 1024) -> float:
    """The share of records that get their class right, with the model in evaluation mode and put back afterwards."""
    training = model.training
    model.eval()
    parts = zip(*(tensor.split(batch_size) for tensor in dataset.tensors), strict=True)
    hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
    model.train(training)
    return hits / len(dataset)


def save_run(result: Result, out: Path) -> Path:
    """Write `model.pt` (a state_dict) and `run.json` (arguments, plan, ledger, history, metrics, versions, and whether
    epsilon is an approximation).

    Returns the path of the latter. Each file appears whole or not at all. Files of an earlier run in the same folder,
    whose ledger may still be needed, are kept as `model.1.pt` and `run.1.json`, counting up. The checkpoint of this run
    is removed: it holds the seed of the noise, and nobody needs it any more.
    """
    record = {
        "private": result.settings.private,
        "data": result.data,
        "arguments": asdict(result.settings),
        "plan": result.plan,
        "ledger": result.ledger,
        "ledger_file": result.ledger_file,
        "history": result.history,
        "metrics": result.metrics(),
        "approximation": result.approximation,
        "notes": [APPROXIMATION] if result.approximation else [],
        "not_private": NOT_PRIVATE if result.settings.seed is None else NOT_PRIVATE | SEEDED,
        "versions": {name: version(name) for name in ("clipless", "torch", "numpy", "dp-accounting")}
        | {"python": platform.python_version()},
    }
    folder = RunFolder(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if result.ledger_file is None:
            folder.keep_earlier()
        replace_file(folder.model, lambda file: torch.save(result.model.state_dict(), file))
        folder.write_record(record)
        if result.ledger_file is not None:
            folder.checkpoint.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgument(f"cannot write to {out} ({error}). Choose another folder.") from error
    return folder.record


def check_writable(out: Path) -> None:
    """Raises InvalidArgument when a run could not be written there: better known before training than after."""
    RunFolder(out).check_writable()


def _checked(data: Data, settings: Settings) -> OptimizerChoice:
    if settings.clipping not in (*CLIPPINGS, "none"):
        raise unknown_name("clipping", settings.clipping, [*CLIPPINGS, "none"])
    if settings.optimizer not in OPTIMIZERS:
        raise unknown_name("optimizer", settings.optimizer, OPTIMIZERS)
    if settings.epochs < 1:
        raise InvalidArgument(f"epochs is {settings.epochs}: train for at least one.")
    if not 1 <= settings.batch_size <= len(data.train):
        raise InvalidArgument(
            f"batch_size is {settings.batch_size}: choose one from 1 to the {len(data.train)} training records."
        )
    if settings.lr is not None and not 0 < settings.lr < float("inf"):
        raise InvalidArgument(f"lr is {settings.lr}: choose a positive number, or none for the optimizer's default.")
    if settings.seed is not None and settings.seed < 0:
        raise InvalidArgument(f"seed is {settings.seed}: choose 0 or a positive integer, or none for a fresh one.")
    return OPTIMIZERS[settings.optimizer]


def _seeds(seed: int | None) -> tuple[int, int, int | None]:
    """Independent seeds of the model, of shuffling, and of sampling and noise (None: the private step draws one).

    A seed of more than 32 bits reaches the noise whole: 32 bits can be searched.
    """
    model, shuffle, noise = (int(part) for part in np.random.SeedSequence(seed).generate_state(3))
    return model, shuffle, noise if seed is not None and seed < 2**32 else seed


@contextmanager
def _threads(values: int) -> Iterator[None]:
    """One thread for batches of few values: waking a second costs more than it saves, by far on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if values < SMALL_BATCH else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    settings: Settings,
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

"""A finished run, and the files it leaves."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipless.accounting import ACCOUNTANTS, APPROXIMATION_NOTE
from clipless.app.data import Data
from clipless.app.settings import TrainingSettings
from clipless.errors import InvalidArgument
from clipless.runs.durable_files import replace_file
from clipless.runs.ledger_file import read_ledger
from clipless.runs.run_folder import RunFolder

TEST_RECORDS = "computed from the test records, which the guarantee does not cover"
DURATION = "the time a step takes grows with the batch that was drawn, and no noise hides that"
SEEDED = {
    "arguments.seed": "whoever knows the seed can subtract the noise: do not publish such a run as private",
}


@dataclass(frozen=True)
class Result:
    """A finished run. `scores` are those of every test, and `metric` says what they are.

    `plan`, `ledger`, `history` (what a threshold policy released), `epsilon` and `delta` are None for a run without
    privacy. `ledger_file` has the run, position and head of the ledger on disk; None if there is no such file.
    `reliability` has the bins of the reliability diagram on the test records; None where the model predicts no classes.
    `columns` says how the columns of a table became the model's inputs; None for other data.
    """

    data: str
    settings: TrainingSettings
    scores: tuple[float, ...]
    metric: str
    steps: int
    seconds: float
    epsilon: float | None
    delta: float | None
    plan: dict[str, Any] | None
    ledger: dict[str, Any] | None
    history: dict[str, Any] | None
    model: nn.Module
    ledger_file: dict[str, Any] | None = None
    reliability: dict[str, Any] | None = None
    columns: Mapping[str, Any] | None = None

    @property
    def score(self) -> float:
        """That of the last test: never that of the best one, which would be chosen by test records."""
        return self.scores[-1]

    @property
    def approximation(self) -> bool:
        """Whether the true epsilon can be larger than the one stated."""
        return self.settings.private and ACCOUNTANTS[self.settings.accountant].approximation

    def metrics(self) -> dict[str, Any]:
        return {
            f"test_{self.metric}": self.score,
            f"test_{self.metric}_per_epoch": list(self.scores),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }

    def not_private(self) -> dict[str, str]:
        """What in the record the guarantee does not cover, and why."""
        diagram = {} if self.reliability is None else {"reliability": TEST_RECORDS}
        scores = {f"metrics.test_{self.metric}{end}": TEST_RECORDS for end in ("", "_per_epoch")}
        return scores | {"metrics.seconds": DURATION} | diagram

    def record(self) -> dict[str, Any]:
        """The contents of `run.json`."""
        return {
            "private": self.settings.private,
            "data": self.data,
            "arguments": asdict(self.settings),
            "plan": self.plan,
            "ledger": self.ledger,
            "ledger_file": self.ledger_file,
            "history": self.history,
            "metrics": self.metrics(),
            "reliability": self.reliability,
            "columns": self.columns,
            "approximation": self.approximation,
            "notes": [APPROXIMATION_NOTE] if self.approximation else [],
            "not_private": self.not_private() | ({} if self.settings.seed is None else SEEDED),
            "versions": {name: version(name) for name in ("clipless", "torch", "numpy", "dp-accounting")}
            | {"python": platform.python_version()},
        }


def refuse_unstorable(data: Data) -> None:
    """Raises InvalidArgument for a name or a description that run.json cannot hold: better known before training."""
    try:
        json.dumps([data.name, data.columns])
        str(data.name).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"the data set's name or columns cannot be stored in run.json ({type(error).__name__}): give text, numbers, "
            "lists and dictionaries."
        ) from None


def save_run(result: Result, out: Path, config: str | None = None) -> Path:
    """Write `model.pt` (a state_dict), `config.toml` if there is one, and `run.json`, and return the path of the latter.

    Each file appears whole or not at all. Files of an earlier run in the same folder
    without privacy are kept as `model.1.pt`, `run.1.json` and so on; a private one is never replaced. The checkpoint of
    this run, which holds a key of the noise, is removed. Raises InvalidArgument if a file cannot be written: the
    checkpoint is there still, so the run can be finished later.
    """
    folder = RunFolder(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if result.ledger_file is None:
            folder.keep_earlier()
        else:
            read_ledger(folder.ledger, head=result.ledger_file["head"], torn=True)
        replace_file(folder.model, lambda file: torch.save(result.model.state_dict(), file))
        if config is not None:
            replace_file(folder.config, lambda file: file.write(config.encode()))
        folder.write_record(result.record())
        if result.ledger_file is not None:
            folder.checkpoint.unlink(missing_ok=True)
    except OSError as error:
        remedy = "Choose another folder."
        if folder.checkpoint.exists():
            remedy = (
                "Nothing is lost. Once it can be written, this finishes the run without another step:  clipless train "
            )
            remedy += f"--resume --out {out}"
        raise InvalidArgument(f"cannot write to {out} ({error}). {remedy}") from error
    return folder.record

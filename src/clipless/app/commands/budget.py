"""The body of `clipless budget`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipless import accounting, arguments, defaults
from clipless.accounting import APPROXIMATION_NOTE
from clipless.app.charts.budget import Budget
from clipless.app.commands.budget_charts import draw_charts
from clipless.app.commands.report import show_ledger
from clipless.app.options.budget import QuestionGroup
from clipless.app.terminal import output
from clipless.errors import InvalidArgument


def run(asked: QuestionGroup, draw: Path | None, *, as_json: bool) -> None:
    """Answer the question, and draw it."""
    rate = _sample_rate(asked.sample_rate, asked.dataset_size, asked.batch_size)
    count = _steps(asked.steps, asked.epochs, rate)
    failure = _delta(asked.delta, asked.dataset_size)
    if (asked.noise_multiplier is None) == (asked.epsilon is None):
        raise InvalidArgument(
            "give either --noise-multiplier (to ask for epsilon) or --epsilon (to ask for the noise)."
        )
    noise = asked.noise_multiplier
    if noise is None:
        assert asked.epsilon is not None
        noise = accounting.noise_multiplier(asked.epsilon, failure, rate, count, accountant=asked.accountant)
    budget = Budget(noise, rate, count, failure, asked.accountant)
    answer = _answer(budget, asked.dataset_size)
    if draw is not None:
        answer |= draw_charts(budget, draw, visible=not as_json)
    if as_json:
        output.show_json(answer)
    else:
        _show(answer)


def show_spent(ledger: Path, head: str | None, asked: QuestionGroup, draw: Path | None, *, as_json: bool) -> None:
    """Show what a run has spent. Raises InvalidArgument if a run is described as well."""
    sizes = (asked.dataset_size, asked.batch_size, asked.epochs, asked.sample_rate, asked.steps)
    if any(given is not None for given in (asked.noise_multiplier, asked.epsilon, *sizes, draw)):
        raise InvalidArgument("--ledger describes its whole run: give only --head, --delta and --accountant with it.")
    show_ledger(ledger, head, asked.delta, asked.accountant, as_json)


def _answer(asked: Budget, dataset_size: int | None) -> dict[str, Any]:
    approximation = accounting.ACCOUNTANTS[asked.accountant].approximation
    large = None if dataset_size is None else arguments.large_delta_note(asked.delta, dataset_size)
    return {
        "epsilon": asked.epsilon,
        "delta": asked.delta,
        "noise_multiplier": asked.noise_multiplier,
        "sample_rate": asked.sample_rate,
        "steps": asked.steps,
        "accountant": asked.accountant,
        "approximation": approximation,
        "notes": [note for note in (large, APPROXIMATION_NOTE if approximation else None) if note],
    }


def _show(answer: Mapping[str, Any]) -> None:
    output.show_table(
        "Privacy budget",
        {
            "epsilon": output.short(answer["epsilon"]),
            "delta": output.short(answer["delta"]),
            "noise multiplier": output.short(answer["noise_multiplier"]),
            "sample rate": output.short(answer["sample_rate"]),
            "steps": str(answer["steps"]),
            "accountant": answer["accountant"] + (" (approximation)" if answer["approximation"] else ""),
        },
    )
    for note in answer["notes"]:
        output.show_note(note)
    if "drawn" in answer:
        output.show_note("drawn: " + ", ".join(answer["drawn"]))


def _sample_rate(sample_rate: float | None, dataset_size: int | None, batch_size: int | None) -> float:
    if sample_rate is not None:
        if batch_size is not None:
            raise InvalidArgument("--sample-rate contradicts --batch-size: give the rate, or the two sizes.")
        return sample_rate
    if dataset_size is None or batch_size is None:
        raise InvalidArgument("how often is a record sampled? Give --dataset-size and --batch-size, or --sample-rate.")
    if not 1 <= batch_size <= dataset_size:
        raise InvalidArgument(
            f"--batch-size is {batch_size}: choose one from 1 to the data set's {dataset_size} records."
        )
    return batch_size / dataset_size


def _steps(steps: int | None, epochs: int | None, sample_rate: float) -> int:
    if steps is not None and epochs is None:
        return steps
    if epochs is None or steps is not None:
        raise InvalidArgument("how long is the run? Give either --epochs or --steps.")
    if not 0 < sample_rate <= 1:
        raise InvalidArgument(f"--sample-rate is {sample_rate}: choose a probability above 0 and up to 1.")
    return epochs * max(1, round(1 / arguments.rate(sample_rate)))


def _delta(delta: float | None, dataset_size: int | None) -> float:
    if delta is not None:
        return delta
    if dataset_size is None:
        raise InvalidArgument(
            "--delta is missing: choose at most 1 / (10 N), or give --dataset-size N for the default."
        )
    if not 1 <= dataset_size <= arguments.MOST_STEPS:
        raise InvalidArgument(f"--dataset-size is {dataset_size}: give the number of training records.")
    return defaults.delta(dataset_size)

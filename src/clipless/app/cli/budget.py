"""`clipless budget`: epsilon from a noise multiplier, or the noise multiplier for an epsilon."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from clipless import accounting, arguments, defaults
from clipless.accounting import APPROXIMATION_NOTE
from clipless.app.charts.budget import Budget
from clipless.app.cli import _output
from clipless.app.cli._budget_charts import draw_charts
from clipless.app.cli._options import AccountantOption, JsonOption
from clipless.app.cli.report import show_ledger
from clipless.errors import InvalidArgument


def budget(
    noise_multiplier: Annotated[float | None, typer.Option(help="Ask for the epsilon of this noise.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Ask for the noise that this epsilon needs.")] = None,
    dataset_size: Annotated[int | None, typer.Option(help="Number of training records.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Expected size of a batch.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training records.")] = None,
    sample_rate: Annotated[
        float | None, typer.Option(help="Probability that a record is in a batch, instead of the two sizes.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps, instead of epochs.")] = None,
    delta: Annotated[float | None, typer.Option(help="Default: N ** -1.1 when --dataset-size N is given.")] = None,
    accountant: AccountantOption = defaults.ACCOUNTANT,
    ledger: Annotated[
        Path | None, typer.Option(help="Show what this ledger, or the run in this folder, has spent. Takes no sizes.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="With --ledger: a hash kept elsewhere that the ledger must contain.")
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(
            help="Draw epsilon against steps, noise against epsilon, and the cost of tuning: all in one file (.svg, .png "
            "or .pdf), or each in a file of its own in this folder. Their data goes into a .json file beside them."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Epsilon from a noise multiplier, or the noise multiplier for an epsilon, for Poisson-sampled steps.

    Describe the run by --dataset-size, --batch-size and --epochs (or --steps), or by --sample-rate and --steps.
    """
    if ledger is not None:
        described = (noise_multiplier, epsilon, dataset_size, batch_size, epochs, sample_rate, steps, draw)
        if any(given is not None for given in described):
            raise InvalidArgument(
                "--ledger describes its whole run: give only --head, --delta and --accountant with it."
            )
        show_ledger(ledger, head, delta, accountant, as_json)
        return
    rate = _sample_rate(sample_rate, dataset_size, batch_size)
    count = _steps(steps, epochs, rate)
    failure = _delta(delta, dataset_size)
    if (noise_multiplier is None) == (epsilon is None):
        raise InvalidArgument(
            "give either --noise-multiplier (to ask for epsilon) or --epsilon (to ask for the noise)."
        )
    noise = noise_multiplier
    if noise is None:
        assert epsilon is not None
        noise = accounting.noise_multiplier(epsilon, failure, rate, count, accountant=accountant)
    asked = Budget(noise, rate, count, failure, accountant)
    answer = _answer(asked, dataset_size)
    if draw is not None:
        answer |= draw_charts(asked, draw, visible=not as_json)
    if as_json:
        _output.show_json(answer)
    else:
        _show(answer)


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
    _output.show_table(
        "Privacy budget",
        {
            "epsilon": _output.short(answer["epsilon"]),
            "delta": _output.short(answer["delta"]),
            "noise multiplier": _output.short(answer["noise_multiplier"]),
            "sample rate": _output.short(answer["sample_rate"]),
            "steps": str(answer["steps"]),
            "accountant": answer["accountant"] + (" (approximation)" if answer["approximation"] else ""),
        },
    )
    for note in answer["notes"]:
        _output.show_note(note)
    if "drawn" in answer:
        _output.show_note("drawn: " + ", ".join(answer["drawn"]))


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
        raise InvalidArgument("--delta is missing: choose one well below 1 / N, or give --dataset-size for N ** -1.1.")
    if not 1 <= dataset_size <= arguments.MOST_STEPS:
        raise InvalidArgument(f"--dataset-size is {dataset_size}: give the number of training records.")
    return defaults.delta(dataset_size)

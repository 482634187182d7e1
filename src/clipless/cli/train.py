"""`clipless train`: one run from data to files."""

from pathlib import Path
from typing import Annotated, Any

import typer

from clipless import data as data_sets
from clipless.cli import _output
from clipless.clipping import CLIPPINGS
from clipless.models import MODELS
from clipless.training import OPTIMIZERS, Result, Settings, check_writable, save_run
from clipless.training import train as run_training

_DEFAULTS = Settings()


def train(
    data: Annotated[
        str, typer.Option(help="digits, a folder of idx files (MNIST format), FILE.npz or FILE.csv.")
    ] = "digits",
    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODELS)}, or package.module:factory, called with (shape, classes).")
    ] = _DEFAULTS.model,
    clipping: Annotated[
        str, typer.Option(help=f"{', '.join(CLIPPINGS)}, or none for training without privacy.")
    ] = _DEFAULTS.clipping,
    epsilon: Annotated[float, typer.Option(help="The privacy budget of the whole run.")] = _DEFAULTS.epsilon,
    delta: Annotated[float | None, typer.Option(help="Default: N ** -1.1 for N training records.")] = _DEFAULTS.delta,
    epochs: Annotated[int, typer.Option(help="Passes over the training records.")] = _DEFAULTS.epochs,
    batch_size: Annotated[int, typer.Option(help="Expected size of a batch.")] = _DEFAULTS.batch_size,
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = _DEFAULTS.optimizer,
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: one that suits the optimizer.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="For experiments: repeats a run. Whoever knows the seed can subtract the noise. Default: none."
        ),
    ] = None,
    accountant: Annotated[str, typer.Option(help="pld, rdp, or gdp (an approximation).")] = _DEFAULTS.accountant,
    out: Annotated[
        Path | None, typer.Option(help="Folder for run.json and model.pt. Default: runs/DATA-MODEL-CLIPPING.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the run as JSON, and nothing else, on stdout.")
    ] = False,
) -> None:
    """Train a model on a data set, test it once an epoch, write run.json and model.pt.

    Without arguments: the digits that come with scikit-learn, automatic clipping, epsilon 3.
    """
    settings = Settings(model, clipping, epsilon, delta, epochs, batch_size, optimizer, lr, seed, accountant)
    records = data_sets.load(data)
    folder = out or Path("runs") / "-".join((records.name, model.replace(":", "."), clipping))
    check_writable(folder)
    with _output.training_bar(f"{records.name} {model} {clipping}", visible=not as_json) as bar:
        result = run_training(records, settings, on_progress=bar)
    written = save_run(result, folder)
    if as_json:
        _output.show_json(_record(result, written))
    else:
        _output.show_table("Run", _summary(result, written))
        for note in _notes(settings):
            _output.show_note(note)


def _record(result: Result, written: Path) -> dict[str, Any]:
    return {
        "private": result.settings.private,
        "data": result.data,
        "metrics": result.metrics(),
        "plan": result.plan,
        "run": str(written),
        "model": str(written.with_name("model.pt")),
        "notes": list(_notes(result.settings)),
    }


def _summary(result: Result, written: Path) -> dict[str, str]:
    settings = result.settings
    privacy = {
        "epsilon": f"{_output.short(result.epsilon)} ({settings.accountant})",
        "delta": _output.short(result.delta),
    }
    return {
        "data": result.data,
        "model": f"{settings.model}, {result.metrics()['parameters']:,} parameters",
        "clipping": settings.clipping,
        "test accuracy": _output.percent(result.accuracy),
        **(privacy if settings.private else {"epsilon": "none: this run is not private"}),
        "steps": f"{result.steps} in {settings.epochs} epochs",
        "time": f"{result.seconds:.1f} s",
        "written": f"{written}, {written.with_name('model.pt').name}",
    }


def _notes(settings: Settings) -> list[str]:
    notes = []
    if not settings.private:
        notes.append("clipping none: this run has no privacy guarantee.")
    elif settings.accountant == "gdp":
        notes.append(_output.GDP_NOTE)
    if settings.private and settings.seed is not None:
        notes.append("The seed is fixed: whoever knows it can subtract the noise. Release runs without --seed only.")
    return notes

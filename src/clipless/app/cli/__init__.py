"""The command line: `clipless train` and the other commands of `COMMANDS`.

The exit codes are those of `EXIT_CODES`. An error is one or two lines on stderr that say what to do; with --debug the place
where it was raised comes first.
"""

import errno
import importlib
import inspect
import os
import sys
import traceback
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from clipless.app.cli._groups import spread
from clipless.app.terminal import output
from clipless.app.terminal.streams import prepare_streams, refuse_unwritable
from clipless.app.torchrun import rank
from clipless.errors import CliplessError, DamagedFile, RankFailed

EXIT_CODES = {
    0: "done",
    1: "check found a model unsound, audit refuted a claim, an engine of clipless failed in bench, or an unexpected error",
    2: "an argument or a data set was refused",
    3: "the last line of a ledger is torn, and shown as one more step",
    4: "a ledger, checkpoint or run is damaged or was edited, and nothing of it is shown",
    130: "interrupted",
    143: "terminated",
}


class CommandEntry(NamedTuple):
    """What the help page shows of a command without importing it. Its function has the same name as its module."""

    summary: str
    example: str


COMMANDS = {
    "train": CommandEntry(
        "Train a model on a data set, test it once an epoch, write run.json and model.pt.",
        "clipless train --data digits --model mlp --clipping auto-s --epsilon 3",
    ),
    "schema": CommandEntry(
        "Rules for the columns of a table, from a public table of the same form: ranges, categories, missing values.",
        "clipless schema --target income census_2010.csv > schema.toml",
    ),
    "budget": CommandEntry(
        "Epsilon from a noise multiplier, or the noise multiplier for an epsilon, for Poisson-sampled steps.",
        "clipless budget --epsilon 3 --dataset-size 60000 --batch-size 2048 --epochs 40 --delta 1e-5",
    ),
    "check": CommandEntry(
        "How each parameter is handled, and whether the model keeps the promise, on made-up records.",
        "clipless check --model cnn --data digits --clipping auto-s",
    ),
    "audit": CommandEntry(
        "Attack a training configuration and compare the epsilon that the attacks prove with the one that is claimed.",
        "clipless audit --data digits --model linear --clipping auto-s --epsilon 3",
    ),
    "bench": CommandEntry(
        "Time and peak memory of one private training step over plain training, and how both grow.",
        "clipless bench --models mlp,cnn --rounds 20 --no-opacus --scaling none",
    ),
    "tune": CommandEntry(
        "Train a grid of candidates, choose the best by its test, and release it under one total (epsilon, delta).",
        "clipless tune --try lr=0.05,0.1,0.2 --try clipping=auto-s,dc-e --epsilon 3",
    ),
    "compare": CommandEntry(
        "Train several clippings, and without privacy, at one budget over seeds: one table, one figure, and which to take.",
        "clipless compare --clippings auto-s,abadi,dc-p,none --seeds 3 --epsilon 3",
    ),
    "report": CommandEntry(
        "What a run promised and has spent, from its ledger, and what in its files is not private.",
        "clipless report --html report.html runs/digits-mlp-auto-s",
    ),
    "reproduce": CommandEntry(
        "Reproduce a paper's figures and tables beside the published numbers, in one folder.",
        "clipless reproduce --quick auto-fashion",
    ),
}


class _LazyCommands(TyperGroup):
    """Imports the module of a command when the command is named, and that loads nothing heavy: what a command does is
    imported when it runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, placeholder and _load_command(placeholder.name or ""), rest


def _load_command(name: str) -> Any:
    function = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    text = "\n\n".join(" ".join(one.split()) for one in paragraphs)  # lines as long as the terminal is wide
    alone.command(name, help=text, epilog=f"Example:  {COMMANDS[name].example}")(spread(function))
    command: Any = typer.main.get_command(alone)
    for option in command.params:
        if getattr(option, "is_flag", False):
            option.metavar = ""  # and not <bool>: it takes no value
    return command


def _placeholder() -> None:
    """Stands for a command until it is run."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clipless {version('clipless')}")
        raise typer.Exit


app = typer.Typer(
    name="clipless",
    cls=_LazyCommands,
    help="Train PyTorch models with differential privacy and no clipping threshold to tune.",
    no_args_is_help=True,
    epilog="Exit codes:  " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _name, _entry in COMMANDS.items():
    app.command(_name, help=_entry.summary)(_placeholder)


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models with differential privacy and no clipping threshold to tune."""


UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """Run the command line. Whatever is raised becomes a message on stderr and an exit code; --debug shows the traceback."""
    prepare_streams()
    sys.path.insert(0, os.getcwd())  # as `python -m` does, so that --model finds a module in the current folder
    try:
        refuse_unwritable()
        sys.exit(app(prog_name="clipless", standalone_mode=False) or 0)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help page has been shown
            sys.exit(error.exit_code)
        _show_error(_with_remedy(error))
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(130)
    except CliplessError as error:
        _show_traceback()
        if rank() == 0 or not isinstance(error, RankFailed):  # the first rank tells what failed elsewhere
            _show_error(str(error))
        sys.exit(4 if isinstance(error, DamagedFile) else 2)
    except Exception as error:
        _show_traceback()
        _show_error(_unexpected(error))
        sys.exit(1)


def _show_error(message: str) -> None:
    with suppress(OSError):  # the exit code says it too
        output.show_error(message)


def _unexpected(error: Exception) -> str:
    """What is said of an error that is not ours. Its message is left out where it may quote a record."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full ({error}). Make room first. A private run that had begun keeps its ledger: continue it with "
            "clipless train --resume; what it spent stays spent."
        )
    where = traceback.extract_tb(error.__traceback__)[-1]
    message = f": {error}" if isinstance(error, (OSError, ImportError)) else "."
    return (
        f"{type(error).__name__} in {os.path.basename(where.filename)}, line {where.lineno}{message}\n"
        "clipless did not expect this error. Does it come from your own code? --debug shows its message, which may hold "
        "values of records, and the traceback."
    )


def _show_traceback() -> None:
    if "--debug" in sys.argv:
        traceback.print_exc()


def _with_remedy(error: Any) -> str:
    """A wrong command or option, with the nearest valid one and where to look."""
    near = getattr(error, "possibilities", None)
    message = (error.message if near else error.format_message()).rstrip(".")
    hint = f" Did you mean {near[0]}?" if near else ""
    path = error.ctx.command_path if error.ctx else "clipless"
    return f"{message}{'' if message.endswith('?') else '.'}{hint} See:  {path} --help"

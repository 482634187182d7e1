"""Options of all kinds of commands, and how names are completed."""

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from clipless.app import names

DATA_PANEL, MODEL_PANEL, PRIVACY_PANEL, STEPS_PANEL = "Data", "Model", "Privacy", "Training"
FILES_PANEL = "Files"


def starting(valid: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes a name in the shell."""
    return lambda incomplete: [name for name in valid if name.startswith(incomplete)]


def listing(valid: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes the last of several names with commas between them."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in valid if name.startswith(last)]

    return complete


ACCOUNTANT_HELP = "pld, rdp, or gdp (an approximation)."

AccountantOption = Annotated[str, typer.Option(help=ACCOUNTANT_HELP, autocompletion=starting(names.ACCOUNTANTS))]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")]
DataFolderOption = Annotated[
    str | None, typer.Option("--data-dir", help="Folder of data sets' files. Default: those in CLIPLESS_DATA.")
]

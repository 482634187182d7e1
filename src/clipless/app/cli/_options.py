"""Options that several commands share; imports no torch, as `budget` needs none."""

from typing import Annotated

import typer

AccountantOption = Annotated[str, typer.Option(help="pld, rdp, or gdp (an approximation).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")]
DataFolderOption = Annotated[
    str | None, typer.Option("--data-dir", help="Folder of data sets' files. Default: those in CLIPLESS_DATA.")
]

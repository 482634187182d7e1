"""`clipless reproduce`: figures and tables of the papers, reproduced."""

from typing import Annotated

import typer

from clipless.app.options.common import JsonOption
from clipless.app.options.reproduce import ExperimentGroup, PagesGroup, reproduction_names


def reproduce(
    experiment: ExperimentGroup,
    pages: PagesGroup,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="What to reproduce; --list shows all. Or the path of a TOML file.",
            autocompletion=reproduction_names,
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show what can be reproduced, and stop.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Reproduce a paper's figures and tables beside the published numbers, in one folder.

    Runs are stored as they end: the same command continues where it was interrupted. Nothing is downloaded; a missing data
    set is named, with how to get it.
    """
    from clipless.app.commands.reproduce import run, show_list, write_pages

    if listed:
        show_list(as_json)
    elif pages.page is not None:
        write_pages(experiment.store, pages.page, pages.readme, as_json)
    else:
        run(name, experiment, as_json=as_json)

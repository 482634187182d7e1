"""What a private step would take on many devices, by a cost model fitted to stored results.

    python benchmarks/scale.py --from benchmarks/results --page docs/scale.md

Puts the tables between `<!-- scale -->` and `<!-- end of scale -->` of the page. `clipless bench --processes 2 --out
benchmarks/results` stores what sending takes on this machine, on one that does nothing else.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from clipless.app.bench import readme, scale


def main(
    stored: Annotated[Path, typer.Option("--from", help="Folder with stored results.")] = Path("benchmarks/results"),
    page: Annotated[Path | None, typer.Option(help="Put the tables between the markers of this page.")] = None,
) -> None:
    text = scale.table(scale.fitted(stored))
    Console(width=200).print(text, soft_wrap=True, markup=False, highlight=False)
    if page is not None:
        readme.put_between((scale.START, scale.END), text, page)


if __name__ == "__main__":
    typer.run(main)

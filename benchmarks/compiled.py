"""What each compiled function gains on the models that it can help most: a step without it over a step with it.

    python benchmarks/compiled.py --out benchmarks/results
    python benchmarks/compiled.py --from benchmarks/results --page docs/performance.md

The first measures and writes `compiled.json` to the machine's folder; the second puts the table of all machines between
`<!-- compiled -->` and `<!-- end of compiled -->` of a page.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from clipless.app.bench import compiled, machine, readme
from clipless.app.bench.ways import listed
from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument


def main(
    functions: Annotated[str, typer.Option(help=f"Which of {', '.join(compiled.SWITCHES)}.")] = "all",
    rounds: Annotated[
        int, typer.Option(help="Timed steps with and without, in turn; more where steps are short.")
    ] = 40,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models: for trying out, not for quoting.")] = False,
    out: Annotated[Path, typer.Option(help="Folder with a folder for each machine.")] = Path("runs/bench"),
    stored: Annotated[Path | None, typer.Option("--from", help="Do not measure: take what is stored here.")] = None,
    page: Annotated[Path | None, typer.Option(help="Put the table between the markers of this page.")] = None,
) -> None:
    console = Console(width=200)
    names = tuple(compiled.SWITCHES) if functions == "all" else listed(functions)
    if not names:
        raise InvalidArgument(f"no function to measure: name some of {', '.join(compiled.SWITCHES)}.")
    for name in names:
        if name not in compiled.SWITCHES:
            raise unknown_name("function", name, [*compiled.SWITCHES, "all"])
    if stored is None:
        torch.set_num_threads(threads)
        facts, gains = machine.facts() | {"load_average_before": machine.load_average(), "tiny": quick}, []
        folder = out / machine.slug(facts)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (name for name in names if compiled.SWITCHES[name].used()):
            for model in compiled.SWITCHES[name].models:
                gains.append(compiled.measure_gain(name, model, rounds, tiny=quick))
                console.print(f"{name} on {model}: x{gains[-1].gain:.3f}")
                (folder / "compiled.json").write_text(compiled.to_json(facts, gains), encoding="utf-8")
    found = compiled.stored(stored or out)
    if not found:
        raise InvalidArgument(f"{stored} has no compiled.json: measure first, without --from.")
    text = compiled.table(found)
    console.print(text, soft_wrap=True, markup=False, highlight=False)
    if page is not None:
        if any(facts["tiny"] for facts, _ in found):
            raise InvalidArgument("only gains on models of full size belong on a page: measure without --quick.")
        readme.put_between((compiled.START, compiled.END), text, page)


if __name__ == "__main__":
    typer.run(main)

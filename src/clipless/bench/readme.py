"""The speed table of a README, between two markers, from a stored result."""

from pathlib import Path

from clipless.bench.results import MEASURED, BenchResult, ModelResult
from clipless.bench.ways import OPACUS, PLAIN, SHORT
from clipless.errors import InvalidArgument

START, END = "<!-- speed -->", "<!-- end of speed -->"


def write(result: BenchResult, page: Path) -> None:
    """Put the table of the result between the markers of a page. Raises InvalidArgument when it has none."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot read {page} ({error}). Give the page that holds the table.") from error
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise InvalidArgument(f"{page} has no place for the table: put the lines {START} and {END} where it belongs.")
    page.write_text(f"{before}{START}\n{block(result)}{END}{after}", encoding="utf-8")


def block(result: BenchResult) -> str:
    """A Markdown table of times over plain training, by minima, and the peak memory of auto-s; then how it was measured.

    Raises InvalidArgument for a result that is not complete or was measured on tiny models: neither is to be quoted.
    """
    if not result.complete or result.settings["tiny"]:
        raise InvalidArgument("only a complete run on the models of full size belongs in a README: measure again.")
    ways = [way for way in result.ways() if way in SHORT or way.startswith(OPACUS)]
    rows = [["model", "batch", "plain", *map(_title, ways), "peak memory, auto-s"]]
    rows.append(["---"] * len(rows[0]))
    rows += [_row(model, ways) for model in result.models.values()]
    means = result.geometric_means()
    mean = [f"**x{means[way]['ratio_of_minima']:.2f}**{_of(result, way)}" if way in means else "" for way in ways]
    rows.append(["**geometric mean**", "", "", *mean, ""])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{table}\n\n{caption(result)}\n"


def caption(result: BenchResult) -> str:
    """What the numbers are, and where they come from."""
    notes = sorted({f"{way}: {each.note}" for m in result.models.values() for way, each in m.ways.items() if each.note})
    return (
        "Time of a training step (forward, backward, noise, optimizer) over plain training, ratio of minima of at least "
        f"{result.settings['rounds']} interleaved rounds; memory is the peak of the whole process over that of plain "
        f"training. {where(result)}." + "".join(f" {_title(note)}." for note in notes)
    )


def where(result: BenchResult) -> str:
    """The machine and the day, and how its memory allocator was set, if that was not left to itself."""
    machine = result.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    allocator = "".join(f", {name}={value}" for name, value in machine.get("allocator", {}).items())
    return f"{machine['cpu']}, {machine['threads']} threads, {versions}{allocator}, {result.date[:10]}"


def _title(way: str) -> str:
    return way.replace(OPACUS, "Opacus ")


def _row(model: ModelResult, ways: list[str]) -> list[str]:
    first = [f"{model.title}", str(model.batch), f"{min(model.plain.ms):.3g} ms"]
    memory = model.ways.get("auto-s", model.ways[PLAIN]).figures(model.plain).get("peak_over_plain")
    return [*first, *(_cell(model, way) for way in ways), f"x{memory:.2f}" if memory else ""]


def _cell(model: ModelResult, way: str) -> str:
    result = model.ways.get(way)
    if result is None:
        return ""
    return f"x{result.ratio:.2f}" if result.status == MEASURED else result.status


def _of(result: BenchResult, way: str) -> str:
    measured = len(result.ratios(way))
    return "" if measured == len(result.models) else f" ({measured} of {len(result.models)})"

"""The speed tables of the README and of a page with every model, between markers, from stored results of all machines."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from clipless.app.bench.arithmetic import geometric_mean
from clipless.app.bench.machine import described
from clipless.app.bench.results import MEASURED, BenchResult, ModelResult
from clipless.app.bench.ways import OPACUS, PLAIN, SHORT
from clipless.errors import InvalidArgument

START, END = "<!-- speed -->", "<!-- end of speed -->"
EVERY_MODEL = "<!-- speed of every model -->", "<!-- end of speed of every model -->"
QUOTED = "auto-s"


def write(found: Sequence[BenchResult], page: Path) -> None:
    """Put the tables of the results between the markers of a page: the means, those of every model, or both. Raises
    InvalidArgument if the page has no markers."""
    held = page.read_text(encoding="utf-8") if page.is_file() else ""
    tables = every_model(found)
    if EVERY_MODEL[0] in held:
        put_between(EVERY_MODEL, tables, page)
    if START in held or EVERY_MODEL[0] not in held:
        put_between((START, END), block(found), page)


def put_between(markers: tuple[str, str], text: str, page: Path) -> None:
    """Put a text between two lines of a page in place of what is there. Raises InvalidArgument if it has no such lines."""
    try:
        old = page.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot read {page} ({error}). Give the page that holds the table.") from error
    before, start, rest = old.partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not (start and end):
        raise InvalidArgument(
            f"{page} has no place for the table: put the lines {markers[0]} and {markers[1]} where it belongs."
        )
    page.write_text(f"{before}{start}\n{text}{end}{after}", encoding="utf-8")


def block(found: Sequence[BenchResult]) -> str:
    """A line for every measurement, and how they were measured.

    Raises InvalidArgument for a result that is incomplete or was measured on tiny models.
    """
    _refuse_unfit(found)
    return f"{overview(found)}\n\n{caption(found)}\n"


def every_model(found: Sequence[BenchResult]) -> str:
    """For every machine a table of its models; then how they were measured. Raises InvalidArgument as `block` does."""
    _refuse_unfit(found)
    tables = []
    for machine in dict.fromkeys(described(result.machine) for result in found):
        here = [result for result in found if described(result.machine) == machine]
        tables.append(f"{machine}{_malloc(_main(here))}:\n\n{by_model(here)}")
    return "\n\n".join([*tables, caption(found)]) + "\n"


def _refuse_unfit(found: Sequence[BenchResult]) -> None:
    if any(not result.complete or result.settings["tiny"] for result in found):
        raise InvalidArgument("only a complete run on models of full size belongs on a page: measure again.")


def overview(found: Sequence[BenchResult]) -> str:
    """For every measurement the geometric mean of each way over the models, the worst model, and the mean of the others."""
    ways = list(dict.fromkeys(way for result in found for way in _quoted_ways(result)))
    worst = [f"worst model, {QUOTED}", f"mean of the others, {QUOTED}"]
    head = ["machine", "MALLOC variables", *worst, *(f"{_title(way)}, mean" for way in ways)]
    return _table(head, [_overview_row(result, ways) for result in found])


def _overview_row(result: BenchResult, ways: Sequence[str]) -> list[str]:
    means = result.geometric_means()
    mean = [f"**x{means[way]['ratio_of_minima']:.2f}**{_of(result, way)}" if way in means else "" for way in ways]
    place = [described(result.machine), "set" if _allocator(result) else "not set"]
    return [*place, *_worst_and_others({name: each.ratio for name, each in result.ratios(QUOTED).items()}), *mean]


def _worst_and_others(ratios: Mapping[str, float]) -> tuple[str, str]:
    """The model with the largest ratio, and the geometric mean of the rest.

    >>> _worst_and_others({"mlp": 1.0, "tabular": 1.6, "cnn": 1.21})
    ('tabular x1.60', 'x1.10')
    """
    if not ratios:
        return "", ""
    worst = max(ratios, key=ratios.__getitem__)
    others = [ratio for name, ratio in ratios.items() if name != worst]
    return f"{worst} x{ratios[worst]:.2f}", f"x{geometric_mean(others):.2f}" if others else ""


def by_model(here: Sequence[BenchResult]) -> str:
    """A row for every model of one machine: times over plain training, by minima, and the peak memory of auto-s. If it was
    measured with the allocator's variables and without, those without are shown, and auto-s with them."""
    result = _main(here)
    other = next((each for each in here if bool(_allocator(each)) != bool(_allocator(result))), None)
    ways = _quoted_ways(result)
    head = ["model", "batch", "plain", *map(_title, ways), f"peak memory, {QUOTED}"]
    rows = [_row(model, ways) for model in result.models.values()]
    if other is not None:
        head.append(f"{QUOTED}, MALLOC variables set")
        rows = [
            [*row, _cell(other.models[name], QUOTED) if name in other.models else ""]
            for name, row in zip(result.models, rows, strict=True)
        ]
    return _table(head, rows)


def caption(found: Sequence[BenchResult]) -> str:
    """What the numbers are, and where they come from."""
    models = (model for result in found for model in result.models.values())
    notes = sorted({f"{way}: {each.note}" for model in models for way, each in model.ways.items() if each.note})
    rounds = min(result.settings["rounds"] for result in found)
    places = ". ".join(dict.fromkeys(where(result) for result in found))
    return (
        "Time of a training step (forward, backward, noise, optimizer) over plain training, ratio of minima of at least "
        f"{rounds} interleaved rounds; means are geometric; memory is the peak of the whole process over that of plain "
        f"training. {places}." + "".join(f" {_title(note)}." for note in notes)
    )


def where(result: BenchResult) -> str:
    """The machine, the date, and the settings of the memory allocator if there were any."""
    machine = result.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    set_here = machine.get("vector_limits", {}) | machine.get("allocator", {})
    variables = "".join(f", {name}={value}" for name, value in set_here.items())
    return f"{described(machine)}, {machine['threads']} threads, {versions}{variables}, {result.date[:10]}"


def _main(here: Sequence[BenchResult]) -> BenchResult:
    """The measurement without the allocator's variables, if there is one."""
    return min(here, key=lambda result: bool(_allocator(result)))


def _allocator(result: BenchResult) -> dict[str, str]:
    return result.machine.get("allocator", {})


def _malloc(result: BenchResult) -> str:
    return ", MALLOC variables set" if _allocator(result) else ""


def _quoted_ways(result: BenchResult) -> list[str]:
    return [way for way in result.ways() if way in SHORT or way.startswith(OPACUS)]


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _title(way: str) -> str:
    return way.replace(OPACUS, "Opacus ")


def _row(model: ModelResult, ways: list[str]) -> list[str]:
    first = [f"{model.title}", str(model.batch), f"{min(model.plain.ms):.3g} ms"]
    memory = model.ways.get(QUOTED, model.ways[PLAIN]).figures(model.plain).get("peak_over_plain")
    return [*first, *(_cell(model, way) for way in ways), f"x{memory:.2f}" if memory else ""]


def _cell(model: ModelResult, way: str) -> str:
    result = model.ways.get(way)
    if result is None:
        return ""
    return f"x{result.ratio:.2f}" if result.status == MEASURED else result.status


def _of(result: BenchResult, way: str) -> str:
    measured = len(result.ratios(way))
    return "" if measured == len(result.models) else f" ({measured} of {len(result.models)})"

"""The page of all results, and the table of a README, from stored results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipless.app.bench.machine import described
from clipless.app.bench.readme import put_between
from clipless.app.charts.drawing import save
from clipless.app.reproduce.configuration import Configuration, configurations
from clipless.app.reproduce.experiment import NOT_PRIVATE, picture_names
from clipless.app.reproduce.pictures import PICTURES
from clipless.app.reproduce.summary import TableLine, lines, markdown, with_interval
from clipless.errors import InvalidArgument

MARKERS = "<!-- results -->", "<!-- end of results -->"
INTRODUCTION = """# Results

What `clipless reproduce` measured, beside what the papers published. Tables and figures are computed from the stored runs in
`experiments/results` by `clipless reproduce --page`; the remarks below them also name what was tried and is not stored.
Means over seeds with 95 % intervals (Student); ± of the papers is theirs. Accuracies are those after the last epoch, on test
records, which no guarantee covers. Each line gives the ε of the accountant it was calibrated with, and that of the same run
by the others; gdp is an approximation that can understate.
"""


def stored_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The stored results by id, in the order of the configurations."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found[content["id"]] = content
        except (OSError, ValueError, KeyError) as error:
            raise InvalidArgument(f"{path} holds no results ({error}): remove it, or store it again.") from error
    if not found:
        raise InvalidArgument(f"{folder} holds no results: run clipless reproduce ID --store {folder} first.")
    return found


def write_page(folder: Path, page: Path) -> list[str]:
    """Write the page and its figures, which go to `figures/results` beside it; returns the ids shown."""
    known, sections, shown = configurations(), [], []
    for name, content in stored_results(folder).items():
        experiment = known.get(name)
        if experiment is None:
            raise InvalidArgument(f"{folder} has results of {name}, which is not an experiment: remove them.")
        records = content["runs"]
        if not lines(experiment, records):  # a choice of which some candidates are missing
            continue
        pictures = _pictures(experiment, records, page.parent / "figures" / "results")
        sections.append(_section(experiment, content, records, pictures))
        shown.append(name)
    page.write_text(INTRODUCTION + "\n" + "\n\n".join(sections) + "\n", encoding="utf-8")
    return shown


def write_readme(folder: Path, readme: Path) -> None:
    """Put a short table of all lines that have a published number between the markers of a README."""
    known = configurations()
    rows = ["| experiment | | ε, accountant | ours | seeds | published |", "| --- | --- | --- | --- | --- | --- |"]
    for name, content in stored_results(folder).items():
        quoted = [
            one for one in lines(known[name], content["runs"]) if one.published or known[name].figure.get("readme")
        ]
        rows += [_readme_row(name, line, content["runs"]) for line in quoted]
    put_between(MARKERS, "\n".join(rows) + "\n", readme)


def _readme_row(name: str, line: TableLine, records: Sequence[Mapping[str, Any]]) -> str:
    own = next(one for one in records if one["row"] == line.row and one["point"] == line.point)
    spent = "not private" if line.epsilon is None else f"{line.epsilon:.3g}, {own['settings']['accountant']}"
    theirs = "" if line.published is None else with_interval(line.published.value, line.published.interval)
    unit = " %" if line.metric.endswith("accuracy") else ""
    return f"| {name} | {line.row} | {spent} | {line.text}{unit} | {len(line.scores)} | {theirs} |"


def _pictures(experiment: Configuration, records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    found = lines(experiment, records)
    return [
        save(PICTURES[name](experiment, found, records), folder / f"{experiment.id}-{name}.png")
        for name in picture_names(experiment, records)
    ]


def _section(
    experiment: Configuration,
    content: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    pictures: Sequence[Path],
) -> str:
    missing = content["missing_runs"]
    settings = ", ".join(f"{key} {value}" for key, value in experiment.settings.items())
    parts = [
        f"## {experiment.id}: {experiment.title}",
        f"{experiment.source}. Data {experiment.data}; {settings}.",
        markdown(lines(experiment, records)),
        experiment.note.strip(),
        f"{missing} of {missing + len(records)} runs of this experiment have not been run." if missing else "",
        NOT_PRIVATE if experiment.research else "",
        "\n".join(f"![{experiment.title}](figures/results/{path.name})" for path in pictures),
        f"Run on {'; '.join(dict.fromkeys(described(machine) for machine in content['machines']))}. Again: "
        f"`clipless reproduce {experiment.id}`.",
    ]
    return "\n\n".join(part for part in parts if part)

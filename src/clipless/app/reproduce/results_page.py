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
from clipless.app.reproduce.running import current
from clipless.app.reproduce.summary import (
    TableLine,
    differences,
    differences_table,
    lines,
    markdown,
    with_interval,
)
from clipless.errors import InvalidArgument

MARKERS = "<!-- results -->", "<!-- end of results -->"
INTRODUCTION = """# Results

What `clipless reproduce` measured, beside what the papers published. Tables and figures are computed from the stored runs in
`experiments/results` by `clipless reproduce --page`; the remarks below them also name what was tried and is not stored.
Means over five seeds or more have 95 % intervals (Student); of fewer, every run is shown. Differences of two rows are taken
seed by seed. ± of the papers is theirs. Accuracies are those after the last epoch, on test records, which no guarantee
covers. Each line gives the ε of the accountant it was calibrated with, and that of the same run by the others; gdp is an
approximation that can understate. What became of each table and figure of the papers: [papers.md](papers.md).
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
        records = _current(experiment, content)
        if not lines(experiment, records):  # a choice of which some candidates are missing
            continue
        pictures = _pictures(experiment, records, page.parent / "figures" / "results")
        missing = len(experiment.cells()) - len(current(content["runs"], experiment.cells()))
        sections.append(_section(experiment, content, records, pictures, missing))
        shown.append(name)
    page.write_text(INTRODUCTION + "\n" + "\n\n".join(sections) + "\n", encoding="utf-8")
    return shown


def write_readme(folder: Path, readme: Path) -> None:
    """Put a short table between the markers of a README: the rows that the experiments name for it, each with its values at
    several points side by side."""
    known = configurations()
    rows = ["| experiment | | ε, accountant | ours | seeds | published |", "| --- | --- | --- | --- | --- | --- |"]
    for name, content in stored_results(folder).items():
        records = _current(known[name], content)
        found = lines(known[name], records)
        by_row = [[line for line in found if line.row == row] for row in known[name].readme]
        rows += [_readme_row(name, own, records) for own in by_row if own]
    put_between(MARKERS, "\n".join(rows) + "\n", readme)


def _current(experiment: Configuration, content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The stored runs of the experiment as it is now; also those of seeds beyond its own."""
    seeds = max([experiment.seeds, *(run["settings"]["seed"] + 1 for run in content["runs"])])
    return current(content["runs"], experiment.cells(seeds))


def _readme_row(name: str, found: Sequence[TableLine], records: Sequence[Mapping[str, Any]]) -> str:
    row = found[0].row
    used = [next(r for r in records if (r["row"], r["point"]) == (row, line.point)) for line in found]
    accountants = [record["settings"]["accountant"] for record in used]
    one = len(set(accountants)) == 1
    spent = [
        f"{line.epsilon:.3g}" + ("" if one else f" {accountant}")
        for line, accountant in zip(found, accountants, strict=True)
        if line.epsilon is not None
    ]
    published = [line.published and with_interval(line.published.value, line.published.interval) for line in found]
    cells = [
        name,
        row,
        (_side_by_side(spent) + (f", {accountants[0]}" if one else "")) if spent else "not private",
        _side_by_side([line.text for line in found]) + (" %" if found[0].metric.endswith("accuracy") else ""),
        _side_by_side([f"{len(line.scores)}" for line in found]),
        _side_by_side([text or "-" for text in published]) if any(published) else "",
    ]
    return f"| {' | '.join(cells)} |"


def _side_by_side(texts: Sequence[str]) -> str:
    """One text if all are the same.

    >>> _side_by_side(["1", "1"]), _side_by_side(["0.998", "2"])
    ('1', '0.998; 2')
    """
    return texts[0] if len(set(texts)) == 1 else "; ".join(texts)


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
    missing: int,
) -> str:
    planned = len(experiment.cells())
    settings = ", ".join(f"{key} {value}" for key, value in experiment.settings.items())
    parts = [
        f"## {experiment.id}: {experiment.title}",
        f"{experiment.source}. Data {experiment.data}; {settings}.",
        markdown(lines(experiment, records)),
        differences_table(differences(experiment, records), records[0]["metric"]),
        experiment.note.strip(),
        f"{missing} of {planned} runs of this experiment have not been run." if missing else "",
        NOT_PRIVATE if experiment.research else "",
        "\n".join(f"![{experiment.title}](figures/results/{path.name})" for path in pictures),
        f"Run on {'; '.join(dict.fromkeys(described(machine) for machine in content['machines']))}. Again: "
        f"`clipless reproduce {experiment.id}`.",
    ]
    return "\n\n".join(part for part in parts if part)

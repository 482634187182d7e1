"""`clipless reproduce ID`: run an experiment's grid, and write its results, table and figures into a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clipless.app.charts.drawing import figure, save
from clipless.app.progress import OnProgress
from clipless.app.reproduce.configuration import Configuration
from clipless.app.reproduce.pictures import PICTURES
from clipless.app.reproduce.result import ReproductionResult
from clipless.app.reproduce.running import finished, run_grid, write_record
from clipless.app.reproduce.summary import differences, differences_table, lines, markdown
from clipless.errors import InvalidArgument

RESULTS = "results.json"
NOT_PRIVATE = (
    "RESEARCH: this experiment looks at single training records (norms, shares clipped). Its figures are not covered by "
    "any guarantee: make them of public data only."
)


def run(
    experiment: Configuration,
    folder: Path,
    kind: str,
    on_progress: OnProgress,
    *,
    seeds: int | None = None,
    workers: int = 1,
    data_dir: str | None = None,
    rows: Sequence[str] = (),
) -> ReproductionResult:
    """Run what is not stored yet, then write `results.json`, `table.md` and the figures of everything that is stored, also
    of seeds and rows that were not asked for now."""
    figure()  # or raises: nothing is trained without matplotlib
    run_grid(experiment, folder, on_progress, seeds=seeds, workers=workers, data_dir=data_dir, rows=rows)
    return written(experiment, folder, kind, max(seeds or 0, experiment.seeds))


def written(experiment: Configuration, folder: Path, kind: str, seeds: int | None = None) -> ReproductionResult:
    """The results, table and figures of the runs that are stored in a folder."""
    records = finished(experiment, folder, experiment.cells(seeds))
    if not records:
        raise InvalidArgument(f"no run of {experiment.id} is stored in {folder}: run it first.")
    write_record(folder / RESULTS, results(experiment, records))
    found = lines(experiment, records)
    if not found:
        raise InvalidArgument(
            f"no choice of {experiment.id} has runs of all its candidates in {folder}: run the rest first."
        )
    page = folder / "table.md"
    notes = [experiment.note.strip(), NOT_PRIVATE if experiment.research else ""]
    text = [
        f"# {experiment.title}",
        f"{experiment.source}, data {experiment.data}.",
        markdown(found),
        *filter(None, [differences_table(differences(experiment, records), found[0].metric), *notes]),
    ]
    page.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    figures = {}
    for name in picture_names(experiment, records):
        path = save(PICTURES[name](experiment, found, records), folder / f"{experiment.id}-{name}.{kind}")
        figures[str(path)] = f"{experiment.source}: {experiment.title}"
    return ReproductionResult(page, figures)


def picture_names(experiment: Configuration, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The figures that these runs allow: the configuration's, and thresholds if any changed."""
    kinds = experiment.figure.get("kind", "bars")
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    if any(record["thresholds"] for record in records):
        names.append("thresholds")
    if any("norms" in (record.get("extra") or {}) for record in records):
        names += ["shares", "norms", "errors"]
    if any("reliability" in (record.get("extra") or {}) for record in records):
        names.append("reliability")
    return [name for name in dict.fromkeys(names) if name in PICTURES]


def results(experiment: Configuration, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything about an experiment's runs as plain data. What runs of one line share is in it once."""
    plans: dict[str, Any] = {}
    machines: list[dict[str, Any]] = []
    runs = []
    for record in records:
        machine = _still(record["machine"])
        if machine not in machines:
            machines.append(machine)
        key = ", ".join([record["row"], *(f"{k} {v}" for k, v in record["point"].items())])
        plans.setdefault(key, record["plan"])
        runs.append(
            {name: value for name, value in record.items() if name != "plan"}
            | {"line": key, "machine": machines.index(machine)}
        )
    described = asdict(experiment)
    return {
        "id": experiment.id,
        "configuration": described,
        "missing_runs": len(experiment.cells()) - len(records),
        "machines": machines,
        "plans": plans,
        "runs": runs,
    }


def _still(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in machine.items() if name != "load_average"}

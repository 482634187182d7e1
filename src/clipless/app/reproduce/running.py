"""Running an experiment's grid: each run is stored when it ends, and a stored run is not run again."""

import hashlib
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from shutil import rmtree
from typing import Any

from clipless.accounting import ACCOUNTANTS, Ledger, gradient_multiplier
from clipless.app import data as data_sets
from clipless.app.bench import machine
from clipless.app.data import Data
from clipless.app.progress import OnProgress
from clipless.app.reproduce import measures
from clipless.app.reproduce.configuration import Configuration, GridRun
from clipless.app.training import Result, Saving, TrainingSettings, train
from clipless.app.tuning.pools import InProcess, Pool, Processes
from clipless.arguments import named
from clipless.errors import CliplessError
from clipless.runs.durable_files import replace_file

RUNS = "runs"
UNFINISHED = "unfinished"


def run_grid(
    experiment: Configuration,
    folder: Path,
    on_progress: OnProgress,
    *,
    seeds: int | None = None,
    workers: int = 1,
    data_dir: str | None = None,
    rows: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The records of all runs, those that were stored and those that are run now, in the order of the grid.

    With several workers each run has a process and one thread. A run that fails stops the experiment; those that ended
    before stay stored. `rows` are the only ones to run, if given.
    """
    for row in rows:
        named("row", row, {each.name: each for each in experiment.rows})
    cells = [cell for cell in experiment.cells(seeds) if not rows or cell.row in rows]
    waiting = [cell for cell in cells if stored(folder, cell) is None]
    for data in dict.fromkeys(cell.data for cell in cells):
        data_sets.load(data, data_dir, on_progress=on_progress)  # refused here, with its remedy, and not in a worker
    total, done = sum(map(_work, cells)), sum(_work(cell) for cell in cells if cell not in waiting)
    pool: Pool = InProcess() if workers == 1 else Processes(workers)
    try:
        flying: dict[Future[None], GridRun] = {}
        while waiting or flying:
            while waiting and len(flying) < pool.width:
                cell = waiting.pop(0)
                on_progress(f"{cell.row}, seed {cell.settings.seed}", done, total)
                arguments = (cell, data_dir, str(folder), experiment.resume, experiment.measure)
                flying[pool.submit(run_cell, *arguments)] = cell
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                future.result()
                done += _work(flying.pop(future))
                on_progress(f"{cell.row}, seed {cell.settings.seed}", done, total)
    finally:
        pool.close()
    return [record for cell in cells if (record := stored(folder, cell)) is not None]


def run_cell(cell: GridRun, data_dir: str | None, folder: str, resume: bool, measure: tuple[str, ...] = ()) -> None:
    """Train one run and store its record."""
    records = _load(cell.data, data_dir)
    settings = cell.settings if cell.choosing is None else cell.choosing.priced(cell.settings, len(records.train))
    watching = measures.watch(measure, records, settings)
    started = time.process_time()
    saving = Saving(unfinished(Path(folder), cell), resume=True, every=300.0) if resume else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="delta=.* is above 1/")  # it is the paper's, and the table says it
        result = train(records, settings, saving=saving, group=False, research=watching)
    minutes = (time.process_time() - started) / 60  # what else runs on the machine does not count
    extra = measures.measured(measure, result.model, records, watching)
    if "time" in measure:
        extra[measures.TIME] = minutes
    write_record(Path(folder) / RUNS / f"{cell.stem}.json", _record(cell, result) | {"extra": extra})
    if saving is not None:
        rmtree(saving.out, ignore_errors=True)


def unfinished(folder: Path, cell: GridRun) -> Path:
    """Where the checkpoints of a run are. Runs with other settings have another folder: they cannot continue from these."""
    digest = hashlib.sha256(json.dumps(asdict(cell.settings), sort_keys=True).encode()).hexdigest()
    return folder / UNFINISHED / f"{cell.stem}-{digest[:8]}"


def stored(folder: Path, cell: GridRun) -> dict[str, Any] | None:
    """The record of a run that ended earlier with the same data and settings; None if there is none. Records of before rows
    could have data of their own do not name it."""
    path = folder / RUNS / f"{cell.stem}.json"
    if not path.exists():
        return None
    record = read_json(path)
    return record if _is_run_of(record, cell) else None


def current(records: Sequence[Mapping[str, Any]], cells: Sequence[GridRun]) -> list[Mapping[str, Any]]:
    """Those of some stored records that are runs of these cells, in the order of the cells: not those of rows and settings
    that an experiment had earlier."""
    by_place = {_place(record, record["settings"]["seed"]): record for record in records}
    found = []
    for cell in cells:
        record = by_place.get(_place(asdict(cell), cell.settings.seed))
        if record is not None and _is_run_of(record, cell):
            found.append(record)
    return found


def _place(record: Mapping[str, Any], seed: int | None) -> tuple[str, str, str, int | None]:
    return record["row"], str(dict(record["point"])), str(dict(record.get("candidate", {}))), seed


def _is_run_of(record: Mapping[str, Any], cell: GridRun) -> bool:
    settings = asdict(TrainingSettings()) | (record.get("settings") or {})  # a setting added later had its default
    if settings["delta"] is None and cell.settings.delta is not None:
        settings["delta"] = record.get("delta")  # what the default was then
    return settings == asdict(cell.settings) and record.get("data", cell.data) == cell.data


def take_over(results: Path, folder: Path, cells: Sequence[GridRun]) -> None:
    """Store the runs of a `results.json` in a folder where they are missing, so that they are not run again. Runs of other
    settings than the experiment has now are left out."""
    content = read_json(results)
    kept = {_place(run, run["settings"]["seed"]): run for run in content["runs"]}
    for cell in cells:
        run = kept.get(_place(asdict(cell), cell.settings.seed))
        path = folder / RUNS / f"{cell.stem}.json"
        if run is not None and not path.exists():
            whole = {key: value for key, value in run.items() if key != "line"}
            machine = content["machines"][run.get("machine", 0)]
            write_record(path, whole | {"plan": content["plans"][run["line"]], "machine": machine})


def read_json(path: Path) -> dict[str, Any]:
    """The content of a file that an experiment wrote."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise DamagedRecord(f"{path} is not JSON ({error}): remove it, and what it held is run again.") from error


class DamagedRecord(CliplessError, ValueError):
    """A stored run cannot be read."""


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write JSON; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write((json.dumps(record, indent=1) + "\n").encode()))


def finished(experiment: Configuration, folder: Path, cells: Sequence[GridRun]) -> list[dict[str, Any]]:
    """The records of the runs that are stored, whatever else is still to be run."""
    return [record for cell in cells if (record := stored(folder, cell)) is not None]


def _work(cell: GridRun) -> float:
    """Records that a run sees, in units of the data set: what its time grows with."""
    return float(cell.settings.epochs)


def _record(cell: GridRun, result: Result) -> dict[str, Any]:
    ledger = None if result.ledger is None else Ledger.from_dict(result.ledger)
    return {
        "row": cell.row,
        "data": cell.data,
        "point": dict(cell.point),
        "candidate": dict(cell.candidate),
        "settings": asdict(cell.settings),
        "private": cell.settings.private,
        "metric": result.metric,
        "score": result.score,
        "scores": list(result.scores),
        "epsilon": result.epsilon,
        "delta": result.delta,
        "epsilons": None if ledger is None else _epsilons(ledger, result.delta or 0.0),
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "plan": result.plan,
        "noise_cost": None if result.plan is None else noise_cost(result.plan),
        "thresholds": _thresholds(result),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.facts() | {"load_average": machine.load_average()},
    }


def _epsilons(ledger: Ledger, delta: float) -> dict[str, float]:
    """What the run has spent by every accountant."""
    return {name: ledger.spent(delta, name).epsilon for name in ACCOUNTANTS}


def noise_cost(plan: Mapping[str, Any]) -> float:
    """The variance of the released gradient's noise, summed over its numbers, in units of the squared threshold."""
    statistic = plan["statistic_multiplier"]
    total = plan["noise_multiplier"]
    noise = total if statistic is None else gradient_multiplier(total, statistic)
    return float(noise**2 * sum(plan["dimensions"]) / plan["expected_batch"] ** 2)


def _thresholds(result: Result) -> list[float] | None:
    """The released thresholds of a policy, at most 200 of them, evenly spaced."""
    steps = (result.history or {}).get("thresholds") or []
    if len({str(step) for step in steps}) < 2:
        return None
    chosen = steps[:: max(1, len(steps) // 200)]
    return [sum(value**2 for (value,) in step) ** 0.5 for step in chosen]


@lru_cache(maxsize=2)
def _load(data: str, data_dir: str | None) -> Data:
    return data_sets.load(data, data_dir)

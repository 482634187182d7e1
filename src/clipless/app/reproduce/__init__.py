"""`clipless reproduce`: the papers' figures, reproduced. `REPRODUCTIONS` finds each by its id.

To add an experiment, write a TOML file in `configurations`; users give the path of one of theirs. For anything else write a
function `ReproductionRequest -> ReproductionResult` and register it here with a line on what it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clipless.app.progress import OnProgress
from clipless.app.reproduce.result import ReproductionResult
from clipless.arguments import named


@dataclass(frozen=True)
class ReproductionRequest:
    """What is asked for: the folder to write to, the kind of pictures, whom to report progress to, and for experiments the
    number of seeds (None: the experiment's), whether a quick one is enough, runs at a time, the folder of the data,
    whether only what is stored is shown, with nothing trained, the rows to run (none: all of them), and the folder of
    earlier results, whose runs are not run again."""

    folder: Path
    kind: str
    on_progress: OnProgress
    seeds: int | None = None
    quick: bool = False
    workers: int = 1
    data_dir: str | None = None
    stored: bool = False
    rows: tuple[str, ...] = ()
    store: Path | None = None


@dataclass(frozen=True)
class Reproduction:
    """Something that can be reproduced: what it is, and how, into a folder."""

    what: str
    run: Callable[[ReproductionRequest], ReproductionResult]


def _theory(request: ReproductionRequest) -> ReproductionResult:
    from clipless.app.reproduce import theory
    from clipless.app.reproduce.page import draw_page

    return draw_page(theory.TITLE, theory.DRAWINGS, request.folder, request.kind, request.on_progress)


REPRODUCTIONS = {
    "theory": Reproduction(
        "the papers' bounds, regions, kernels and flows as figures; no data, under a minute", _theory
    ),
}


def reproductions() -> dict[str, Reproduction]:
    """Everything that can be reproduced: the figures of the theory, and the experiments."""
    from clipless.app.reproduce.configuration import configurations

    experiments = {
        name: Reproduction(f"{each.source}: {each.title}", _experiment(name)) for name, each in configurations().items()
    }
    return {**REPRODUCTIONS, **experiments}


def reproduction(name: str) -> Reproduction:
    """The reproduction with this id, or that of a user's own TOML file. Raises InvalidArgument for an unknown id."""
    from clipless.app.reproduce.configuration import configuration, is_own

    if is_own(name):
        found = configuration(name)
        return Reproduction(f"{found.source}: {found.title}", _experiment(name))
    return named("id", name, reproductions())


def _experiment(name: str) -> Callable[[ReproductionRequest], ReproductionResult]:
    def run(request: ReproductionRequest) -> ReproductionResult:
        from clipless.app.reproduce import experiment, running
        from clipless.app.reproduce.configuration import configuration

        described = configuration(name)
        whole = described.quickly() if request.quick else described
        kept = None if request.store is None or request.quick else request.store / f"{whole.id}.json"
        if kept is not None and kept.exists():
            running.take_over(kept, request.folder, whole.cells(max(request.seeds or 0, whole.seeds)))
        if request.stored:
            return experiment.written(whole, request.folder, request.kind, request.seeds)
        return experiment.run(
            whole,
            request.folder,
            request.kind,
            request.on_progress,
            seeds=request.seeds,
            workers=request.workers,
            data_dir=request.data_dir,
            rows=request.rows,
        )

    return run

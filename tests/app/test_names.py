"""The names of options are those of the registries, in their order: help shows what a command takes."""

import pytest

from clipless.accounting import ACCOUNTANTS
from clipless.accounting.selection import AUTO, METHODS
from clipless.app import names
from clipless.app.auditing import _GAMES
from clipless.app.bench.problems import PROBLEMS, TINY_PROBLEMS
from clipless.app.bench.scaling import AXES
from clipless.app.bench.ways import CLIPLESS
from clipless.app.commands.bench import MALLOC
from clipless.app.data import DATA
from clipless.app.data.own.choice import TASK_WORDS
from clipless.app.models import MODELS, TEXT_MODELS
from clipless.app.options.reproduce import reproduction_names
from clipless.app.reproduce import reproductions
from clipless.app.settings import TUNABLE, TrainingSettings
from clipless.app.training import LR_SCHEDULES, OPTIMIZERS
from clipless.app.tuning import open_pool
from clipless.auditing.one_run import KINDS
from clipless.clipping import CLIPPINGS
from clipless.errors import InvalidArgument
from clipless.noise import NOISE_SOURCES

REGISTRIES = {
    "MODELS": MODELS,
    "TEXT_MODELS": TEXT_MODELS,
    "DATA": DATA,
    "TASKS": TASK_WORDS,
    "OPTIMIZERS": OPTIMIZERS,
    "LR_SCHEDULES": LR_SCHEDULES,
    "CLIPPINGS": CLIPPINGS,
    "NOISE_SOURCES": NOISE_SOURCES,
    "ACCOUNTANTS": ACCOUNTANTS,
    "SELECTION_METHODS": METHODS,
    "GAMES": _GAMES,
    "CANARY_KINDS": KINDS,
    "BENCH_MODELS": PROBLEMS,
    "BENCH_CLIPPINGS": CLIPLESS,
    "BENCH_AXES": AXES,
    "MALLOC": MALLOC,
}
OTHERS = {"NO_CLIPPING", "AUTO_METHOD", "EXECUTORS"}


@pytest.mark.parametrize("name", REGISTRIES)
def test_names_are_those_of_the_registry(name: str) -> None:
    assert getattr(names, name) == tuple(REGISTRIES[name])


def test_every_list_of_names_is_tied_to_its_registry() -> None:
    assert {name for name in vars(names) if name.isupper()} == {*REGISTRIES, *OTHERS}


def test_names_without_a_registry() -> None:
    assert names.AUTO_METHOD == AUTO
    assert not TrainingSettings(clipping=names.NO_CLIPPING).private
    assert set(TUNABLE) < set(TrainingSettings.__dataclass_fields__)
    assert set(TINY_PROBLEMS) == set(names.BENCH_MODELS)
    assert reproduction_names() == list(reproductions())


@pytest.mark.parametrize("name", [name for name in names.EXECUTORS if name != "dask"])
def test_every_executor_can_be_opened(name: str) -> None:
    open_pool(name, 1, None).close()


def test_another_executor_is_refused_with_all_names() -> None:
    with pytest.raises(InvalidArgument, match="'local', 'processes', 'dask'"):
        open_pool("cluster", 1, None)

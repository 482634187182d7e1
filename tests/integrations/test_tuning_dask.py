"""A search on a real Dask cluster of local processes, with a worker that is killed while it trains."""

import math
import os
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import dask
import distributed
import pytest
import torch

from clipless.app.data import load
from clipless.app.training import TrainingSettings
from clipless.app.tuning import DaskCluster, Grid, plan_search, tune
from clipless.app.tuning.release import _draw_tasks
from clipless.errors import InvalidArgument

MODELS = """
import os, signal
from pathlib import Path
from torch import nn

def dies_while_training(shape, classes):
    return Fragile(64, classes)

class Fragile(nn.Linear):
    calls = 0

    def forward(self, x):
        flag = Path(os.environ["FLAG"])
        self.calls += 1
        if "WORKER" in os.environ and self.calls > 6 and not flag.exists():
            flag.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x.flatten(1))

def always_dies(shape, classes):
    if "WORKER" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this process finds a module of models, and workers too."""
    found = tmp_path_factory.mktemp("models")
    (found / "fragile.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(found)
        patch.setenv("FLAG", str(found / "killed"))
        yield found


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[str]:
    """The address of a cluster whose workers are processes of their own, which a nanny starts again when they die. They
    are forked from one that has imported what they need. A run that has killed two is given up."""
    told = {"WORKER": "1", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "FLAG": str(folder / "killed")}
    get_context("forkserver").set_forkserver_preload(["distributed", "clipless.app.tuning.worker", "sklearn.datasets"])
    distributed.utils._forkserver_preload_set = True
    with (
        dask.config.set(
            {
                "distributed.scheduler.allowed-failures": 1,
                "distributed.worker.multiprocessing-method": "forkserver",
            }
        ),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            local_directory=str(folder / "dask"),
            env=told,
            silence_logs=50,
        ) as running,
    ):
        yield running.scheduler_address


def test_a_worker_killed_during_the_work_changes_nothing_but_the_time(
    folder: Path, cluster: str, tmp_path: Path
) -> None:
    shared = TrainingSettings(model="fragile:dies_while_training", epochs=1, batch_size=256)
    candidates = Grid({"lr": [0.01, 0.5]}).candidates(shared)
    search = plan_search(load("digits"), candidates, epsilon=8.0, method="papernot-steinke")
    seed = next(seed for seed in range(100) if len(_draw_tasks(search, seed, "digits")) == 4)
    undisturbed = tune(search, seed=seed)
    assert not (folder / "killed").exists()
    disturbed = tune(search, DaskCluster(cluster), source="digits", seed=seed, out=tmp_path / "out")
    assert (folder / "killed").read_text() != str(os.getpid())
    assert disturbed.chosen == undisturbed.chosen
    assert disturbed.result.scores == undisturbed.result.scores
    before, after = undisturbed.result.model.state_dict(), disturbed.result.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"ledger.jsonl", "model.pt", "run.json"}


def test_a_run_that_kills_every_worker_is_the_worst_and_the_others_go_on(cluster: str) -> None:
    shared = TrainingSettings(model="linear", epochs=1, batch_size=256)
    candidates = Grid({"model": ["fragile:always_dies", "linear"]}).candidates(shared)
    search = plan_search(load("digits"), candidates, epsilon=8.0, method="grid")
    tuned = tune(search, DaskCluster(cluster), source="digits", seed=1)
    assert tuned.scores is not None
    assert tuned.scores[0] == -math.inf
    assert tuned.chosen == 1


def test_no_scheduler_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipless.app.tuning.pools.CONNECT_SECONDS", 1)
    with pytest.raises(InvalidArgument, match="cannot reach a Dask scheduler at tcp://127.0.0.1:9"):
        DaskCluster("tcp://127.0.0.1:9")

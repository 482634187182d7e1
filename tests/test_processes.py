"""A run belongs to the processes that began it: forked children, copies, and ranks that do not know of each other are
refused, with real processes."""

import copy
import json
import multiprocessing
import os
import pickle
import signal
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset, default_collate

import clipless
from children import Child
from clipless import CliplessError, InvalidType, Misuse, Private
from clipless.app.data import load
from clipless.app.training import TrainingSettings
from clipless.app.tuning import plan_search
from clipless.app.tuning.worker import Task
from clipless.app.tuning.worker import run as run_task

FEATURES, CLASSES, SIZE = 4, 3, 40


def run(model: nn.Module | None = None, workers: int = 0, **changes: Any) -> tuple[nn.Module, Optimizer, Private]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SIZE, FEATURES, generator=generator), torch.arange(SIZE) % CLASSES)
    model = nn.Linear(FEATURES, CLASSES) if model is None else model
    optimizer = SGD(model.parameters(), lr=0.1)
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "steps": 5, "accountant": "gdp"} | changes
    loader = DataLoader(data, batch_size=10, num_workers=workers, collate_fn=collate if workers else None)
    return model, optimizer, clipless.make_private(model, optimizer, loader, **{"loss_reduction": "mean", **settings})


def collate(rows: list[Any]) -> Any:
    """A collate function of the user's, so that records go through the workers."""
    return default_collate(rows)


def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> list[float]:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    return next(model.parameters()).grad.flatten().tolist()  # type: ignore[union-attr]


def in_child(work: Callable[[], Any]) -> Any:
    """What the work gives in a forked child, or the refusal that it meets there."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, from Python 3.12 on
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            said = {"released": work()}
        except CliplessError as refused:
            said = {"refused": str(refused)}
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(text)


@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize("when", ["before the batch", "before the step"])
def test_noise_is_not_repeated_in_a_forked_child(noise: str, when: str) -> None:
    model, optimizer, private = run(noise=noise, seed=3 if noise == "seeded" else None)
    if when == "before the batch":
        said = in_child(lambda: step(model, optimizer, next(iter(private.loader))))
        batch = next(iter(private.loader))
    else:
        batch = next(iter(private.loader))
        said = in_child(lambda: step(model, optimizer, batch))
    mine = step(model, optimizer, batch)
    assert said.get("released") != mine
    assert said["refused"].startswith("this process was forked after make_private")
    assert said["refused"].endswith("call make_private in the process that trains.")
    assert private.ledger.steps == 1


def test_a_child_trains_what_it_made_private_itself() -> None:
    def train() -> list[float]:
        model, optimizer, private = run()
        return step(model, optimizer, next(iter(private.loader)))

    said = [in_child(train)["released"] for _ in range(2)]
    assert said[0] != said[1]


def refused_in(answers: Any, train: tuple[nn.Module, Optimizer, Private]) -> None:
    try:
        step(train[0], train[1], next(iter(train[2].loader)))
        answers.put("released")
    except CliplessError as refused:
        answers.put(str(refused))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_multiprocessing_by_fork_is_refused_as_well() -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=refused_in, args=(answers, run()))
    child.start()
    said = answers.get()
    child.join(60)
    assert "forked after make_private" in said


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "oldest pickle": lambda thing: pickle.dumps(thing, protocol=0),
    "in a list": lambda thing: copy.deepcopy([thing]),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_run_and_its_loader_are_neither_copied_nor_pickled(copied: Callable[[Any], Any]) -> None:
    model, optimizer, private = run()
    with pytest.raises(Misuse, match=r"cannot be copied or pickled.*same noise.*Copy the model.*make_private there"):
        copied(private)
    with pytest.raises(Misuse, match=r"cannot be copied or pickled.*same batches"):
        copied(private.loader)
    step(model, optimizer, next(iter(private.loader)))
    copy.deepcopy(optimizer).step()
    pickle.loads(pickle.dumps((model, optimizer.state_dict())))


def test_workers_of_a_dataloader_go_on_fetching() -> None:
    model, optimizer, private = run(workers=2, steps=4)
    for batch in private.loader:
        step(model, optimizer, batch)
    assert private.ledger.steps == 4


# Several processes that train together.

TOGETHER = r"{} in the environment says that {} processes train together.*init_process_group.*group=False"


@pytest.mark.parametrize("stated", ["2", "16"])
def test_an_environment_of_several_processes_is_refused(stated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", stated)
    with pytest.raises(Misuse, match=TOGETHER.format(f"WORLD_SIZE={stated}", stated)):
        run()
    model, optimizer, private = run(group=False)
    step(model, optimizer, next(iter(private.loader)))


def test_a_search_is_refused_beside_others_and_its_workers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a cluster may well be told of others: each run is one process's all the same."""
    data = load("digits")
    settings = TrainingSettings(epochs=1, batch_size=len(data.train), noise_multiplier=1.0, accountant="gdp", seed=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Misuse, match="2 processes train together.*unset WORLD_SIZE"):
        plan_search(data, [settings], epsilon=3.0, method="liu-talwar", accountant="rdp")
    assert not run_task(Task(0, 0, settings, data, len(data.train), 1)).failed


@pytest.mark.parametrize("stated", ["1", "0", "", "many"])
def test_an_environment_of_one_process_is_none(stated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", stated)
    run()


@pytest.mark.parametrize("group", [True, 0, "gloo"])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(
        InvalidType, match="group must be a process group of torch.distributed, None for the default one"
    ):
        run(group=group)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_process_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, optimizer, private = run()
    step(model, optimizer, next(iter(private.loader)))


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_process_trains_a_wrapped_model() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(FEATURES, CLASSES))
    _, optimizer, private = run(model)
    for batch in private.loader:
        step(model, optimizer, batch)
    assert private.plan.groups.members == (("weight", "bias"),)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_in_data_parallel_is_refused(inside: bool) -> None:
    wrapped = nn.DataParallel(nn.Linear(FEATURES, CLASSES))
    with pytest.raises(Misuse, match=r"wrapped in DataParallel.*the model inside \(model\.module\)"):
        run(nn.Sequential(wrapped) if inside else wrapped)
    run(wrapped.module)


RANK = """
import gc, glob, json, os, sys
import torch, torch.distributed as dist
from torch import nn
import clipless

def run(model=None, **settings):
    model = nn.Linear(4, 3) if model is None else model
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.TensorDataset(torch.ones(40, 4))
    settings |= dict(noise_multiplier=1.0, delta=1e-5, batch_size=10, steps=5, accountant="gdp", loss_reduction="sum")
    return model, optimizer, clipless.make_private(model, optimizer, data, **settings)

def step(model, optimizer, batch):
    model(*batch).sum().backward()
    optimizer.step()

def attempt(work):
    try:
        work()
        return "trained"
    except clipless.CliplessError as refused:
        return str(refused)

def train(made):
    model, optimizer, private = made
    step(model, optimizer, next(iter(private.loader)))

rank, world = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
said = {"environment": attempt(run), "alone": attempt(lambda: train(run(group=False)))}
del os.environ["WORLD_SIZE"]
between, later = run(), run()
batch = next(iter(between[2].loader))
os.environ["WORLD_SIZE"] = world
dist.init_process_group("gloo")
said["step"] = attempt(lambda: step(between[0], between[1], batch))
said["batch"] = attempt(lambda: train(later))
torch.manual_seed(0)
kept = run()
said["group"] = attempt(lambda: train(kept))
wrapped = run(nn.parallel.DistributedDataParallel(nn.Linear(4, 3)))
said["wrapped"] = attempt(lambda: train(wrapped))
wrapped[2].detach()
said["one rank"] = attempt(lambda: train(run(group=False))) if rank == 0 else "trained"
said["steps"] = between[2].ledger.steps + later[2].ledger.steps
dist.barrier()
del wrapped  # a wrapper keeps its group
gc.collect()
dist.destroy_process_group()
# A thread that is at work while the interpreter exits can take the process down: none may be left, though `kept` is there.
tasks = glob.glob("/proc/self/task/*/comm")
said["threads"] = [name for name in map(lambda file: open(file).read().strip(), tasks) if "gloo" in name]
said["afterwards"] = attempt(lambda: train(kept))
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(said, file)
"""


def test_two_ranks_train_together_or_are_refused(tmp_path: Path) -> None:
    """Each has the environment that torchrun gives."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        Child(script, tmp_path, cwd=tmp_path, notes=tmp_path, environment=told | {"RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.done().returncode for rank in ranks] == [0, 0], "\n".join(rank.done().stderr for rank in ranks)
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "WORLD_SIZE=2 in the environment says that 2 processes train together" in said["environment"]
        for when in ("step", "batch"):
            assert "torch.distributed says that 2 processes train together" in said[when]
        assert said["alone"] == said["one rank"] == said["group"] == said["wrapped"] == "trained"
        assert said["steps"] == 0
        assert said["threads"] == []
        assert "process group was destroyed" in said["afterwards"]

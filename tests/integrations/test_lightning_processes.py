"""Two processes by Lightning's DDP strategy train one run."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from lightning_runs import Classifier, by_hand

HERE = Path(__file__).parent


def world(folder: Path, *arguments: str) -> list[Any]:
    """What two ranks leave."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    started = []
    for rank in range(2):
        told = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCHELASTIC_RUN_ID": "test",
            "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        }  # fmt: skip
        command = [sys.executable, str(HERE / "lightning_rank.py"), str(folder), *arguments]
        with open(folder / f"{rank}.txt", "w") as output:
            started.append(subprocess.Popen(command, env=os.environ | told, stdout=output, stderr=subprocess.STDOUT))
    try:
        for process in started:
            process.wait(timeout=240)
    finally:
        for process in started:
            process.kill()
            process.wait()
    texts = [(folder / f"{rank}.txt").read_text()[-3000:] for rank in range(2)]
    assert all(process.returncode == 0 for process in started), "\n\n".join(texts)
    return [torch.load(folder / f"{arguments[0]}.{rank}.pt") for rank in range(2)]


def same(one: Any, other: Any) -> bool:
    equal = all(torch.equal(one["weights"][name], value) for name, value in other["weights"].items())
    return equal and one["ledger"] == other["ledger"]


def test_two_processes_train_one_run_and_resume_it(tmp_path: Path) -> None:
    """Both ranks have the weights and the ledger of a loop of one's own in one process; and so have those of a run that is
    resumed from a checkpoint of it."""
    trained = world(tmp_path, "whole")
    assert same(trained[0], trained[1])
    torch.manual_seed(1)
    expected, private = by_hand(6, Classifier(dropout=0.0), parts=2)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(trained[0]["weights"][name], value, rtol=0.0, atol=1e-5)
    assert trained[0]["ledger"] == private.ledger.to_dict()
    resumed = world(tmp_path, "resumed", "step=4.ckpt")
    assert same(resumed[0], trained[0])
    assert same(resumed[1], trained[0])

"""`clipless train` in the ranks of torchrun: the first alone prints and writes; all are killed, and resumed. That torchrun
itself starts them so is seen in tests/integrations."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from children import Child, rank_environments
from clipless import read_ledger
from clipless.app.data import load
from clipless.app.training import TrainingSettings, train

TRAIN = ["clipless", "train", "--model", "slow_ranks:make", "--epochs", "6", "--seed", "3", "--accountant", "gdp"]
# So slow, while there is a file "slow", that the ranks are still at work when they are killed, however long that takes.
MODEL = """
import os, time
from torch import nn

class Slow(nn.Flatten):
    def forward(self, x):
        time.sleep(0.1 * os.path.exists("slow"))
        return super().forward(x)

def make(shape, classes):
    return nn.Sequential(Slow(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))
"""


def ranks(out: Path, *options: str) -> list[Child]:
    """Two ranks with the environment that torchrun gives, so that each of them can be killed."""
    return [
        Child(*TRAIN, "--out", out, *options, cwd=out.parent, notes=out.parent, environment=environment)
        for environment in rank_environments(2)
    ]


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_run_whose_ranks_were_all_killed_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_ranks.py").write_text(MODEL)
    (tmp_path / "slow").touch()
    out, started = tmp_path / "run", ranks(tmp_path / "run")
    try:
        deadline = time.monotonic() + 120
        while lines(out / "ledger.jsonl") < 15 and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        for process in started:
            process.kill()
    assert [process.wait() for process in started] == [-9, -9]
    recorded = read_ledger(out / "ledger.jsonl", torn=True).recorded().steps
    assert 14 <= recorded < 36
    (tmp_path / "slow").unlink()
    first, second = (process.done(200) for process in ranks(out, "--resume", "--json"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr[-4000:] + second.stderr[-4000:]
    assert second.stdout == ""
    said: dict[str, Any] = json.loads(first.stdout)
    monkeypatch.syspath_prepend(tmp_path)
    settings = TrainingSettings(model="slow_ranks:make", epochs=6, seed=3, accountant="gdp")
    alone = train(load("digits"), settings)
    assert said["metrics"]["steps"] == alone.steps == read_ledger(out / "ledger.jsonl").recorded().steps
    assert said["metrics"]["epsilon"] == alone.epsilon
    for name, tensor in torch.load(out / "model.pt").items():
        assert torch.allclose(tensor, alone.model.state_dict()[name], atol=1e-2), name
    assert sorted(path.name for path in out.iterdir()) == ["config.toml", "ledger.jsonl", "model.pt", "run.json"]

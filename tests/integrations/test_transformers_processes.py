"""PrivateTrainer under torchrun: two processes train the run of one."""

import os
import subprocess
import sys
from pathlib import Path

import hf_problems as hf
import hf_rank
import torch

import clipless

HERE = Path(__file__).parent


def test_two_processes_train_the_run_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    (tmp_path / "two").mkdir()
    done = subprocess.run(
        [*command, str(HERE / "hf_rank.py"), str(tmp_path / "two")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (torch.load(tmp_path / "two" / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])

    alone = hf_rank.made(tmp_path / "one", per_device=4)
    alone.train()
    assert alone.private is not None
    assert first["ledger"] == second["ledger"] == alone.private.ledger.to_dict()
    for name, value in alone.model.state_dict().items():
        assert torch.allclose(first["weights"][name], value, atol=1e-5), name
    predicted = torch.as_tensor(alone.predict(hf.texts(6)).predictions)
    assert torch.allclose(first["predicted"], predicted, atol=1e-4)
    assert clipless.read_ledger(tmp_path / "two" / "run" / "ledger.jsonl").ledger().steps == 4

"""The example of several processes, started by torchrun itself; tests/examples runs it with torchrun's environment."""

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "torchrun.py"


def test_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    script = [str(SCRIPT), "--epochs", "1"]
    done = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"[\d.]+% of 360 test digits\nSpent\(epsilon=[23]\.\d+.*steps=6", done.stdout)
    assert done.stdout.count("Spent(") == 1

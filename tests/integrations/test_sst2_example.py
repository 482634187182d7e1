"""The SST-2 example runs on made-up data, and says what to give it otherwise."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "sst2_lora.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CLIPLESS_DATA"} | {
        "OMP_NUM_THREADS": "1"
    }
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def test_it_trains_and_saves(tmp_path: Path) -> None:
    done = run("--tiny", "--epochs", "1", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "dev accuracy" in done.stdout
    assert "Spent(epsilon=" in done.stdout
    assert (tmp_path / "out" / "ledger.jsonl").is_file()
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()


def test_it_says_what_is_missing() -> None:
    done = run()
    assert done.returncode == 2
    assert "--data-dir" in done.stderr

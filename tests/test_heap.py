"""Freed memory goes back to the operating system around a block, and stays in the process between steps; nothing happens
where neither can."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from clipless import heap


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1])


def test_what_was_freed_is_returned() -> None:
    try:
        assert ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        pytest.skip("this C library has no malloc_trim")
    blocks = [torch.ones(4000) for _ in range(4000)]  # below the size that is mapped by itself
    kept = blocks[::100]  # holes between what is kept
    del blocks
    before = _resident()
    with heap.freed_memory_returned():
        inside = _resident()
    assert (before - inside) * 4096 > 30e6  # 64 MB were freed
    assert len(kept) == 40


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    heap._trim.cache_clear()
    with heap.freed_memory_returned():
        pass
    heap._trim.cache_clear()


STEPS = """
import resource
import torch
from torch import nn
import clipless

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(512, 12, 64))
private = clipless.make_private(model, optimizer, data, noise_multiplier=1.0, batch_size=512, steps=14)
for (x,) in private.loader:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    private.backward(model(x).square().mean((1, 2)))
    optimizer.step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    """The least number of pages that the operating system had to bring in one of the last steps of a run."""
    others = {name: value for name, value in os.environ.items() if name not in heap.VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, env=others | environment
    )
    return min(map(int, done.stdout.splitlines()[-5:]))


def test_a_step_finds_the_memory_that_the_last_one_freed() -> None:
    """By default; not where the user has chosen: an empty variable leaves glibc as it is."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("this C library has no mallopt")
    chosen = faults(MALLOC_TRIM_THRESHOLD_="131072"), faults(GLIBC_TUNABLES="")
    assert min(chosen) > 10_000
    assert faults() < 0.1 * min(chosen)

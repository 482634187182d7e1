"""Freed memory goes back to the operating system around a block, and nothing happens where it cannot."""

import ctypes

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

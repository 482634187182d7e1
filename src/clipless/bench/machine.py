"""Facts about the machine that a measurement depends on. Neither its name nor any path is among them."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from clipless.noise.adding import compiled


def facts() -> dict[str, Any]:
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("clipless", "torch", "opacus")},
        "compiled_noise": compiled() is not None,
        "allocator": {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")},
        "torch_backend": {"mkl": torch.backends.mkl.is_available(), "mkldnn": torch.backends.mkldnn.is_available()},
    }


def cpu() -> str:
    """The name of the processor, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_average() -> float | None:
    """Processes that wanted to run, on average over the last minute; a quiet machine that measures shows its threads."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

"""Facts about the machine that a measurement depends on. Neither its name nor any path is among them."""

import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from clipless.noise.adding import compiled
from clipless.processor import cpuinfo, processor_of

# From the flags that Linux reports to the names of what the fastest kernels are written for, narrow to wide.
EXTENSIONS = {
    "asimd": "NEON",
    "sve": "SVE",
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
}
# Those that tell machines apart, the widest last.
CLASSES = ("NEON", "SVE", "AVX2", "AVX-512", "AMX")
# What keeps libraries from using the widest.
LIMITS = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def facts() -> dict[str, Any]:
    return {
        "cpu": cpu(),
        "cpu_model": cpu_model(cpuinfo()),
        "vector_extensions": vector_extensions(cpuinfo()),
        "vector_limits": {name: os.environ[name] for name in LIMITS if name in os.environ},
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("clipless", "torch", "opacus")},
        "compiled_noise": compiled() is not None,
        "allocator": {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")},
        "torch_backend": {"mkl": torch.backends.mkl.is_available(), "mkldnn": torch.backends.mkldnn.is_available()},
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
    }


def described(machine: Mapping[str, Any]) -> str:
    """The processor, the widest of its vector extensions, and the cores used. Older results lack model and extensions.

    >>> described({"cpu": "Some CPU", "vector_extensions": ["AVX2", "AVX-512"], "usable_cores": 2})
    'Some CPU, AVX-512, 2 cores'
    >>> described({"cpu": "AMD EPYC", "cpu_model": "family 26 model 2", "usable_cores": 1})
    'AMD EPYC (family 26 model 2), 1 core'
    """
    model = machine.get("cpu_model")
    return ", ".join([f"{machine['cpu']} ({model})" if model else machine["cpu"], *widest(machine), _cores(machine)])


def slug(machine: Mapping[str, Any]) -> str:
    """A name for the folder of a machine's results.

    >>> slug({"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "vector_extensions": ["AVX2"], "usable_cores": 2})
    'intel-xeon-avx2-2-cores'
    """
    name = re.sub(r"\((?:R|TM)\)|\b(?:CPU|Processor)\b|@.*", " ", machine["cpu"], flags=re.I)
    words = [name, machine.get("cpu_model") or "", *widest(machine), _cores(machine)]
    return "-".join(re.findall(r"[a-z0-9]+", " ".join(words).lower()))


def _cores(machine: Mapping[str, Any]) -> str:
    """
    >>> _cores({"usable_cores": 1}), _cores({"usable_cores": 2})
    ('1 core', '2 cores')
    """
    number = machine["usable_cores"]
    return f"{number} core" if number == 1 else f"{number} cores"


def widest(machine: Mapping[str, Any]) -> list[str]:
    """The widest vector extension, none if it was not recorded."""
    found = machine.get("vector_extensions") or []
    return [name for name in CLASSES if name in found][-1:]


def vector_extensions(report: str) -> list[str]:
    """
    >>> vector_extensions("model name : x\\nflags : fpu avx2 avx512f amx_tile\\n")
    ['AVX2', 'AVX-512', 'AMX']
    """
    lines = (line.partition(":") for line in report.splitlines())
    flags = next((value.split() for name, _, value in lines if name.strip() in ("flags", "Features")), [])
    return [name for flag, name in EXTENSIONS.items() if flag in flags]


def cpu() -> str:
    """The name of the processor, as reported by the system."""
    names = [line.partition(":")[2].strip() for line in cpuinfo().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_model(report: str) -> str | None:
    """Which processor of the maker's it is, where the system reports it: virtual machines give all of them one name.

    >>> cpu_model("vendor_id : AuthenticAMD\\ncpu family : 26\\nmodel : 2\\n")
    'family 26 model 2'
    """
    found = processor_of(report)
    return None if found is None else f"family {found.family} model {found.model}"


def load_average() -> float | None:
    """The load average of the last minute; on a quiet machine, the number of threads that measure."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

"""One thread per test process, so that two run side by side, no hypothesis deadline, as machines are shared, no
instructions that the machine does not have, and random numbers that are the same whenever a test runs.

On some virtual machines torch takes the processor for one with matrix units, and dies in bfloat16 products with an illegal
instruction. A child process tries one, and if it dies oneDNN is told to do without, before it is used here.
"""

import gc
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

PROBED = "CLIPLESS_TESTS_BFLOAT16"
LIMIT = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def dies(program: str) -> bool:
    """Whether a child process that runs this program is ended by a signal."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode < 0


def probe(environment: MutableMapping[str, str], dies: Callable[[str], bool] = dies) -> None:
    """Find out, unless it is known or the user has chosen; processes started from here inherit the answer."""
    if LIMIT[0] not in environment and PROBED not in environment:
        environment[PROBED] = "dies" if dies(PRODUCT) else "works"
        if environment[PROBED] == "dies":
            environment.update([LIMIT])


def header(environment: Mapping[str, str]) -> str | None:
    if environment.get(PROBED) != "dies":
        return None
    return f"torch dies in bfloat16 products on this machine: tests run with {'='.join(LIMIT)}"


probe(os.environ)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("clipless", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("clipless")


def pytest_report_header() -> str | None:
    return header(os.environ)


def seed_all(*place: str) -> None:
    """Set the generators that a test reads when it gives none, by its place alone: by whatever selection and in whatever
    order tests run, each draws the same numbers. Keys of the operating system, and so secure noise, are not touched."""
    seed = int.from_bytes(hashlib.sha256("\n".join(place).encode()).digest()[:4])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """For what a file of tests draws when it is imported."""
    seed_all(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> None:
    """A fixture that several tests share draws the same whichever of them comes first."""
    seed_all(request.node.nodeid, fixturedef.argname, str(request.param_index))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seed_all(item.nodeid)


# The files that take longest, the longest first: `make test` gives whole files to two processes, which thus end at about the
# same time. A file that is split would set up its worlds of processes twice.
LONGEST = (
    "tests/distributed/test_sharded.py",
    "tests/auditing/test_two_processes.py",
    "tests/gradients/test_model_families.py",
    "tests/accounting/test_accountants.py",
    "tests/app/test_bench.py",
    "tests/distributed/test_data_parallel.py",
    "tests/auditing/test_gauss.py",
    "tests/gradients/test_model_zoo.py",
    "tests/runs/test_resume.py",
    "tests/gradients/projections/test_projection_engine.py",
    "tests/gradients/test_costs.py",
    "tests/accounting/test_calibrate.py",
    "tests/app/test_run_files.py",
    "tests/gradients/recurrent/test_recurrent.py",
    "tests/auditing/test_step_game.py",
    "tests/app/test_cli_tune.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parents[1]
    place = {root / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: it is not looked through for garbage again and again."""
    gc.collect()
    gc.freeze()

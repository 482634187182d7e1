"""What the tests find out about the machine that they run on, what they draw, and how long they may take."""

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import conftest
from clipless.noise import noise_source
from sabotages import MOST_SECONDS


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


AT_IMPORT = drawn()
ISA = conftest.LIMIT[0]
LIMITED = {conftest.PROBED: "dies", ISA: "AVX512_CORE_BF16"}
SAYS = "torch dies in bfloat16 products on this machine: tests run with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"


@pytest.mark.parametrize(
    ("dies", "given", "found", "children", "says"),
    [
        (True, {}, LIMITED, 1, SAYS),
        (False, {}, {conftest.PROBED: "works"}, 1, None),
        (True, {ISA: "AVX2"}, {ISA: "AVX2"}, 0, None),
        (True, {conftest.PROBED: "works"}, {conftest.PROBED: "works"}, 0, None),
        (True, LIMITED, LIMITED, 0, SAYS),
    ],
    ids=["dies", "works", "set by the user", "worker", "limited worker"],
)
def test_one_child_tells_whether_bfloat16_products_work(
    dies: bool, given: dict[str, str], found: dict[str, str], children: int, says: str | None
) -> None:
    environment, asked = dict(given), []
    conftest.probe(environment, lambda program: asked.append(program) is None and dies)
    assert environment == found
    assert asked == [conftest.PRODUCT] * children
    assert conftest.header(environment) == says


def test_a_child_that_is_ended_by_a_signal_dies() -> None:
    assert conftest.dies("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not conftest.dies("raise SystemExit(3)")


def test_the_longest_files_exist_and_come_first() -> None:
    root = Path(conftest.__file__).parents[1]
    assert all((root / name).is_file() for name in conftest.LONGEST)
    items = [SimpleNamespace(path=root / name) for name in ("test_one.py", conftest.LONGEST[1], conftest.LONGEST[0])]
    conftest.pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert [item.path.name for item in items] == [
        *(Path(name).name for name in conftest.LONGEST[:2]),
        "test_one.py",
    ]


# Random numbers.


@pytest.fixture(scope="module", params=["one", "other"])
def shared(request: pytest.FixtureRequest) -> tuple[float, float, float]:
    return drawn()


@pytest.mark.parametrize("case", [0, 1])
def test_a_test_draws_what_its_place_says(shared: Any, case: int, request: pytest.FixtureRequest) -> None:
    """The file, each fixture and each case have numbers of their own, whatever ran before."""
    own = drawn()
    places: list[tuple[str, ...]] = [(f"tests/{Path(__file__).name}",), (request.node.nodeid,)]
    places.append((f"tests/{Path(__file__).name}", "shared", str(request.node.callspec.indices["shared"])))
    for place, found in zip(places, (AT_IMPORT, own, shared), strict=True):
        conftest.seed_all(*place)
        assert found == drawn()
    assert len({AT_IMPORT, own, shared}) == 3


def test_secure_noise_has_no_seed_here_either() -> None:
    found = []
    for _ in range(2):
        conftest.seed_all("the same")
        found.append(noise_source().release("gradient", 0, [torch.zeros(9)], [1.0])[0])
    assert not torch.equal(*found)


# Time.

HANGS = """
import ctypes

def test_in_python():
    while True:
        pass

def test_that_ends():
    pass

def test_in_c():
    mutex, c = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)
"""


def test_every_test_has_a_time_limit(request: pytest.FixtureRequest) -> None:
    limit, end = (float(request.config.getini(name)) for name in ("timeout", "faulthandler_timeout"))
    assert 0 < limit < end < MOST_SECONDS
    assert request.config.getini("faulthandler_exit_on_timeout")


def test_a_test_that_hangs_fails_and_the_next_one_runs(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With the settings of this repository, but for the seconds. Where Python does not get to run, its process ends."""
    (tmp_path / "test_hangs.py").write_text(HANGS)
    settings = [
        "-c",
        str(request.config.rootpath / "pyproject.toml"),
        "-o",
        "timeout=1",
        "-o",
        "faulthandler_timeout=4",
    ]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", *settings]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_TIMEOUT"}
    run = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    assert run.returncode == 1
    assert "test_in_python FAILED" in run.stdout
    assert "test_that_ends PASSED" in run.stdout
    assert run.stdout.rstrip().endswith("::test_in_c")
    assert "Timeout (0:00:04)!" in run.stderr
    assert "in test_in_c" in run.stderr

"""What the tests find out about the machine that they run on."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import conftest

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

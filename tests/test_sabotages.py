"""The list of sabotages keeps up with the source: each of them can still be applied, and its tests are there.

`make sabotage` applies them all; here it is one, to see that a change is told from none.
"""

import re
from collections import Counter

import pytest

from sabotage_lists import SABOTAGES
from sabotage_lists.one import Sabotage
from sabotages import ROOT, SOURCES, main, occurrences, outcome

QUICK = "tests/sampling/test_poisson.py::test_a_rate_of_one_takes_every_record"


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.name)
def test_its_text_occurs_once_and_its_tests_exist(sabotage: Sabotage) -> None:
    assert occurrences(sabotage) == 1
    assert sabotage.new != sabotage.old
    assert sabotage.tests
    for test in sabotage.tests:
        file, _, name = test.partition("::")
        content = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(
            rf"^(    )?def {re.escape(name.partition('[')[0].split('::')[-1])}\(", content, re.M
        )


def test_no_two_have_the_same_name_or_are_the_same() -> None:
    assert max(Counter(sabotage.name for sabotage in SABOTAGES).values()) == 1
    assert max(Counter((sabotage.file, sabotage.old, sabotage.new) for sabotage in SABOTAGES).values()) == 1


def test_a_change_that_matters_is_caught_and_one_that_does_not_survives() -> None:
    text = "    if rate >= 1:\n        return torch.arange(size)\n"
    harmful = Sabotage("", "sampling/poisson.py", text, "    if rate >= 1:\n        return torch.arange(1)\n", (QUICK,))
    harmless = Sabotage("", "sampling/poisson.py", text, text + "\n", (QUICK,))
    before = (SOURCES / "sampling/poisson.py").read_bytes()
    assert [outcome(harmful), outcome(harmless)] == ["caught", "SURVIVED"]
    assert (SOURCES / "sampling/poisson.py").read_bytes() == before


def test_what_cannot_be_applied_or_tested_is_told_apart() -> None:
    missing = Sabotage("", "sampling/poisson.py", "no such text", "", (QUICK,))
    assert outcome(missing).startswith("NOT APPLIED: its text occurs 0 times")
    with pytest.raises(SystemExit, match="no such sabotage: nothing"):
        main(["nothing"], jobs=1)

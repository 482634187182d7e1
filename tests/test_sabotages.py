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


def test_every_text_occurs_once_and_every_test_exists() -> None:
    for sabotage in SABOTAGES:
        assert occurrences(sabotage) == 1, sabotage.name
        assert sabotage.new != sabotage.old, sabotage.name
        assert sabotage.tests, sabotage.name
    for test in {test for sabotage in SABOTAGES for test in sabotage.tests}:
        file, _, name = test.partition("::")
        content = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(
            rf"^(    )?def {re.escape(name.partition('[')[0].split('::')[-1])}\(", content, re.M
        )


def test_no_two_have_the_same_name_or_are_the_same() -> None:
    assert max(Counter(sabotage.name for sabotage in SABOTAGES).values()) == 1
    assert max(Counter((sabotage.file, sabotage.old, sabotage.new) for sabotage in SABOTAGES).values()) == 1


def test_a_change_that_matters_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantile-sign"], jobs=1) == 0
    assert capsys.readouterr().out.startswith("caught    quantile-sign")


def test_a_change_that_does_not_matter_survives_and_the_source_is_left_alone() -> None:
    text = "    if rate >= 1:\n"
    before = (SOURCES / "sampling/poisson.py").read_bytes()
    assert outcome(Sabotage("", "sampling/poisson.py", text, text + "\n", (QUICK,))) == "SURVIVED"
    assert (SOURCES / "sampling/poisson.py").read_bytes() == before


def test_what_cannot_be_applied_or_tested_is_told_apart() -> None:
    missing = Sabotage("", "sampling/poisson.py", "no such text", "", (QUICK,))
    assert outcome(missing).startswith("NOT APPLIED: its text occurs 0 times")
    with pytest.raises(SystemExit, match="no such sabotage: nothing"):
        main(["nothing"], jobs=1)

"""Ranks that do not do the same end, and say where they stood: nothing waits for them for ever."""

from pathlib import Path

import pytest
from worlds import world


def test_a_rank_that_waits_for_another_has_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0, -3(.|\n)*in make_private(.|\n)*rank 1, -3(.|\n)*in one_waits"):
        world("one_waits", 2, tmp_path, seconds=15)


def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0, -?[13]:(.|\n)*rank 1, 1:(.|\n)*ValueError: not this one"):
        world("one_fails", 2, tmp_path, seconds=250)

"""Buffers that are used again: never by two at once, and never more of them than is allowed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clipless.gradients.forms import scratch

SMALL, LARGE = 10, scratch.LARGE // 4


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    scratch.forget()
    yield
    scratch.forget()
    assert scratch._BUFFERS == []


def kept() -> int:
    return sum(buffer.nbytes for buffer in scratch._BUFFERS)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.sampled_from([torch.float32, torch.float64])), max_size=30)
)
def test_who_holds_a_buffer_has_it_alone(requests: list[tuple[int, bool, torch.dtype]]) -> None:
    """Some let go of theirs at once, some of a view only, some keep it: what they wrote stays."""
    held: list[tuple[Tensor, int]] = []
    for number, (size, keep, dtype) in enumerate(requests):
        mine = scratch.empty((size, LARGE // 2), torch.zeros((), dtype=dtype))
        assert (mine.shape, mine.dtype) == ((size, LARGE // 2), dtype)
        assert mine.is_contiguous()
        mine.fill_(number)
        if keep:
            held.append((mine[-1] if number % 2 else mine, number))
        assert all(bool((values == wrote).all()) for values, wrote in held)
        assert kept() <= scratch.KEPT
    held.clear()


def test_a_freed_buffer_is_used_again_for_about_its_size_and_a_small_one_is_never_kept() -> None:
    like = torch.zeros(())
    place = scratch.empty((3 * LARGE,), like).data_ptr()
    assert scratch.empty((2 * LARGE,), like).data_ptr() == place
    assert scratch.empty((LARGE,), like).data_ptr() != place
    before = kept()
    scratch.empty((SMALL,), like)
    assert kept() == before


def test_no_more_is_kept_than_allowed_and_the_unused_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "KEPT", 16 * LARGE)
    like = torch.zeros(())
    used = scratch.empty((2 * LARGE,), like).fill_(1)
    scratch.empty((LARGE,), like)
    assert kept() == 12 * LARGE
    more = scratch.empty((2 * LARGE,), like)
    assert kept() == 16 * LARGE, "the unused one had to go"
    beyond = scratch.empty((3 * LARGE,), like).fill_(2)
    assert kept() == 16 * LARGE, "used, and not kept"
    assert bool((used == 1).all())
    assert len({used.data_ptr(), more.data_ptr(), beyond.data_ptr()}) == 3


def test_threads_do_not_get_the_same_buffer() -> None:
    like = torch.zeros(())

    def work(number: int) -> bool:
        for _ in range(50):
            mine = scratch.empty((LARGE + number,), like).fill_(number)
            if not bool((mine == number).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))

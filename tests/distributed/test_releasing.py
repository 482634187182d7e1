"""What ranks tell each other of a release, before it is recorded."""

import pytest

from clipless import RankFailed
from clipless.distributed import one_digest

# Of two ranks: the digest of what each releases, and of what must be the same even if a model is sharded.
SAME, OTHER_PART, OTHER_SHARED = ["a1 s1", "a1 s1"], ["a1 s1", "a2 s1"], ["a1 s1", "a1 s2"]


@pytest.mark.parametrize("told", [OTHER_PART, OTHER_SHARED])
def test_without_shards_both_digests_must_be_the_same(told: list[str]) -> None:
    assert one_digest("step 1", SAME, sharded=False) == "a1"
    with pytest.raises(RankFailed, match="the ranks do not have the same at step 1"):
        one_digest("step 1", told, sharded=False)


def test_of_shards_each_has_its_own_and_all_of_them_are_in_the_digest() -> None:
    whole = one_digest("step 1", OTHER_PART, sharded=True)
    assert whole not in (one_digest("step 1", ["a1 s1", "a3 s1"], sharded=True), "a1", "a2")
    with pytest.raises(RankFailed, match="the ranks do not have the same at step 1"):
        one_digest("step 1", OTHER_SHARED, sharded=True)

"""Layer rules, and operations on parameters outside of them."""

from sabotage_lists.one import Sabotage

CONV, EMBEDDING, TRACED = "gradients/layers/conv.py", "gradients/layers/embedding.py", "gradients/capture/traced.py"
KERNELS, ROOTS = "tests/gradients/test_kernels.py", "tests/gradients/capture/test_roots.py"
BAGS = "tests/gradients/layers/test_rules.py::test_bags_by_offsets_are_told_apart"

SABOTAGES = (
    Sabotage(
        "patches-padded-in-other-dimensions",
        CONV,
        "for pad in reversed(self.padding) for",
        "for pad in self.padding for",
        (f"{KERNELS}::test_every_way_gives_the_same_norms_and_sum",),
    ),
    Sabotage(
        "same-padding-of-other-dimensions",
        CONV,
        "zip(reversed(how.dilation), reversed(how.kernel_size), strict",
        "zip(how.dilation, how.kernel_size, strict",
        (f"{ROOTS}::test_agrees_with_single_records",),
    ),
    Sabotage(
        "same-padding-on-the-other-side",
        CONV,
        "(all_ // 2, all_ - all_ // 2)",
        "(all_ - all_ // 2, all_ // 2)",
        (f"{ROOTS}::test_agrees_with_single_records",),
    ),
    Sabotage(
        "mean-of-a-bag-with-its-padding",
        EMBEDDING,
        """addends = addends / inside.sum(1).clamp(min=1).view(-1, 1, 1)
    weights = given.get("per_sample_weights")
    if weights is not None:
        addends = addends * weights[where]""",
        """addends = addends / lengths.clamp(min=1).view(-1, 1, 1)
    weights = given.get("per_sample_weights")
    if weights is not None:
        addends = addends * weights[where]""",
        (BAGS,),
    ),
    Sabotage(
        "few-counts-are-of-the-first-dimensions",
        TRACED,
        "    counts = [1] * (tensor.dim() - len(counts)) + counts\n",
        "    counts = counts + [1] * (tensor.dim() - len(counts))\n",
        (f"{ROOTS}::test_a_table_repeated_for_every_record",),
    ),
)

"""Matrix products by either library, and what goes into them."""

from sabotage_lists.one import Sabotage

PRODUCTS, TESTS = "gradients/matrix_products.py", "tests/gradients/test_matrix_products.py"
WEIGHTED = f"{TESTS}::test_a_weighted_sum_of_outer_products"

SABOTAGES = (
    Sabotage(
        "weights-of-turned-rows-lost",
        PRODUCTS,
        "weights.expand(p, q).flatten()",
        "weights.new_ones(p * q)",
        (WEIGHTED,),
    ),
    Sabotage(
        "weights-of-columns-lost",
        PRODUCTS,
        "torch.mul(rows.permute(2, 0, 1), weights, out=made)",
        "made.copy_(rows.permute(2, 0, 1))",
        (WEIGHTED,),
    ),
    Sabotage(
        "weights-in-another-order-than-positions",
        PRODUCTS,
        "acts.transpose(0, 1), weights.mT",
        "acts.transpose(0, 1), weights",
        (WEIGHTED,),
    ),
    Sabotage(
        "weighted-sums-forget-what-was-there",
        PRODUCTS,
        "_ = total.add_(made) if beta else total.copy_(made)",
        "_ = total.copy_(made)",
        (WEIGHTED,),
    ),
    Sabotage(
        "sums-of-the-first-factor-alone",
        PRODUCTS,
        "return total.add_(made) if beta else total.copy_(made)",
        "return total.copy_(made)",
        (f"{TESTS}::test_a_product",),
    ),
    Sabotage(
        "turned-products-stay-turned",
        PRODUCTS,
        "return linear(across, left, None).mT",
        "return linear(across, left, None)",
        (f"{TESTS}::test_a_product",),
    ),
    Sabotage(
        "gates-without-what-is-apart",
        "native/lstm.c",
        "for (int64_t k = 0; more && k < 4 * width; k++)",
        "for (int64_t k = 0; 0 && k < 4 * width; k++)",
        ("tests/native/test_build.py::test_every_source_is_checked_before_it_is_used",),
    ),
    Sabotage(
        "lengths-of-convolutions-without-groups",
        "native/conv.c",
        "squared_length(made, s->groups * weights",
        "squared_length(made, weights",
        ("tests/native/test_build.py::test_every_source_is_checked_before_it_is_used",),
    ),
    Sabotage(
        "last-positions-of-convolutions-alone",
        "native/conv.c",
        "*sum = top || x ? *sum + sums[row][place] : sums[row][place];",
        "*sum = sums[row][place];",
        ("tests/native/test_build.py::test_every_source_is_checked_before_it_is_used",),
    ),
    Sabotage(
        "both-sides-of-gram-matrices-once",
        "native/gram.c",
        "ahead >= ROWS ? 2",
        "ahead >= ROWS ? 1",
        ("tests/native/test_build.py::test_every_source_is_checked_before_it_is_used",),
    ),
    Sabotage(
        "wide-tiles-skip-terms",
        "native/conv.c",
        "k + WIDE * LANES <= columns; k += WIDE * LANES)",
        "k + WIDE * LANES <= columns; k += 2 * WIDE * LANES)",
        ("tests/native/test_build.py::test_every_source_is_checked_before_it_is_used",),
    ),
)

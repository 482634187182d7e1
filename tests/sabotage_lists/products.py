"""Matrix products by either library, and what goes into them."""

from sabotage_lists.one import Sabotage

PRODUCTS, TESTS = "gradients/recurrent/matrix_products.py", "tests/gradients/recurrent/test_matrix_products.py"
WEIGHTED = "tests/native/test_products.py::test_a_weighted_sum_of_outer_products"

SABOTAGES = (
    Sabotage(
        "weights-in-another-order-than-positions",
        "gradients/forms/dense.py",
        "acts.transpose(0, 1), weights.mT",
        "acts.transpose(0, 1), weights",
        (WEIGHTED,),
    ),
    Sabotage(
        "weighted-sums-forget-what-was-there",
        "native/rows.c",
        "!run && !sum->keeps",
        "!run",
        ("tests/native/test_build.py::test_every_source_is_checked_before_it_is_used",),
    ),
    Sabotage(
        "sums-that-do-not-fit-forget-their-scale",
        "native/rows.py",
        "                products_by_torch([each], scale)",
        "                products_by_torch([each], 1.0)",
        ("tests/native/test_products.py::test_one_sum_that_does_not_fit_leaves_the_others_compiled",),
    ),
    Sabotage(
        "lengths-of-what-is-written-out-of-another-record",
        "native/rows.c",
        "lengths_of(one.total, outputs * width",
        "lengths_of(made, outputs * width",
        ("tests/native/test_build.py::test_every_source_is_checked_before_it_is_used",),
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
        "lengths-of-convolutions-without-groups",
        "native/conv.c",
        "squared_length(made, s->groups * weights",
        "squared_length(made, weights",
        ("tests/native/test_build.py::test_every_source_is_checked_before_it_is_used",),
    ),
    Sabotage(
        "last-positions-of-convolutions-alone",
        "native/conv.c",
        "int first = !top && !x;",
        "int first = 1;",
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
        "k < columns; k += PANEL)",
        "k < columns; k += 2 * PANEL)",
        ("tests/native/test_build.py::test_every_source_is_checked_before_it_is_used",),
    ),
    Sabotage(
        "narrow-tiles-skip-rows",
        "native/tile.h",
        "row < count; row += ROWS / 2)",
        "row < ROWS / 2; row += ROWS / 2)",
        ("tests/native/test_build.py::test_products_are_the_same_in_registers_of_every_width",),
    ),
    Sabotage(
        "twins-take-each-others-norms",
        "gradients/forms/dense.py",
        "zip(both[1:], each[1:], strict=True)",
        "zip(both[1:], each[:1], strict=True)",
        ("tests/native/test_products.py::test_ghost_norms",),
    ),
    Sabotage(
        "an-ended-record-of-a-compiled-lstm-adds-something",
        "native/lstm.c",
        "(rows - n) * 4 * l->width * sizeof *sums",
        "0 * sizeof *sums",
        ("tests/native/test_build.py::test_every_source_is_checked_before_it_is_used",),
    ),
)

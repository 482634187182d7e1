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
        "        if (!keeps)\n",
        "        if (1)\n",
        ("tests/native/test_build.py::test_every_compiled_function_is_there_and_passes_its_check",),
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
        ("tests/native/test_build.py::test_every_compiled_function_is_there_and_passes_its_check",),
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
        ("tests/native/test_build.py::test_every_compiled_function_is_there_and_passes_its_check",),
    ),
    Sabotage(
        "last-positions-of-convolutions-alone",
        "native/conv.c",
        "int first = !top && !x;",
        "int first = 1;",
        ("tests/native/test_build.py::test_every_compiled_function_is_there_and_passes_its_check",),
    ),
    Sabotage(
        "both-sides-of-gram-matrices-once",
        "native/gram.c",
        "ahead >= ROWS ? 2",
        "ahead >= ROWS ? 1",
        ("tests/native/test_build.py::test_every_compiled_function_is_there_and_passes_its_check",),
    ),
    Sabotage(
        "wide-tiles-skip-terms",
        "native/conv.c",
        "k < columns; k += PANEL)",
        "k < columns; k += 2 * PANEL)",
        ("tests/native/test_build.py::test_every_compiled_function_is_there_and_passes_its_check",),
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
        ("tests/native/test_build.py::test_every_compiled_function_is_there_and_passes_its_check",),
    ),
    Sabotage(
        "compiled-ghost-norms-of-something-else",
        "native/gram.c",
        "+= sqrt(x * y)",
        "+= x * y",
        ("tests/native/test_products.py::test_ghost_norms",),
    ),
    Sabotage(
        "compiled-rows-of-something-else",
        "native/rows.c",
        "one[b] * other[b]",
        "one[b]",
        ("tests/native/test_rows.py::test_lengths",),
    ),
    Sabotage(
        "compiled-normalisation-of-something-else",
        "native/layer_norm.c",
        "centred ? sum_of",
        "!centred ? sum_of",
        ("tests/native/test_rows.py::test_lengths",),
    ),
    Sabotage(
        "compiled-convolution-of-something-else",
        "native/conv.c",
        "run[u * s->apart_u]",
        "run[u]",
        ("tests/native/test_conv.py::test_every_geometry",),
    ),
    Sabotage(
        "compiled-lstm-of-something-else",
        "native/lstm.c",
        "keep * c[at] + in",
        "keep * c[at] - in",
        ("tests/native/test_compiled_lstm.py::test_it_does_what_torch_does",),
    ),
    Sabotage(
        "compiled-noise-of-something-else",
        "native/noise.c",
        "noise[k] * stddev + (double)floats[k]",
        "noise[k] + (double)floats[k]",
        ("tests/noise/test_normals.py::test_a_release_is_the_same_with_and_without_the_library",),
    ),
)

"""`clipless reproduce theory`: every figure of the theory, and the page that shows them."""

from clipless.app.reproduce import auto_figures, dc_global_figures, histogram_figures, rule_figures
from clipless.app.reproduce.drawing import Drawing

TITLE = "The theory behind automatic, dynamic and global clipping, drawn by clipless"
DRAWINGS = (
    Drawing(
        "auto-02-directions",
        "AUTO fig. 2",
        "As long as nearly all records point along the sum, the factors that make most progress are AUTO-V's, and AUTO-S's "
        "are next to them (on drawn gradients g + Δ with log-normal lengths and R = 1).",
        rule_figures.directions_of_rules,
    ),
    Drawing(
        "auto-03-lazy-logistic",
        "AUTO fig. 3",
        "With R = γ = 0.01 AUTO-V's gradient is zero at every bias and Abadi's nearly zero on [-2, 2], while AUTO-S's still "
        "points to the minimum.",
        rule_figures.lazy_logistic,
    ),
    Drawing(
        "auto-04-norms",
        "AUTO fig. 4",
        "Only AUTO-S keeps the order of all norms under a bound: AUTO-V makes them equal, Abadi those above R, and global "
        "drops those above its cutoff.",
        rule_figures.norms_by_rule,
    ),
    Drawing(
        "auto-05-bounds",
        "AUTO fig. 5",
        "AUTO-S's bound keeps falling with the steps because ever larger ratios r are allowed; AUTO-V's stops at ξ "
        "(ξ = 25, γ = 0.01, terms 10/√T and for SGD 2/√T).",
        auto_figures.bounds_over_steps,
    ),
    Drawing(
        "auto-06-bound",
        "AUTO fig. 6",
        "Each ratio r > 1 takes AUTO-S's bound below ξ once the term is small enough, and the larger r, the smaller it must "
        "be; with AUTO-V r is below 1 and the bound above ξ.",
        auto_figures.bound_over_term,
    ),
    Drawing(
        "auto-measure",
        "AUTO (C.3), (C.8)",
        "The gain M of a step is bounded in the gradient's length, so its inverse has a pole, and a concave envelope exists "
        "only for gradients of bounded length.",
        auto_figures.measure_and_inverse,
    ),
    Drawing(
        "auto-07-noise-and-gamma",
        "AUTO fig. 7",
        "Less noise ξ in the gradients lowers AUTO-S's bound throughout, and a γ near ξ lets it fall below ξ after fewer "
        "steps than a tiny one (term 10/√T).",
        auto_figures.noise_and_stability,
    ),
    Drawing(
        "auto-08-rates",
        "AUTO fig. 8",
        "In the long run AUTO-S's bound falls as T^(-1/4), like SGD's; with the concave envelope that the proof needs for "
        "the mean length it is T^(-1/6).",
        auto_figures.rates_in_the_long_run,
    ),
    Drawing(
        "auto-09-alignment",
        "AUTO fig. 9",
        "What a symmetric pair of gradients gains falls with its noise S, at one angle as in the worst one, where without a "
        "stability constant nothing is left from S = 1 on.",
        auto_figures.alignment_over_noise,
    ),
    Drawing(
        "auto-10-angle",
        "AUTO fig. 10",
        "Below r = 1 a pair always gains; above, it gains nothing in the worst direction c = 1 unless Γ is positive.",
        auto_figures.alignment_over_angle,
    ),
    Drawing(
        "auto-11-lazy-mean",
        "AUTO fig. 11",
        "Estimating a mean between two groups, Abadi and AUTO-V count records and stall on (-1, 1); AUTO-S does not.",
        rule_figures.lazy_mean,
    ),
    Drawing(
        "auto-laws",
        "AUTO thm. 5",
        "At a fixed budget more steps, larger batches and a better start lower the bound, and the best learning rate does "
        "not depend on the batch.",
        auto_figures.laws,
    ),
    Drawing(
        "dc-02-percentiles",
        "DC fig. 2",
        "On a histogram of range 150 DC-P's threshold is within half a bin of the true percentile; noise on the counts "
        "moves it the further the more bins there are to sum up.",
        histogram_figures.thresholds_over_percentiles,
    ),
    Drawing(
        "dc-03-errors",
        "DC fig. 3",
        "On a histogram of range 120 longer norms are taken for shorter ones, and noise for short ones, so the estimate of "
        "E(C) is too low at small C; its minimum, a star, is near the true one unless there is much noise on many bins.",
        histogram_figures.errors_over_thresholds,
    ),
    Drawing(
        "dc-error",
        "DC eq. 3, thm. 3",
        "The threshold of least expected error balances noise, which grows with C, against what clipping cuts off; in the "
        "bounds of Theorem 3 more clipping leaves a bias that no number of steps removes.",
        dc_global_figures.error_and_bound,
    ),
    Drawing(
        "global-facts",
        "GLOBAL facts A.1, A.4",
        "A product of a positive definite and a diagonal matrix can have a negative quadratic form, and a sum of such "
        "products a zero or negative eigenvalue.",
        dc_global_figures.matrix_facts,
    ),
    Drawing(
        "global-kernels",
        "GLOBAL thm. 1, 2",
        "On a small network only global clipping without dropped records keeps the kernel's quadratic form positive at "
        "every threshold; a dropped record makes it singular.",
        dc_global_figures.clipped_kernels,
    ),
    Drawing(
        "global-losses",
        "GLOBAL thm. 1, 2",
        "Under flat local clipping the loss can grow at first, under layerwise clipping it can stall at a non-zero value, "
        "and under global clipping it falls to zero unless a record is dropped.",
        dc_global_figures.losses_over_time,
    ),
    Drawing(
        "global-optimizers",
        "GLOBAL thm. 4",
        "What clipping does does not depend on the optimizer: layer by layer all of them can stand still at a loss of 9, "
        "and with global or flat clipping all arrive.",
        dc_global_figures.losses_by_optimizer,
    ),
    Drawing(
        "global-flows",
        "GLOBAL F.1-F.8",
        "At small steps every optimizer follows a flow of its own towards the same minimum.",
        dc_global_figures.optimizer_flows,
    ),
)

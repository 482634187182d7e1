"""Threshold policies: their noise and clipping in a run, their statistics, their updates."""

from collections.abc import Iterator

from sabotage_lists.one import Sabotage

PRIVATE, PLAN = "private.py", "plan.py"
QUANTILE, HISTOGRAM, DC_P, DC_E = (f"thresholds/{name}.py" for name in ("quantile", "histogram", "dc_p", "dc_e"))
HAND, RUN = "tests/thresholds/test_policies.py", "tests/thresholds/test_private_policies.py"
RELEASES = "tests/thresholds/test_releases.py"
STDDEVS = "by_group = self.plan.stddevs(step, self._thresholds).flatten()"
MULTIPLIER = "return noise_stddevs(thresholds, self.event(step).gradient_multiplier, self.phase(step)"
FACTORS = "return self._phase.clipping.factors(norms, thresholds.to(norms), groups)"


def in_a_run() -> Iterator[Sabotage]:
    """The gradient's noise and clipping under one policy alone. With a single stair of noise the last stair's noise is
    every step's, and without a statistic the gradient has the joint multiplier: these change nothing and are left out."""
    for policy in ("dc-p", "dc-e", "quantile", "decay"):
        tests = (f"{RELEASES}::test_each_release_of_a_flat_run[{policy}-uniform-None]",)
        mine = f'self.plan.clipping.name == "{policy}"'
        yield Sabotage(
            f"{policy}-hundredth-of-the-noise",
            PRIVATE,
            STDDEVS,
            f"by_group = (0.01 if {mine} else 1) * self.plan.stddevs(step, self._thresholds).flatten()",
            tests,
        )
        first = f"self.plan.clipping.start(len(self.plan.groups)) if {mine} else self._thresholds"
        yield Sabotage(
            f"{policy}-noise-of-the-first-thresholds",
            PRIVATE,
            STDDEVS,
            f"by_group = self.plan.stddevs(step, {first}).flatten()",
            tests,
        )
        yield Sabotage(
            f"{policy}-clips-at-one-and-a-half",
            PRIVATE,
            FACTORS,
            f"return self._phase.clipping.factors(norms, thresholds.to(norms) * (1.5 if {mine} else 1), groups)",
            tests,
        )
        if policy != "decay":
            joint = f'(self.event(step).noise_multiplier if self.clipping.name == "{policy}" else '
            yield Sabotage(
                f"{policy}-joint-multiplier-on-the-gradient",
                PLAN,
                MULTIPLIER,
                f"return noise_stddevs(thresholds, {joint}self.event(step).gradient_multiplier), self.phase(step)",
                tests,
            )
    yield Sabotage(
        "decay-noise-of-the-last-stair",
        PLAN,
        MULTIPLIER,
        MULTIPLIER.replace("self.event(step)", "self.event(self.steps - 1)"),
        (f"{RELEASES}::test_each_release_of_a_flat_run[decay-noise-uniform-None]",),
    )


SABOTAGES = (
    *in_a_run(),
    Sabotage(
        "decay-noise-of-the-first-stair",
        "noise_schedule.py",
        "        if step < count:\n            return relative\n",
        "        if step < count:\n            return schedule[0][0]\n",
        (f"{RELEASES}::test_each_release_of_a_flat_run[decay-noise-uniform-None]",),
    ),
    Sabotage(
        "statistic-without-noise",
        "run_state.py",
        "        return noised\n",
        "        return statistic\n",
        (f"{RUN}::test_what_is_released_is_the_statistic_with_its_noise",),
    ),
    Sabotage(
        "statistic-of-the-last-part-alone",
        PRIVATE,
        "observed if self._statistic is None else self._statistic + observed",
        "observed",
        (f"{RUN}::test_micro_batches_change_nothing",),
    ),
    Sabotage(
        "statistic-of-an-interrupted-batch-stays",
        PRIVATE,
        "self._batch, self._statistic = batch, None",
        "self._batch = batch",
        (RUN, "tests/test_stepping.py"),
    ),
    Sabotage(
        "thresholds-not-updated",
        PRIVATE,
        "self._go_on(step + 1, phase.clipping.policy.update(self._policy_state, statistic, phase.setting))",
        "self._go_on(step + 1, self._policy_state)",
        (f"{RELEASES}::test_each_release_of_a_flat_run[dc-p-uniform-None]",),
    ),
    Sabotage("quantile-sign", QUANTILE, "(-self.rate *", "(self.rate *", (f"{HAND}::test_quantile_by_hand",)),
    Sabotage(
        "quantile-count-noise-without-root-of-groups",
        QUANTILE,
        "sensitivity = setting.groups**0.5 / 2",
        "sensitivity = 0.5",
        (
            f"{RELEASES}::test_each_release_of_a_run_per_layer[quantile-uniform-None]",
            f"{RELEASES}::test_each_release_of_a_run_per_layer[quantile-global-uniform-None]",
        ),
    ),
    Sabotage(
        "quantile-counts-without-root-of-groups",
        QUANTILE,
        "(2 / len(norms) ** 0.5)",
        "2",
        (f"{HAND}::test_one_record_moves_the_statistic_by_at_most_one",),
    ),
    Sabotage(
        "quantile-counts-whole-records",
        QUANTILE,
        '(norms <= state["thresholds"].to(norms)).double() - 0.5',
        '(norms <= state["thresholds"].to(norms)).double()',
        (f"{HAND}::test_one_record_moves_the_statistic_by_at_most_one",),
    ),
    Sabotage(
        "quantile-half-the-noise",
        QUANTILE,
        "2 * total)",
        "1.01 * total)",
        (f"{RELEASES}::test_each_release_of_a_run_per_layer[quantile-uniform-None]",),
    ),
    Sabotage(
        "histogram-without-root-of-groups",
        HISTOGRAM,
        "return counts / len(norms) ** 0.5",
        "return counts",
        (f"{HAND}::test_one_record_moves_the_statistic_by_at_most_one",),
    ),
    Sabotage(
        "histogram-loses-norms-above-its-range",
        HISTOGRAM,
        "counts.scatter_add_(1, bins, counts.new_ones(()).expand(bins.shape))",
        'counts.scatter_add_(1, bins, (norms <= state["range"].to(norms.device)).double())',
        (f"{HAND}::test_dc_p_by_hand", HAND),
    ),
    Sabotage(
        "histogram-multiplier-from-nowhere",
        HISTOGRAM,
        "usual = 5.0 if total < 2",
        "usual = 2.0 if total < 2",
        (f"{RUN}::test_the_histogram_multiplier_follows_the_total",),
    ),
    Sabotage("dc-p-without-running-sum", DC_P, "counts.cumsum(1) >=", "counts >=", (f"{HAND}::test_dc_p_by_hand",)),
    Sabotage(
        "dc-p-follows-noise-alone",
        DC_P,
        "signal = total > 0",
        "signal = total > -1e300",
        (f"{HAND}::test_a_histogram_without_signal_changes_nothing",),
    ),
    Sabotage(
        "dc-e-negative-bins-count", DC_E, "noised[g].clip(min=0)", "noised[g]", (f"{HAND}::test_dc_e_by_hand", HAND)
    ),
    Sabotage(
        "dc-e-range-without-limits",
        DC_E,
        "min(max(float(ranges[g, 0]) * rescaled(noised[g]), LEAST), MOST)",
        "float(ranges[g, 0]) * rescaled(noised[g])",
        (f"{HAND}::test_thresholds_and_ranges_stop_at_their_limits",),
    ),
    Sabotage(
        "dc-e-threshold-without-limits",
        DC_E,
        "threshold = min(max(float(candidates[best]), LEAST), MOST)",
        "threshold = float(candidates[best])",
        (f"{HAND}::test_nothing_diverges", HAND),
    ),
    Sabotage(
        "dc-e-noise-over-the-batch-once",
        DC_E,
        "/ setting.expected_batch**2",
        "/ setting.expected_batch",
        (f"{HAND}::test_dc_e_by_hand", f"{RELEASES}::test_each_release_of_a_flat_run[dc-e-uniform-None]"),
    ),
    Sabotage(
        "thresholds-without-limits",
        "thresholds/policy.py",
        "return thresholds.clamp(LEAST, MOST)",
        "return thresholds",
        (f"{HAND}::test_thresholds_and_ranges_stop_at_their_limits",),
    ),
    Sabotage(
        "decay-of-another-length",
        "thresholds/decay.py",
        '"time": state["time"] + 1 / setting.steps',
        '"time": state["time"] + 1 / (setting.steps + 1)',
        (f"{HAND}::test_decay_by_hand",),
    ),
    Sabotage(
        "schedule-misses-its-last-steps",
        "thresholds/decay.py",
        "(first + last - 1) / 2 / steps), last - first)",
        "(first + last - 1) / 2 / steps), max(1, last - first - 1))",
        (f"{HAND}::test_the_noise_schedule_covers_every_step_and_follows_its_formula",),
    ),
)

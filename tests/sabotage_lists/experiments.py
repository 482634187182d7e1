"""What an experiment says of its runs, and what the theory says of the papers."""

from sabotage_lists.one import Sabotage

SUMMARY, RUNNING = "app/reproduce/summary.py", "app/reproduce/running.py"
CHOOSING, DC = "app/reproduce/choosing.py", "theory/dc.py"
EXPERIMENTS, THEORY = "tests/app/test_experiments.py", "tests/theory/test_dc.py"

SABOTAGES = (
    Sabotage(
        "interval-of-two-runs",
        SUMMARY,
        "mean = with_interval(fmean(values), interval(values) if len(values) >= FEWEST_SEEDS else None, form)",
        "mean = with_interval(fmean(values), interval(values), form)",
        (f"{EXPERIMENTS}::test_fewer_than_five_seeds_have_no_interval_anywhere",),
    ),
    Sabotage(
        "difference-of-other-seeds",
        SUMMARY,
        'found[str(point), int(record["settings"]["seed"])] = point',
        "found[str(point), len(found)] = point",
        (f"{EXPERIMENTS}::test_differences_are_paired_by_seed_and_by_the_settings_of_the_grid",),
    ),
    Sabotage(
        "runs-of-other-settings-shown",
        RUNNING,
        "if record is not None and _is_run_of(record, cell):",
        "if record is not None:",
        (f"{EXPERIMENTS}::test_page_and_readme_are_made_of_what_is_stored",),
    ),
    Sabotage(
        "price-of-one-candidate",
        CHOOSING,
        "shapes = [shape_of(settings, records)] * self.count",
        "shapes = [shape_of(settings, records)]",
        (f"{EXPERIMENTS}::test_a_row_whose_setting_is_chosen_pays_for_the_choice",),
    ),
    Sabotage(
        "theorem-3-without-noise",
        DC,
        "moved = self.smoothness * self.rate * (np.asarray(self.squares, float) + noise).mean()",
        "moved = self.smoothness * self.rate * np.asarray(self.squares, float).mean()",
        (THEORY,),
    ),
    Sabotage(
        "theorem-3-for-fixed-batches",
        DC,
        "sums = 1 + (1 - sample_rate) / batch",
        "sums = 1.0",
        (f"{THEORY}::test_worst_case_needs_the_spread_of_the_batch",),
    ),
    Sabotage(
        "theorem-4-without-its-condition",
        DC,
        "steps or epsilon > 2 * digits:",
        "steps:",
        (f"{THEORY}::test_theorem_4_fails_beyond_the_condition_that_the_paper_lacks",),
    ),
    Sabotage(
        "theorem-4-with-a-smaller-constant",
        DC,
        "LARGEST_EPSILON, NOISE = 1.0, 2.25",
        "LARGEST_EPSILON, NOISE = 1.0, 1.9",
        (f"{THEORY}::test_theorem_4_keeps_its_promise",),
    ),
)

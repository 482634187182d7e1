"""What is shown and stored: nothing that is not private without saying so."""

from sabotage_lists.one import Sabotage

RESULT, REPORT = "app/training/result.py", "app/report.py"
TRAINING, CLI, SECRETS = "tests/app/test_training.py", "tests/app/test_cli.py", "tests/test_secrets.py"

SABOTAGES = (
    Sabotage(
        "test-accuracy-taken-for-private",
        RESULT,
        '"not_private": self.not_private() | ({} if self.settings.seed is None else SEEDED),',
        '"not_private": {} if self.settings.seed is None else SEEDED,',
        (TRAINING, CLI),
    ),
    Sabotage(
        "seed-taken-for-private",
        RESULT,
        '"not_private": self.not_private() | ({} if self.settings.seed is None else SEEDED),',
        '"not_private": self.not_private(),',
        (TRAINING, CLI),
    ),
    Sabotage(
        "seed-that-is-none-taken-for-known",
        RESULT,
        '"not_private": self.not_private() | ({} if self.settings.seed is None else SEEDED),',
        '"not_private": self.not_private() | SEEDED,',
        (TRAINING, CLI),
    ),
    Sabotage(
        "approximation-not-said",
        RESULT,
        '"approximation": self.approximation,',
        '"approximation": False,',
        (TRAINING, CLI),
    ),
    Sabotage(
        "approximation-not-noted",
        RESULT,
        '"notes": [APPROXIMATION_NOTE] if self.approximation else [],',
        '"notes": [],',
        (TRAINING, CLI),
    ),
    Sabotage(
        "best-epoch-reported",
        RESULT,
        "return self.scores[-1]",
        "return max(self.scores)",
        (TRAINING, CLI),
    ),
    Sabotage(
        "checkpoint-stays-after-the-run",
        RESULT,
        "            folder.checkpoint.unlink(missing_ok=True)\n",
        "            pass\n",
        ("tests/noise/test_keys.py::test_a_finished_run_holds_no_key", "tests/runs/test_resume.py"),
    ),
    Sabotage(
        "key-in-a-checkpoint-not-mentioned",
        REPORT,
        'checkpoint = {"checkpoint.pt": KEY_NOTE} if RunFolder(self.path).checkpoint.exists() else {}',
        "checkpoint: dict[str, str] = {}",
        (CLI,),
    ),
    Sabotage(
        "torn-line-not-mentioned",
        REPORT,
        "        if self.torn:\n            return f",
        "        if False:\n            return f",
        (f"{CLI}::test_a_torn_last_line_is_shown_with_one_step_more_and_exit_code_3",),
    ),
    Sabotage(
        "shortened-ledger-not-noticed",
        "runs/run_folder.py",
        '            found.position_of(str(file.get("head")))\n',
        "            pass\n",
        (CLI, "tests/runs/test_resume.py"),
    ),
    Sabotage(
        "number-of-records-in-a-message",
        "stepping.py",
        "{'some' if seen else 'none'} of the batch's records",
        "{seen} of the batch's {records} records",
        ("tests/test_private.py::test_step_before_all_parts_is_refused",),
    ),
    Sabotage(
        "number-of-rows-in-a-message",
        "gradients/engine.py",
        '("B" if size == micro.records else "n") if k == 0 else str(size)',
        "str(size)",
        ("tests/test_promises.py::test_what_is_not_one_loss_per_record_is_refused",),
    ),
    Sabotage(
        "true-statistic-in-the-history",
        "private.py",
        "self._note(phase, statistic)",
        "self._note(phase, self._statistic)",
        (f"{SECRETS}::test_the_library_writes_no_true_value", "tests/thresholds/test_releases.py"),
    ),
    Sabotage(
        "thresholds-can-be-written",
        "run_state.py",
        "return self._thresholds.clone()",
        "return self._thresholds",
        ("tests/test_private.py::test_thresholds_are_shown_as_a_copy",),
    ),
    Sabotage(
        "unfinished-run-overwritten",
        "runs/run_folder.py",
        "        if unfinished and not resume:\n",
        "        if False:\n",
        ("tests/runs/test_resume.py::test_an_unfinished_run_is_not_overwritten",),
    ),
    Sabotage(
        "large-delta-unnoticed",
        "planning.py",
        "if note := large_delta_note(delta, dataset_size):",
        'if note := "":',
        ("tests/test_misuse.py::test_a_delta_above_one_over_n_is_warned_of",),
    ),
    Sabotage(
        "statistic-not-named-in-the-promise",
        "app/report_page/promise.py",
        "        if statistic\n",
        "        if False\n",
        ("tests/app/test_report_page.py",),
    ),
    Sabotage(
        "equal-scores-end-the-comparison",
        "app/comparing.py",
        "    if spread == other_spread == 0:\n        return mean != other_mean\n",
        "",
        ("tests/app/test_cli_compare.py::test_runs_with_the_same_score_are_a_result_like_any_other",),
    ),
    Sabotage(
        "clippings-told-apart-as-if-equally-spread",
        "app/comparing.py",
        "other_runs, equal_var=False)",
        "other_runs, equal_var=True)",
        ("tests/app/test_cli_compare.py::test_runs_are_told_apart_by_welchs_test",),
    ),
)

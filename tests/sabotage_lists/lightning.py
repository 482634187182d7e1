"""Private training by Lightning: refusals, parts of a batch, what is logged and saved. These need the extra `lightning`."""

from sabotage_lists.one import Sabotage

NAMES = ("batches", "callback", "length", "metrics", "refusals")
BATCHES, CALLBACK, LENGTH, METRICS, REFUSALS = (f"integrations/lightning/{name}.py" for name in NAMES)

SABOTAGES = (
    Sabotage(
        "lightning-loss-of-a-part-divided",
        CALLBACK,
        "lambda gradient: gradient * trainer.accumulate_grad_batches",
        "lambda gradient: gradient",
        ("tests/integrations/test_lightning.py::test_accumulated_batches_are_parts_of_one_batch",),
    ),
    Sabotage(
        "lightning-batch-of-one-part",
        LENGTH,
        "batch_size * parts, len(data)",
        "batch_size, len(data)",
        ("tests/integrations/test_lightning.py::test_accumulated_batches_are_parts_of_one_batch",),
    ),
    Sabotage(
        "lightning-epochs-without-their-limit",
        LENGTH,
        "if per_epoch == whole_epoch and (steps",
        "if (steps",
        ("tests/integrations/test_lightning.py::test_the_budget_covers_what_the_trainer_is_set_to",),
    ),
    Sabotage(
        "lightning-training-metrics-are-logged",
        METRICS,
        "if self._public or self._log_not_private:",
        "if True:",
        ("tests/integrations/test_lightning_metrics.py::test_training_metrics_reach_no_one",),
    ),
    Sabotage(
        "lightning-mean-is-clipped",
        REFUSALS,
        "if trainer.gradient_clip_val:",
        "if False:",
        ("tests/integrations/test_lightning_refusals.py::test_refused",),
    ),
    Sabotage(
        "lightning-losses-are-scaled",
        REFUSALS,
        "isinstance(plugin, MixedPrecision) and plugin.scaler is not None",
        "False",
        ("tests/integrations/test_lightning_refusals.py::test_refused",),
    ),
    Sabotage(
        "lightning-same-records-in-every-step",
        REFUSALS,
        "if trainer.overfit_batches:",
        "if False:",
        ("tests/integrations/test_lightning_refusals.py::test_refused",),
    ),
    Sabotage(
        "lightning-rounded-means",
        REFUSALS,
        'if "16" in plugin.precision:',
        "if False:",
        ("tests/integrations/test_lightning_refusals.py::test_refused",),
    ),
    Sabotage(
        "lightning-learning-rate-found-on-the-records",
        REFUSALS,
        "isinstance(callback, (LearningRateFinder, BatchSizeFinder))",
        "False",
        (
            "tests/integrations/test_lightning_refusals.py::test_refused",
            "tests/integrations/test_lightning_refusals.py::test_a_search_for_the_batch_size_is_refused",
        ),
    ),
    Sabotage(
        "lightning-statistics-of-batch-norm",
        REFUSALS,
        "isinstance(callback, StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module)",
        "False",
        ("tests/integrations/test_lightning_refusals.py::test_refused",),
    ),
    Sabotage(
        "lightning-batch-changes-within-the-run",
        REFUSALS,
        "if isinstance(callback, GradientAccumulationScheduler):",
        "if False:",
        ("tests/integrations/test_lightning_refusals.py::test_refused",),
    ),
    Sabotage(
        "lightning-other-strategies",
        REFUSALS,
        "type(strategy) not in (SingleDeviceStrategy, DDPStrategy)",
        "False",
        ("tests/integrations/test_lightning_refusals.py::test_other_strategies_are_refused",),
    ),
    Sabotage(
        "lightning-second-fit",
        CALLBACK,
        '        if self.private is not None:\n            raise Misuse(\n                "this PrivateTraining',
        '        if False:\n            raise Misuse(\n                "this PrivateTraining',
        ("tests/integrations/test_lightning.py::test_stopping_by_a_validation_metric_is_allowed",),
    ),
    Sabotage(
        "lightning-resumed-from-a-plain-checkpoint",
        CALLBACK,
        "def refuse_plain_checkpoint() -> NoReturn:\n    raise Misuse(",
        "def refuse_plain_checkpoint() -> NoReturn:\n    str(",
        (
            "tests/integrations/test_lightning_resume.py::test_other_plans_and_plain_checkpoints_are_refused",
            "tests/integrations/test_lightning_resume.py::test_a_run_that_has_ended_leaves_weights_without_keys",
        ),
    ),
    Sabotage(
        "lightning-keys-in-the-last-weights",
        CALLBACK,
        "if self.private is None or self._ended else",
        "if self.private is None else",
        ("tests/integrations/test_lightning_resume.py::test_a_run_that_has_ended_leaves_weights_without_keys",),
    ),
    Sabotage(
        "lightning-validation-changes-random-numbers",
        CALLBACK,
        "            set_random_state(self._kept, ())\n",
        "",
        ("tests/integrations/test_lightning.py::test_two_epochs_with_validation_are_those_of_a_loop_without",),
    ),
    Sabotage(
        "lightning-resumed-without-random-numbers",
        BATCHES,
        "            set_random_states(self.random)\n",
        "",
        ("tests/integrations/test_lightning_resume.py::test_resumed_in_and_after_an_epoch",),
    ),
    Sabotage(
        "lightning-saved-between-two-parts",
        CALLBACK,
        "            nothing_to_save(trainer)\n",
        "            pass\n",
        ("tests/integrations/test_lightning_resume.py::test_resumed_with_batches_in_parts",),
    ),
    Sabotage(
        "lightning-run-is-not-ended",
        CALLBACK,
        '        if stage == "fit":\n            self._end()',
        '        if stage == "fit":\n            pass',
        ("tests/integrations/test_lightning_resume.py::test_a_run_that_has_ended_leaves_weights_without_keys",),
    ),
)

"""Private training by a Hugging Face Trainer: losses, turns, settings, logs, checkpoints. These need the extra `hf`."""

from sabotage_lists.one import Sabotage

NAMES = ("losses", "own_loss", "padding", "settings", "trainer", "turns")
LOSSES, OWN_LOSS, PADDING, SETTINGS, TRAINER, TURNS = (f"integrations/transformers/{name}.py" for name in NAMES)
RUNS, REFUSALS = "tests/integrations/test_transformers.py", "tests/integrations/test_transformers_refusals.py"
PADDED, OPTIONS = (f"tests/integrations/test_transformers_{name}.py" for name in ("padding", "options"))

SABOTAGES = (
    Sabotage(
        "transformers-settings-changed-later",
        TRAINER,
        "        refuse_settings(self.args, neftune_noise_alpha=self.neftune_noise_alpha)\n        if self.train_dataset",
        "        if self.train_dataset",
        (f"{REFUSALS}::test_a_setting_that_is_changed_later_is_refused_as_well",),
    ),
    Sabotage(
        "transformers-tokens-of-the-batch",
        LOSSES,
        "        return self.values.sum(1) / self.counted.sum(1).clamp(min=1)\n",
        "        return self.values.sum(1) / self.counted.sum().clamp(min=1)\n",
        (f"{RUNS}::test_three_steps_are_those_of_the_plain_loop_bit_for_bit",),
    ),
    Sabotage(
        "transformers-mean-is-clipped",
        SETTINGS,
        "lambda args: args.max_grad_norm not in (0, 0.0, 1.0)",
        "lambda args: False",
        (f"{REFUSALS}::test_a_setting_that_breaks_the_promise_is_refused",),
    ),
    Sabotage(
        "transformers-trained-twice",
        TRAINER,
        '        if self.private is not None:\n            raise Misuse(\n                "train() was',
        '        if False:\n            raise Misuse(\n                "train() was',
        (f"{RUNS}::test_what_is_logged_saved_and_returned_is_private",),
    ),
    Sabotage(
        "transformers-loss-is-logged",
        TRAINER,
        "if self.private is not None and _NOT_PRIVATE.keys() & logs.keys():",
        "if False:",
        (f"{RUNS}::test_what_is_logged_saved_and_returned_is_private",),
    ),
    Sabotage(
        "transformers-loss-is-returned",
        TRAINER,
        'return output if self.log_not_private_loss else output._replace(training_loss=float("nan"))',
        "return output._replace(training_loss=self._total_loss_scalar)",
        (f"{RUNS}::test_what_is_logged_saved_and_returned_is_private",),
    ),
    Sabotage(
        "transformers-dropped-batch",
        TRAINER,
        "        self.private.refuse_unstepped()\n",
        "",
        (f"{REFUSALS}::test_a_batch_that_is_dropped_is_refused",),
    ),
    Sabotage(
        "transformers-keys-of-a-finished-run",
        TRAINER,
        "                saved.unlink()\n",
        "                pass\n",
        (f"{RUNS}::test_a_resumed_run_ends_as_if_it_had_not_been_interrupted",),
    ),
    Sabotage(
        "transformers-states-of-different-steps",
        TRAINER,
        "        if private.steps_taken != self.state.global_step:\n",
        "        if False:\n",
        (f"{RUNS}::test_states_that_do_not_belong_together_are_refused",),
    ),
    Sabotage(
        "transformers-rest-of-the-batch",
        TURNS,
        "Turn(self._parts if last else islice(self._parts, 1))",
        "Turn(islice(self._parts, 1))",
        (f"{RUNS}::test_the_batch_is_one_poisson_sample_whatever_its_parts",),
    ),
    Sabotage(
        "transformers-training-records-are-evaluated",
        SETTINGS,
        'data is trained or getattr(data, "dataset", None) is trained',
        "False",
        (f"{OPTIONS}::test_metrics_on_training_records_are_warned_of_wherever_they_are_asked_for",),
    ),
    Sabotage(
        "transformers-state-that-no-checkpoint-holds",
        SETTINGS,
        '_projects(args) and args.save_strategy != "no"',
        'False and args.save_strategy != "no"',
        (f"{OPTIONS}::test_an_optimizer_that_no_checkpoint_can_hold_is_refused_unless_none_is_saved",),
    ),
    Sabotage(
        "transformers-noise-of-embeddings-set-later",
        TRAINER,
        "refuse_settings(self.args, neftune_noise_alpha=self.neftune_noise_alpha)",
        "refuse_settings(self.args)",
        (f"{REFUSALS}::test_noise_for_embeddings_is_refused_where_the_trainer_got_it_later",),
    ),
)

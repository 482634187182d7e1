"""What a run leaves on disk: the ledger file, its order and its hashes; checkpoints and how a run goes on."""

from sabotage_lists.one import Sabotage

PRIVATE, SAVED, JOURNAL, FILE = "private.py", "saved_run.py", "runs/journal.py", "runs/ledger_file.py"
STATE = "run_state.py"
DURABLE, PRINT, CHECKPOINT = "runs/durable_files.py", "runs/fingerprint.py", "runs/checkpoint.py"
JOURNALS, CHECKPOINTS, FILES = (f"tests/runs/test_{name}.py" for name in ("journal", "checkpoint", "durable_files"))
LOST = "tests/runs/test_lost_ledger.py"

SABOTAGES = (
    Sabotage(
        "shown-before-it-is-recorded",
        PRIVATE,
        """        if self._ranks.size == 1 and self._journal is None:
            self.ledger.record(event)
        else:
            self._record(where, event, told.by_all if self._ranks.size > 1 else [self._digests(gradients, statistic)])
        for name, parameter in self._engine.parameters.items():
            parameter.grad = gradients[name] if parameter.requires_grad else None
""",
        """        for name, parameter in self._engine.parameters.items():
            parameter.grad = gradients[name] if parameter.requires_grad else None
        if self._ranks.size == 1 and self._journal is None:
            self.ledger.record(event)
        else:
            self._record(where, event, told.by_all if self._ranks.size > 1 else [self._digests(gradients, statistic)])
""",
        (f"{CHECKPOINTS}::test_a_repeated_step_that_differs_is_refused_before_anything_is_seen",),
    ),
    Sabotage(
        "steps-not-in-the-ledger",
        PRIVATE,
        "        self.ledger.record(event)\n",
        "        self.ledger.record(event) if not self.ledger.steps else None\n",
        ("tests/test_private.py::test_spent_grows_with_the_ledger_up_to_the_promise",),
    ),
    Sabotage(
        "repeated-steps-counted-again",
        SAVED,
        "            if self._journal.record(event, released):\n",
        "            if self._journal.record(event, released) or True:\n",
        (f"{CHECKPOINTS}::test_an_interrupted_run_ends_like_one_that_was_not",),
    ),
    Sabotage(
        "line-not-synced",
        JOURNAL,
        "            os.fsync(self._descriptor)\n",
        "",
        (f"{JOURNALS}::test_every_line_is_synced_before_record_returns",),
    ),
    Sabotage(
        "file-not-synced",
        DURABLE,
        "            os.fsync(file.fileno())\n",
        "",
        (f"{FILES}::test_a_file_is_synced_whole_then_moved_then_its_folder_is_synced",),
    ),
    Sabotage(
        "file-not-flushed-before-it-is-synced",
        DURABLE,
        "            file.flush()\n",
        "",
        (f"{FILES}::test_a_file_is_synced_whole_then_moved_then_its_folder_is_synced",),
    ),
    Sabotage(
        "folder-not-synced",
        DURABLE,
        "            os.fsync(descriptor)\n",
        "            pass\n",
        (f"{FILES}::test_a_file_is_synced_whole_then_moved_then_its_folder_is_synced",),
    ),
    Sabotage(
        "folder-of-a-replaced-file-not-synced",
        DURABLE,
        "    sync_folder(path.parent)\n",
        "",
        (f"{FILES}::test_a_file_is_synced_whole_then_moved_then_its_folder_is_synced",),
    ),
    Sabotage(
        "folder-of-a-new-ledger-not-synced",
        JOURNAL,
        "            sync_folder(path.parent)\n",
        "",
        (f"{JOURNALS}::test_a_new_ledger_is_synced_before_it_appears_and_its_folder_after",),
    ),
    Sabotage(
        "statistic-missing-from-the-fingerprint",
        SAVED,
        "{fingerprint([*gradients.values(), *shared])}",
        "{fingerprint([*gradients.values()])}",
        (f"{CHECKPOINTS}::test_a_repeated_step_with_another_statistic_is_refused",),
    ),
    Sabotage(
        "fingerprint-of-the-first-parameter",
        SAVED,
        "{fingerprint([*gradients.values(), *shared])}",
        "{fingerprint([*list(gradients.values())[:1], *shared])}",
        (f"{CHECKPOINTS}::test_a_repeated_step_in_which_one_parameter_differs_is_refused",),
    ),
    Sabotage(
        "fingerprint-without-columns",
        PRINT,
        "        digest.update(rows.sum(1).data)\n",
        "",
        (
            f"{CHECKPOINTS}::test_a_fingerprint_sees_order_shape_and_type",
            f"{CHECKPOINTS}::test_a_fingerprint_sees_every_bit",
        ),
    ),
    Sabotage(
        "fingerprint-without-rows",
        PRINT,
        "        digest.update(rows.sum(0).data)\n",
        "",
        (
            f"{CHECKPOINTS}::test_a_fingerprint_sees_order_shape_and_type",
            f"{CHECKPOINTS}::test_a_fingerprint_sees_every_bit",
        ),
    ),
    Sabotage(
        "fingerprint-without-the-rest",
        PRINT,
        "    digest.update(content[square:].data)\n",
        "",
        (f"{CHECKPOINTS}::test_a_fingerprint_sees_every_bit",),
    ),
    Sabotage(
        "fingerprint-without-shapes",
        PRINT,
        'digest.update(f"{tensor.dtype} {tensor.shape};".encode())',
        'digest.update(f"{tensor.dtype};".encode())',
        (f"{CHECKPOINTS}::test_a_fingerprint_sees_order_shape_and_type",),
    ),
    Sabotage(
        "repeated-step-not-compared",
        JOURNAL,
        "(expected.event, expected.fingerprint) != (event, fingerprint)",
        "expected.event != event",
        (f"{JOURNALS}::test_a_repeated_event_that_differs_is_refused",),
    ),
    Sabotage(
        "repeated-event-not-compared",
        JOURNAL,
        "(expected.event, expected.fingerprint) != (event, fingerprint)",
        "expected.fingerprint != fingerprint",
        (f"{JOURNALS}::test_a_repeated_event_that_differs_is_refused",),
    ),
    Sabotage(
        "torn-line-not-compared",
        JOURNAL,
        "if not line.startswith(self._torn):",
        "if False:",
        (f"{JOURNALS}::test_a_torn_line_that_comes_out_differently_is_refused",),
    ),
    Sabotage(
        "torn-line-costs-nothing",
        FILE,
        "        if self.torn:\n            ledger.record(self.planned_step(ledger.steps))\n",
        "",
        (f"{JOURNALS}::test_a_torn_last_line_is_told_apart_and_counts_as_a_step",),
    ),
    Sabotage(
        "steps-given-up-are-free",
        JOURNAL,
        "            self.record(found.planned_step(found.recorded().steps), None)\n",
        "",
        (f"{JOURNALS}::test_given_up_steps_stay_counted", f"{CHECKPOINTS}::test_reseeding_counts_a_torn_line"),
    ),
    Sabotage(
        "lines-may-be-missing",
        FILE,
        '(fields.get("line"), fields.get("previous")) != (number, previous)',
        'fields.get("line") != number',
        (f"{JOURNALS}::test_a_line_of_another_ledger_does_not_follow",),
    ),
    Sabotage(
        "hash-not-compared",
        FILE,
        'whole = sealed(body) == (line + b"\\n", fields["hash"])',
        'whole = bool(fields["hash"])',
        (f"{JOURNALS}::test_no_change_of_the_bytes_makes_a_run_look_cheaper",),
    ),
    Sabotage(
        "ledger-older-than-its-checkpoint",
        JOURNAL,
        "position > len(found.entries) or found.hash_at(position) != head",
        "position > len(found.entries)",
        (
            f"{CHECKPOINTS}::test_an_edited_ledger_is_refused",
            f"{JOURNALS}::test_another_ledger_is_refused_and_unlocked",
        ),
    ),
    Sabotage(
        "ledger-of-another-run",
        JOURNAL,
        "if found.run != run:",
        "if False:",
        (f"{CHECKPOINTS}::test_the_ledger_of_another_run_is_refused",),
    ),
    Sabotage(
        "two-writers",
        JOURNAL,
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        (f"{JOURNALS}::test_a_second_writer_of_the_same_process_is_refused",),
    ),
    Sabotage(
        "child-keeps-the-ledger-open",
        JOURNAL,
        "    os.register_at_fork(after_in_child=_close_in_child)",
        "    pass",
        (f"{JOURNALS}::test_a_child_process_neither_writes_nor_keeps_the_lock",),
    ),
    Sabotage(
        "ledger-overwritten",
        JOURNAL,
        "                os.link(part, path)\n",
        "                path.unlink(missing_ok=True)\n                os.link(part, path)\n",
        (f"{JOURNALS}::test_a_file_that_exists_is_never_overwritten",),
    ),
    Sabotage(
        "replaced-ledger-not-noticed",
        JOURNAL,
        "if intact and found == (ours.st_dev, ours.st_ino):",
        "if intact:",
        (LOST,),
    ),
    Sabotage(
        "cut-ledger-not-noticed",
        JOURNAL,
        "intact = ours.st_size == self._size and _end(self._descriptor, self._size) == self._tail",
        "intact = True",
        (LOST,),
    ),
    Sabotage(
        "ledger-edited-in-place-not-noticed",
        JOURNAL,
        "intact = ours.st_size == self._size and _end(self._descriptor, self._size) == self._tail",
        "intact = ours.st_size == self._size",
        (LOST,),
    ),
    Sabotage(
        "ledger-replaced-within-a-write-not-noticed",
        JOURNAL,
        "(self._tail + content)[-_TAIL:]\n        self.refuse_lost()\n",
        "(self._tail + content)[-_TAIL:]\n",
        (f"{LOST}::test_a_step_is_not_released_if_the_file_is_replaced_while_its_line_is_written",),
    ),
    Sabotage(
        "checkpoint-of-a-lost-ledger",
        SAVED,
        "            self._journal.refuse_lost()\n            state, place = self.state_dict(), Path(path)\n",
        "            state, place = self.state_dict(), Path(path)\n",
        (f"{LOST}::test_no_checkpoint_is_saved_for_a_ledger_that_is_lost",),
    ),
    Sabotage(
        "two-starters-share-a-file",
        DURABLE,
        'part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")\n',
        'part = path.with_name(f".{path.name}.{os.getpid()}.part")\n    part.unlink(missing_ok=True)\n',
        (f"{LOST}::test_two_starters_with_one_process_number_do_not_write_one_file",),
    ),
    Sabotage(
        "damaged-checkpoint-is-loaded",
        CHECKPOINT,
        "if hashlib.sha256(payload).hexdigest().encode() != found[2]:",
        "if False:",
        (f"{CHECKPOINTS}::test_any_change_of_the_bytes_is_refused",),
    ),
    Sabotage(
        "checkpoint-for-everybody",
        CHECKPOINT,
        "mode=0o600)",
        "mode=0o666)",
        (f"{CHECKPOINTS}::test_only_the_owner_may_read_it_and_nothing_is_left_beside",),
    ),
    Sabotage(
        "code-from-a-checkpoint",
        CHECKPOINT,
        "weights_only=True",
        "weights_only=False",
        (f"{CHECKPOINTS}::test_no_code_is_run_from_a_file",),
    ),
    Sabotage(
        "noise-not-resumed",
        STATE,
        '        self._source.load_state_dict(state["noise"])\n',
        "",
        (f"{CHECKPOINTS}::test_secure_noise_repeats_lost_steps_bit_for_bit",),
    ),
    Sabotage(
        "draws-not-resumed",
        STATE,
        '        self.loader.draws = state["draws"]\n',
        "",
        ("tests/test_private.py::test_a_resumed_run_is_bit_identical",),
    ),
    Sabotage(
        "thresholds-not-resumed",
        STATE,
        'self._set_policy({name: value.clone() for name, value in state["policy"].items()})',
        "pass",
        ("tests/thresholds/test_private_policies.py::test_thresholds_survive_a_resume",),
    ),
    Sabotage(
        "ledger-not-resumed",
        STATE,
        '        self.ledger = Ledger.from_dict(state["ledger"])\n',
        "",
        ("tests/test_private.py::test_a_resumed_run_is_bit_identical",),
    ),
    Sabotage(
        "state-of-another-plan",
        STATE,
        "        refusals.refuse_other_plan(state, self.plan.to_dict())\n",
        "",
        ("tests/test_private.py::test_a_state_of_another_plan_is_refused_by_what_differs",),
    ),
    Sabotage(
        "reseeding-repeats-the-noise",
        SAVED,
        "            self._source.renew(self.ledger.steps - self._journal.pending, self.loader.draws)\n",
        "            pass\n",
        (f"{CHECKPOINTS}::test_reseeding_leaves_the_lost_steps_counted_and_takes_new_noise",),
    ),
    Sabotage(
        "reseeding-forgets-the-lost-steps",
        SAVED,
        "(found.ledger() if reseed else found.recorded())",
        "(found.recorded() if not reseed else Ledger())",
        (f"{CHECKPOINTS}::test_reseeding_leaves_the_lost_steps_counted_and_takes_new_noise",),
    ),
    Sabotage(
        "steps-taken-are-those-recorded",
        PRIVATE,
        "return self.ledger.steps - (self._journal.pending if self._journal else 0)",
        "return self.ledger.steps",
        (f"{CHECKPOINTS}::test_an_interrupted_run_ends_like_one_that_was_not",),
    ),
)

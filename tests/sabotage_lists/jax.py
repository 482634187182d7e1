"""Private training in JAX: its sums, its padding, its noise, its ledger. These need the extra `jax`."""

from sabotage_lists.one import Sabotage

DATA, PRIVATE, RULES, SUMS = (f"integrations/jax/{name}.py" for name in ("data", "private", "rules", "sums"))
SAME = "tests/integrations/test_jax.py::test_three_steps_are_those_of_the_torch_run"
FORMS = "tests/integrations/test_jax_sums.py::test_every_rule_has_a_form_that_agrees_with_it_and_keeps_its_promise"

SABOTAGES = (
    Sabotage(
        "jax-pads-to-a-secret-number",
        "integrations/jax/private.py",
        "usual_rows(plan.expected_batch, plan.population)",
        "usual_rows(plan.expected_batch, size)",
        ("tests/integrations/test_jax.py::test_a_secret_number_of_records_is_nowhere_in_the_run",),
    ),
    Sabotage(
        "jax-record-without-its-factor",
        SUMS,
        'jnp.einsum("b,b...->...", share[group].astype(wide), kept,',
        'jnp.einsum("b,b...->...", jnp.sign(share[group]).astype(wide), kept,',
        ("tests/integrations/test_jax_sums.py::test_sums_and_norms_are_those_of_single_records",),
    ),
    Sabotage(
        "jax-rule-without-its-threshold",
        RULES,
        "found = _lowered(thresholds / (norms + rule.gamma))",
        "found = 1.0 / (norms + rule.gamma)",
        (FORMS,),
    ),
    Sabotage(
        "jax-rule-keeps-a-record-that-is-too-large",
        RULES,
        "jnp.where(norms <= thresholds, 1.0, _lowered(thresholds / norms))",
        "jnp.where(norms > thresholds, 1.0, _lowered(thresholds / norms))",
        (FORMS,),
    ),
    Sabotage(
        "jax-norm-of-the-last-leaf-alone",
        SUMS,
        "squares[group] += jnp",
        "squares[group] = jnp",
        ("tests/integrations/test_jax.py::test_one_record_moves_the_release_by_at_most_the_sensitivity",),
    ),
    Sabotage(
        "jax-no-noise",
        PRIVATE,
        'self._source.release("gradient", step, sums, stddevs, self.plan.expected_batch)',
        "[one / self.plan.expected_batch for one in sums]",
        (f"{SAME}[auto-s]",),
    ),
    Sabotage(
        "jax-noise-of-one-step-for-all",
        PRIVATE,
        'self._source.release("gradient", step, sums',
        'self._source.release("gradient", 0, sums',
        (f"{SAME}[auto-s]",),
    ),
    Sabotage(
        "jax-divided-by-the-realised-batch",
        PRIVATE,
        "sums, stddevs, self.plan.expected_batch)",
        "sums, stddevs, max(self._seen, 1))",
        (f"{SAME}[auto-s]",),
    ),
    Sabotage(
        "jax-noise-of-the-first-group-for-all",
        PRIVATE,
        "stddevs = [by_group[group] for group in self._groups]",
        "stddevs = [by_group[0] for group in self._groups]",
        (f"{SAME}[equal-budget]",),
    ),
    Sabotage(
        "jax-statistic-without-noise",
        PRIVATE,
        "statistic = self._noised_statistic(step, self._statistic)",
        "statistic = self._statistic",
        (f"{SAME}[dc-e]",),
    ),
    Sabotage(
        "jax-statistic-counts-padding",
        PRIVATE,
        "self._observe(np.asarray(norms)[:, :here])",
        "self._observe(np.asarray(norms))",
        (f"{SAME}[quantile]",),
    ),
    Sabotage(
        "jax-event-is-not-recorded",
        PRIVATE,
        "            self.ledger.record(event)\n",
        "            pass\n",
        (f"{SAME}[auto-s]",),
    ),
    Sabotage(
        "jax-padding-is-a-record",
        SUMS,
        "unusable = (jnp.arange(rows) >= records) | ",
        "unusable = ",
        (f"{SAME}[auto-s]",),
    ),
    Sabotage(
        "jax-records-beyond-the-padding-are-left-out",
        DATA,
        "chosen, size = part.numpy(), padded_size(len(part), self.rows)",
        "chosen, size = part.numpy()[: self.rows], self.rows",
        ("tests/integrations/test_jax.py::test_a_larger_batch_than_usual_is_whole",),
    ),
    Sabotage(
        "jax-a-batch-may-be-dropped",
        PRIVATE,
        "            raise unstepped(self._seen)\n",
        "            pass\n",
        ("tests/integrations/test_jax.py::test_a_batch_that_is_dropped_is_refused_and_can_be_had_again",),
    ),
    Sabotage(
        "jax-a-part-of-the-batch-is-enough",
        PRIVATE,
        "if self._open is not None or self._seen != self._batch.records:",
        "if self._open is not None:",
        ("tests/integrations/test_jax.py::test_gradients_that_are_not_of_the_open_batch_are_refused",),
    ),
    Sabotage(
        "jax-gradients-counted-twice",
        PRIVATE,
        "        self._open = None\n        rule,",
        "        rule,",
        ("tests/integrations/test_jax.py::test_gradients_that_are_not_of_the_open_batch_are_refused",),
    ),
    Sabotage(
        "jax-broken-data-count-in-the-groups-where-they-are-finite",
        SUMS,
        " | (broken & jnp.isinf(norms).any(0))",
        "",
        ("tests/integrations/test_jax.py::test_a_record_whose_data_are_not_finite_adds_nothing_to_any_group",),
    ),
    Sabotage(
        "jax-update-inside-jit",
        PRIVATE,
        "if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):",
        "if False:",
        ("tests/integrations/test_jax.py::test_update_inside_jit_is_refused",),
    ),
)

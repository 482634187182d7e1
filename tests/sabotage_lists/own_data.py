"""Data of the user's own: nothing about it is learned from the records, nothing of it is shown."""

from sabotage_lists.one import Sabotage

OWN, BODIES, TRAINING = "app/data/own", "app/commands", "app/training"
TABLES, COMMANDS = "tests/app/test_own_tables.py", "tests/app/test_cli_own.py"
TEXTS = "tests/app/test_own_texts.py"

SABOTAGES = (
    Sabotage(
        "test-rows-chosen-by-their-place",
        f"{OWN}/splitting.py",
        'digest = hashlib.blake2b(key + b"\\x1e%d" % seen[key], digest_size=8).digest()',
        'digest = hashlib.blake2b(b"%d" % len(found), digest_size=8).digest()',
        (TABLES,),
    ),
    Sabotage(
        "range-taken-from-the-rows",
        f"{OWN}/rules.py",
        "scaled: Array = (values - self.centre) / self.scale",
        "scaled: Array = (values - values.mean()) / self.scale",
        (TABLES,),
    ),
    Sabotage(
        "number-not-cut-off",
        f"{OWN}/rules.py",
        "(scaled if self.bound is None else scaled.clip(-self.bound, self.bound))",
        "scaled",
        (TABLES,),
    ),
    Sabotage(
        "unknown-class-taken-for-the-first",
        f"{OWN}/loading.py",
        "    places = classes.places(table.columns[name])\n",
        "    places = [place or 0 for place in classes.places(table.columns[name])]\n",
        (TABLES,),
    ),
    Sabotage(
        "missing-value-taken-for-zero",
        f"{OWN}/rules.py",
        "            if self.missing is None:\n",
        "            if self.missing is None:\n                return 0.0\n",
        (TABLES,),
    ),
    Sabotage(
        "words-numbered-as-they-come",
        f"{OWN}/texts.py",
        "found = [hash_word(word, self.vocabulary) for word in words(text)[: self.length]]",
        "found = [row + 1 for word in words(text)[: self.length]]",
        (TEXTS,),
    ),
    Sabotage(
        "counts-scaled-by-other-rows",
        f"{OWN}/texts.py",
        "np.linalg.norm(counts, axis=1, keepdims=True).clip(min=1)",
        "max(float(np.linalg.norm(counts)), 1.0)",
        (TEXTS,),
    ),
    Sabotage(
        "model-that-does-not-fit-trained",
        f"{TRAINING}/loop.py",
        "        refuse_misfit(model, settings.model, data, losses_of, own_loss=settings.loss is not None)\n",
        "",
        (TEXTS,),
    ),
    Sabotage(
        "cell-shown-in-an-error",
        f"{OWN}/rules.py",
        "is not a {kind}{_hint(text)}.",
        "is not a {kind}{_hint(text)}: {text}.",
        (TABLES,),
    ),
    Sabotage(
        "schema-of-the-table-itself-taken",
        f"{OWN}/loading.py",
        "if stated.made_from == table.digest:",
        "if False:",
        (TABLES, COMMANDS),
    ),
    Sabotage(
        "digest-of-the-schema-not-stored",
        f"{BODIES}/effective_config.py",
        'rules = {"made_from": own.made_from, "columns": dict(own.columns)}',
        'rules = {"columns": dict(own.columns)}',
        (COMMANDS,),
    ),
    Sabotage(
        "seed-stored-in-the-configuration",
        f"{BODIES}/effective_config.py",
        'if name not in ("seed", "test_every")}',
        'if name not in ("test_every",)}',
        (COMMANDS,),
    ),
    Sabotage(
        "setting-of-a-file-ignored",
        "app/cli/_config.py",
        "    if value != getattr(DEFAULTS, name):\n",
        "    if False:\n",
        ("tests/app/test_cli_config.py",),
    ),
    Sabotage(
        "audit-of-another-noise",
        "app/cli/audit.py",
        "noise_multiplier=multiplier, seed=seed",
        "seed=seed",
        ("tests/app/test_cli_config.py",),
    ),
    Sabotage(
        "new-rows-scaled-otherwise",
        f"{OWN}/new_records.py",
        "if name in stated else AS_IT_IS",
        "if name in stated and False else AS_IT_IS",
        (TABLES,),
    ),
    Sabotage(
        "seeded-scalars-tagged-private",
        f"{TRAINING}/board.py",
        "PRIVATE if settings.private and settings.seed is None else NOT_PRIVATE",
        "PRIVATE if settings.private else NOT_PRIVATE",
        (COMMANDS,),
    ),
    Sabotage(
        "test-score-tagged-private",
        f"{TRAINING}/board.py",
        'f"{NOT_PRIVATE}/test_{self._metric}"',
        'f"{self._covered}/test_{self._metric}"',
        (COMMANDS,),
    ),
    Sabotage(
        "own-loss-not-tried",
        f"{TRAINING}/own_loss.py",
        "    if report.problems:\n",
        "    if report.problems and False:\n",
        (COMMANDS,),
    ),
    Sabotage(
        "other-data-resumed",
        f"{BODIES}/begin.py",
        "if now.data != before.data or stated != own_data(before, **rules):",
        "if now.data != before.data:",
        (COMMANDS,),
    ),
    Sabotage(
        "run-of-another-process-discarded",
        f"{TRAINING}/saving.py",
        "if self._began and self._saving:",
        "if self._saving:",
        (COMMANDS,),
    ),
    Sabotage(
        "run-with-steps-discarded",
        "runs/run_folder.py",
        "            if not found.entries and not found.torn:\n",
        "            if not found.torn:\n",
        (COMMANDS,),
    ),
)

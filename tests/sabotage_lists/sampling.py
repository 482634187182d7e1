"""Which records are in a batch, and that every batch is stepped."""

from sabotage_lists.one import Sabotage

POISSON, LOADER = "sampling/poisson.py", "sampling/loader.py"
LAW, LOADERS, STEPPING = "tests/sampling/test_poisson.py", "tests/sampling/test_loader.py", "tests/test_stepping.py"

SABOTAGES = (
    Sabotage(
        "gaps-of-another-law",
        POISSON,
        "per_log = 1 / math.log1p(-rate)",
        "per_log = -1 / rate",
        (f"{LAW}::test_each_record_each_pair_and_their_number", f"{LAW}::test_gaps_are_those_of_exact_arithmetic"),
    ),
    Sabotage(
        "five-percent-more-records",
        LOADER,
        "poisson_sample(key, self.size, self.rate)",
        "poisson_sample(key, self.size, min(1.0, 1.05 * self.rate))",
        (f"{LOADERS}::test_batch_sizes_follow_the_binomial_law",),
    ),
    Sabotage(
        "last-record-never-drawn",
        POISSON,
        "chosen.searchsorted(size)",
        "chosen.searchsorted(size - 1)",
        (f"{LAW}::test_each_record_each_pair_and_their_number",),
    ),
    Sabotage(
        "first-record-never-drawn",
        POISSON,
        "last = -1\n",
        "last = 0\n",
        (f"{LAW}::test_each_record_each_pair_and_their_number",),
    ),
    Sabotage(
        "gaps-that-are-open-are-cut",
        POISSON,
        "unclear = low != np.floor(gaps + error)",
        "unclear = bits == 0  # only",
        (f"{LAW}::test_bits_that_leave_the_gap_open_are_seen_and_extended",),
    ),
    Sabotage(
        "64-zeros-are-a-number-like-any-other",
        POISSON,
        "unclear |= bits == 0",
        "pass",
        (f"{LAW}::test_64_zeros_leave_the_gap_open",),
    ),
    Sabotage(
        "gaps-repeat-after-the-first-lot",
        POISSON,
        "_gaps(key, count * len(found), count, size, rate)",
        "_gaps(key, 0, count, size, rate)",
        (f"{LAW}::test_how_many_gaps_are_drawn_at_a_time_decides_nothing", LAW),
    ),
    Sabotage(
        "batches-of-equal-size",
        LOADER,
        "        erase(key)\n        rank, ranks = self.share\n",
        "        chosen = torch.randperm(self.size)[: round(self.rate * self.size)].sort().values\n"
        "        rank, ranks = self.share\n",
        (f"{LOADERS}::test_batch_sizes_follow_the_binomial_law",),
    ),
    Sabotage(
        "key-of-a-draw-not-erased",
        LOADER,
        "        erase(key)\n        rank, ranks = self.share\n",
        "        rank, ranks = self.share\n",
        ("tests/noise/test_keys.py::test_whoever_has_used_a_key_erases_it",),
    ),
    Sabotage(
        "every-pass-draws-the-same",
        LOADER,
        "schedule = _Schedule(self._sampler, self.draws, steps, split)",
        "schedule = _Schedule(self._sampler, 0, steps, split)",
        (f"{LOADERS}::test_batches_are_drawn_independently_of_each_other", LOADERS),
    ),
    Sabotage(
        "empty-batches-left-out",
        LOADER,
        "            batch, parts = schedule.next()\n",
        "            batch, parts = schedule.next()\n            if not batch.records:\n                continue\n",
        (f"{LOADERS}::test_the_same_seed_gives_the_same_batches_in_every_way_of_fetching[in memory]",),
    ),
    Sabotage(
        "parts-handed-out-twice",
        LOADER,
        "            if number != self._handed_out:\n",
        "            if False:\n",
        (f"{STEPPING}::test_no_part_of_a_batch_comes_twice",),
    ),
    Sabotage(
        "two-passes-at-a-time",
        LOADER,
        "            if number != self._passes:\n",
        "            if False:\n",
        ("tests/test_misuse.py::test_no_two_batches_are_the_same_draw_however_they_are_fetched",),
    ),
    Sabotage(
        "batches-may-be-dropped",
        "private.py",
        "        if self._batch is not None:\n            raise unstepped(self._engine.seen)\n",
        "        pass\n",
        (f"{STEPPING}::test_a_batch_that_is_dropped_is_refused_at_the_next",),
    ),
    Sabotage(
        "last-batch-of-a-pass-may-be-dropped",
        LOADER,
        "        self._listener.refuse_unstepped()\n        self._passes += 1\n",
        "        self._passes += 1\n",
        (f"{STEPPING}::test_a_batch_that_is_dropped_is_refused_at_the_next",),
    ),
    Sabotage(
        "batches-of-another-rate",
        "stepping.py",
        "if batch.sampling != plan.sampling or batch.sample_rate != plan.sample_rate:",
        "if False:",
        (f"{STEPPING}::test_a_batch_that_was_not_drawn_as_planned_is_refused",),
    ),
    Sabotage(
        "data-loaders-that-sample-otherwise",
        "sampling/fetching.py",
        "if not plain or partial:",
        "if False:",
        ("tests/test_misuse.py::test_a_dataloader_that_samples_in_its_own_way_is_refused",),
    ),
)

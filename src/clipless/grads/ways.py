"""Which way each module's parameters are handled: by its layer rule, operation by operation, or as a whole."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from clipless.errors import UnsupportedModule
from clipless.grads.layout import Layout, Reading
from clipless.grads.rules import LayerRule, generic

# What a model may raise when it is given other records than it expects.
TROUBLES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, NotImplementedError)


class Ways:
    """A module with a rule is tapped at its output. One without, or called on no records (a table of positions), is
    taken operation by operation, unless its operations are not the same for every number of records, or cannot be
    traced: then it is computed again as a whole, record by record."""

    def __init__(self, rules: Mapping[str, LayerRule]) -> None:
        self.layout = Layout()
        self.learned = False
        self.reading: Reading = {}
        self.square = False
        self._trouble: Exception | None = None
        self.by_operation: set[str] = set()
        self._as_a_whole: set[str] = set()
        self._rules = rules

    def learn(self, run: Callable[[Reading, int], None], readings: Iterable[Reading], sizes: tuple[int, int]) -> bool:
        """Run the model on two numbers of records, by one reading of its input after the other until it can be run.

        All or nothing is learned; False if it could not be run by any.
        """
        try:
            for reading in readings:
                if self._learn(partial(run, reading), sizes):
                    self.reading, self.learned = reading, True
                    break
        finally:
            if not self.learned:
                self.forget()
        return self.learned

    def refusal(self) -> UnsupportedModule:
        """What to say when nothing could be learned."""
        return UnsupportedModule(
            "the model could not be run on another number of records, so it cannot be told where they lie: "
            f"{self._trouble}. Let it take batches of any size."
        )

    def _learn(self, probe: Callable[[int], None], sizes: tuple[int, int]) -> bool:
        without_rule = {name for name, rule in self._rules.items() if rule is generic}
        for _ in range(4):
            self.by_operation |= without_rule - self._as_a_whole
            unstable = self._unstable(probe, sizes)
            if unstable is None and without_rule <= self._as_a_whole:
                self.forget()
                return False
            wrong = without_rule if unstable is None else unstable
            fresh = (wrong - self._as_a_whole) | (self._without_records() - self.by_operation)
            self._as_a_whole |= wrong
            self.by_operation = (self.by_operation | self._without_records()) - self._as_a_whole
            if not fresh:
                break
        return True

    def forget(self) -> None:
        """Learn anew: a pass was refused or interrupted, and what it showed may not hold for others."""
        self.learned = False
        self.by_operation.clear()
        self._as_a_whole.clear()
        self.layout.forget()

    def _unstable(self, probe: Callable[[int], None], sizes: tuple[int, int]) -> set[str] | None:
        """Modules that cannot be taken operation by operation; None if the model could not be run."""
        self.layout.drop()
        try:
            for size in sizes:
                probe(size)
        except TROUBLES as trouble:
            self._trouble = trouble
            return None
        return self.layout.settle()

    def _without_records(self) -> set[str]:
        return (self.layout.without_records() & self._rules.keys()) - self._as_a_whole

"""Which way each module's parameters are handled: by its layer rule, operation by operation, or as a whole."""

from collections.abc import Callable, Mapping

from clipless.grads.layout import Layout
from clipless.grads.rules import LayerRule, generic


class Ways:
    """A module with a rule is tapped at its output. One without, or called on no records (a table of positions), is
    taken operation by operation, unless its operations are not the same for every number of records, or cannot be
    traced: then it is computed again as a whole, record by record."""

    def __init__(self, layout: Layout, rules: Mapping[str, LayerRule]) -> None:
        self.by_operation: set[str] = set()
        self._as_a_whole: set[str] = set()
        self._layout, self._rules = layout, rules

    def learn(self, probe: Callable[[int], None], sizes: tuple[int, int]) -> None:
        """Run the model on two numbers of records until nothing new is learned from it."""
        without_rule = {name for name, rule in self._rules.items() if rule is generic}
        for _ in range(4):
            self.by_operation |= without_rule - self._as_a_whole
            unstable = self._unstable(probe, sizes, without_rule)
            fresh = (unstable - self._as_a_whole) | (self._without_records() - self.by_operation)
            self._as_a_whole |= unstable
            self.by_operation = (self.by_operation | self._without_records()) - self._as_a_whole
            if not fresh:
                break

    def forget(self) -> None:
        """Learn anew: a pass was refused or interrupted, and what it showed may not hold for others."""
        self.by_operation.clear()
        self._as_a_whole.clear()
        self._layout.forget()

    def _unstable(self, probe: Callable[[int], None], sizes: tuple[int, int], without_rule: set[str]) -> set[str]:
        """Modules that cannot be taken operation by operation; all of them if the model cannot be run at all."""
        try:
            for size in sizes:
                probe(size)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, NotImplementedError):
            self._layout.drop()
            return without_rule
        return self._layout.settle()

    def _without_records(self) -> set[str]:
        return (self._layout.without_records() & self._rules.keys()) - self._as_a_whole

"""One pattern of calling the model, and how each module's parameters are handled in it."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from clipless.errors import UnsupportedModule
from clipless.gradients.capture.layout import Layout, Place
from clipless.gradients.layers import LayerRule, generic
from clipless.gradients.records import TROUBLES, Reading


class CallPattern:
    """What was learned of one pattern: the layout, which inputs carry records (`reading`), and the modules that are taken
    operation by operation.

    A module with a rule is tapped at its output. One without, or called on no records (a table of positions), is taken
    operation by operation, unless its operations change with the number of records or cannot be traced: then it is computed
    again as a whole, record by record. `square` says that so far every input had as many positions as records.

    `multiples` says that records lie together with positions somewhere, so that probes take a multiple of their number for
    them. `routed` modules are taken operation by operation although the data decide on the operations: seeds tell the
    records of their rows.

    `strays` are parameters that are used outside their module's forward: traced tensors stand for them everywhere but there.

    `single_tensors` has the places of modules that take and return one tensor, with the dimension of the records in
    both, and `single_input` says that the model itself is called with one tensor, records first: by which module, in
    which mode, of which rank. Both are what most calls are, found again without looking at anything else.
    """

    def __init__(self, rules: Mapping[str, LayerRule]) -> None:
        self.layout = Layout()
        self.learned = False
        self.reading: Reading = {}
        self.square = False
        self.by_operation: set[str] = set()
        self.routed: set[str] = set()
        self.strays: set[str] = set()
        self.single_tensors: dict[Place, int] = {}
        self.single_input: tuple[int, bool, int] | None = None
        self._as_a_whole: set[str] = set()
        self.multiples = False
        self._rules = rules
        self._trouble: Exception | None = None

    def learn(
        self,
        run: Callable[[Reading, int], None],
        readings: Iterable[Reading],
        sizes: tuple[int, int],
        multiples: Callable[[], tuple[int, int]],
    ) -> bool:
        """Run the model on two numbers of records, by one reading of its input after the other until it can be run. Where
        parameters meet records that lie together with positions, these numbers are `multiples()`.

        Learns everything or nothing; False if it could not be run by any.
        """
        try:
            for reading in readings:
                if self._learn(partial(run, reading), sizes, multiples):
                    self.reading, self.learned = reading, True
                    break
        finally:
            if not self.learned:
                self.forget()
        return self.learned

    def refusal(self) -> UnsupportedModule:
        """What to raise when nothing could be learned."""
        return UnsupportedModule(
            "the model could not be run on another number of records, so it cannot be told where they lie: "
            f"{self._trouble}. Let it take batches of any size."
        )

    def forget(self) -> None:
        """Forget what was learned: a pass was refused or interrupted, and what it showed may not hold for others."""
        self.learned = False
        self.by_operation.clear()
        self._as_a_whole.clear()
        self.routed.clear()
        self.strays.clear()
        self.multiples = False
        self.single_tensors.clear()
        self.layout.forget()

    def remember_single(self, place: Place) -> None:
        """Note the place if a probe has found one tensor there, going in and coming out, with records along one
        dimension."""
        given, returned = self.layout.known(place), self.layout.known(place.output())
        if given is not None and given == returned and len(given) == 1 and given[0] is not None and given[0] >= 0:
            self.single_tensors[place] = given[0]

    def _learn(
        self, probe: Callable[[int], None], sizes: tuple[int, int], multiples: Callable[[], tuple[int, int]]
    ) -> bool:
        without_rule = {name for name, rule in self._rules.items() if rule is generic}
        for _ in range(8):
            self.by_operation |= without_rule - self._as_a_whole
            unstable = self._unstable(probe, sizes)
            if unstable is not None and not self.layout.strays <= self.strays:
                self.strays |= self.layout.strays
                continue
            with_rows = self.layout.modules_with_rows() & without_rule
            if unstable is not None and self.layout.has_rows and self.by_operation and not self.multiples:
                self.multiples, sizes = True, multiples()
                self.by_operation |= self._without_records()
                continue
            if unstable is not None:
                unstable -= self.routed - self.layout.given_up
            if unstable is not None and (unstable & with_rows) - self.routed - self._as_a_whole:
                self.routed |= unstable & with_rows
                continue
            if unstable is None and without_rule <= self._as_a_whole:
                self.forget()
                return False
            wrong = without_rule if unstable is None else unstable
            fresh = (wrong - self._as_a_whole) | (self._without_records() - self.by_operation)
            self._as_a_whole |= wrong
            self.routed -= wrong
            self.by_operation = (self.by_operation | self._without_records()) - self._as_a_whole
            if not fresh:
                break
        return True

    def _unstable(self, probe: Callable[[int], None], sizes: tuple[int, int]) -> set[str] | None:
        """Modules that cannot be taken operation by operation; None if the model could not be run."""
        self.layout.drop_passes()
        try:
            for size in sizes:
                probe(size)
        except TROUBLES as trouble:
            self._trouble = trouble
            return None
        return self.layout.settle()

    def _without_records(self) -> set[str]:
        return (self.layout.without_records() & self._rules.keys()) - self._as_a_whole

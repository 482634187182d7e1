"""A pattern of calling the model: where its records lie, and how each module's parameters are handled."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from clipless.errors import UnsupportedModule
from clipless.gradients.capture.layout import Layout, Place
from clipless.gradients.layers import LayerRule, generic
from clipless.gradients.records import TROUBLES, Reading


class CallPattern:
    """What probes have learned about one pattern: the layout, and which inputs carry records (`reading`).

    A module with a rule is tapped at its output. A module without a rule, or one called on no records (a table of
    positions), is handled operation by operation (`by_operation`). If its operations depend on the number of records or
    cannot be traced, it is recomputed as a whole, record by record.

    `square`: so far every input had as many positions as records. `multiples`: some tensors have records and positions in
    one dimension, so probes also accept a multiple of the number of records as its size. `has_rows`: modules with
    parameters are called on rows that are not the records, or that the data put in order, so seeds go through every pass.
    `routed` modules are handled operation by operation although the data decide which operations run; seeds identify the
    records of their rows.
    `strays` are parameters that are used outside their module's forward; everywhere else traced tensors replace them.

    `unchecked` until seeds have confirmed, on more than one record, what the probes found.

    A shortcut for the most common calls: `single_tensors` has the places of modules that take and return one tensor, with
    the dimension of the records in both; `single_input` has (id of the module, training mode, rank) if the model is called
    with a single tensor, records first.
    """

    def __init__(self, rules: Mapping[str, LayerRule]) -> None:
        self.layout = Layout()
        self.learned = False
        self.unchecked = True
        self.reading: Reading = {}
        self.square = False
        self.by_operation: set[str] = set()
        self.routed: set[str] = set()
        self.strays: set[str] = set()
        self.single_tensors: dict[Place, int] = {}
        self.single_input: tuple[int, bool, int] | None = None
        self._as_a_whole: set[str] = set()
        self.multiples = False
        self.has_rows = False
        self._rules = rules
        self._trouble: Exception | None = None

    def learn(
        self,
        run: Callable[[Reading, int], None],
        readings: Iterable[Reading],
        sizes: tuple[int, int],
        multiples: Callable[[], tuple[int, int]],
    ) -> bool:
        """Run the model on two numbers of records, trying the readings of its input until one works. The numbers are
        `sizes`, or `multiples()` if parameters meet tensors with records and positions in one dimension.

        Returns False, with nothing learned, if no reading works.
        """
        try:
            for reading in readings:
                if self._learn(partial(run, reading), sizes, multiples):
                    self.by_operation -= self._unmet()
                    self.has_rows = not self._with_rows().isdisjoint(self._rules)
                    self.reading, self.learned = reading, True
                    break
        finally:
            if not self.learned:
                self.forget()
        return self.learned

    def refusal(self) -> UnsupportedModule:
        """The error to raise if nothing could be learned."""
        if isinstance(self._trouble, UnsupportedModule):
            return self._trouble
        return UnsupportedModule(
            "the model could not be run on another number of records, which is how clipless finds where they lie: "
            f"{_without_numbers(self._trouble)}. Let it take batches of any size."
        )

    def forget(self) -> None:
        """Forget what was learned, because a pass was refused or interrupted and may not be typical."""
        self.learned, self.unchecked = False, True
        self.by_operation.clear()
        self._as_a_whole.clear()
        self.routed.clear()
        self.strays.clear()
        self.multiples = self.has_rows = False
        self.single_tensors.clear()
        self.layout.forget()

    def remember_single(self, place: Place) -> None:
        """Remember the place if the module takes and returns one tensor there, with the records along the same dimension."""
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
            if not (self.layout.strays <= self.strays and self.layout.swapped <= self.by_operation):
                self.strays |= self.layout.strays
                self.by_operation |= self.layout.swapped
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
        """Modules that cannot be handled operation by operation; None if the model could not be run."""
        self.layout.drop_passes()
        try:
            for size in sizes:
                probe(size)
        except TROUBLES as trouble:
            self._trouble = trouble
            return None
        return self.layout.compare_passes()

    def _with_rows(self) -> set[str]:
        return self.layout.modules_with_rows() | self.layout.reordered

    def _unmet(self) -> set[str]:
        """Modules without a rule that no probe met, such as an expert that got no records: taken as a whole."""
        return {name for name in self._rules if not self.layout.knows(Place(name, 1))}

    def _without_records(self) -> set[str]:
        return (self.layout.without_records() & self._rules.keys()) - self._as_a_whole


def _without_numbers(trouble: Exception | None) -> str:
    """What an error says, without numbers: one of them may be that of the records in the batch."""
    return re.sub(r"\d+", "n", str(trouble))

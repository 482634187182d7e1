"""Runs the drawn candidates and finds the best."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from clipless.app.tuning.pools import InProcess, Pool
from clipless.app.tuning.worker import Outcome, Task, run

ATTEMPTS = 2


def outcomes(tasks: Sequence[Task], pool: Pool, on_steps: Callable[[int], None]) -> Iterator[Outcome]:
    """The outcome of every task, in the order in which they come in. `on_steps` is called with the number of new steps.

    A task whose process died is repeated alone, with the same candidate and seed. If its process dies `ATTEMPTS` times it
    has failed, which is the worst outcome. Other errors are raised.
    """
    return _Execution(tasks, pool, on_steps).outcomes()


def best(runs: Iterator[Outcome]) -> Outcome:
    """The outcome with the best score; among equals the one drawn first, whichever finished first."""
    return max(runs, key=lambda outcome: (outcome.score, -outcome.place))


class _Execution:
    """Tasks that wait, that are running, and that were lost and run alone next."""

    def __init__(self, tasks: Sequence[Task], pool: Pool, on_steps: Callable[[int], None]) -> None:
        self._waiting = deque(tasks)
        self._lost: deque[Task] = deque()
        self._deaths: Counter[int] = Counter()
        self._running: dict[Future[Outcome], Task] = {}
        self._pool, self._on_steps = pool, on_steps
        self._alone = self._broken = False

    def outcomes(self) -> Iterator[Outcome]:
        while self._waiting or self._lost or self._running:
            if not self._running and self._broken:
                self._pool.renew()
                self._broken = False
            if not self._running and self._lost:
                self._alone = True
                self._start(self._lost.popleft())
            while self._waiting and not self._lost and not self._alone and len(self._running) < self._pool.width:
                self._start(self._waiting.popleft())
            for future in wait(self._running, return_when=FIRST_COMPLETED).done:
                yield from self._collect(future)

    def _start(self, task: Task) -> None:
        try:
            if isinstance(self._pool, InProcess):
                future = self._pool.submit(run, task, _increments(self._on_steps))
            else:
                future = self._pool.submit(run, task)
        except self._pool.lost:  # the pool broke before this task began
            self._lost.append(task)
            self._broken = True
            return
        self._running[future] = task

    def _collect(self, future: "Future[Outcome]") -> Iterator[Outcome]:
        task = self._running.pop(future)
        alone, self._alone = self._alone or self._pool.width == 1, False
        try:
            outcome = future.result()
        except self._pool.lost:
            self._broken = True
            self._deaths[task.place] += alone
            if self._deaths[task.place] < ATTEMPTS:
                self._lost.append(task)
                return
            outcome = Outcome(task.place, task.candidate)
        if not isinstance(self._pool, InProcess):
            self._on_steps(task.steps)
        yield outcome


def _increments(on_steps: Callable[[int], None]) -> Callable[[int], None]:
    seen = 0

    def at(step: int) -> None:
        nonlocal seen
        on_steps(step - seen)
        seen = step

    return at

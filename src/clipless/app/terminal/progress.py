"""Progress bars on stderr, all with the time elapsed and the time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from clipless.app.progress import OnProgress
from clipless.app.terminal.output import Console, is_quiet, metric_text, short

if TYPE_CHECKING:
    from clipless.app.training import TrainingProgress

PERCENT = "{task.percentage:>3.0f} %"


def progress_bar(*texts: str, visible: bool, on_terminal_only: bool = False) -> Progress:
    """A bar with these columns of text beside it. One for terminals only disappears at the end and reaches no log."""
    console = Console(stderr=True)
    shown = visible and not is_quiet() and (console.is_terminal or not on_terminal_only)
    timing = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *map(TextColumn, texts), *timing)
    return Progress(*columns, console=console, transient=on_terminal_only, disable=not shown)


@contextmanager
def fraction_bar(title: str, *, visible: bool) -> Iterator[Callable[[float], None]]:
    """A bar for terminals only, moved by the fraction that is done."""
    with progress_bar(PERCENT, visible=visible, on_terminal_only=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def reporting_bar(*, visible: bool) -> Iterator[OnProgress]:
    """A bar for terminals only, which appears with the first report."""
    bar, tasks = progress_bar(PERCENT, visible=visible, on_terminal_only=True), list[TaskID]()

    def report(what: str, done: float, total: float) -> None:
        if not tasks:
            bar.start()
            tasks.append(bar.add_task(what))
        bar.update(tasks[0], description=what, completed=done, total=total)

    try:
        yield report
    finally:
        bar.stop()


class TrainingBar:
    """The steps taken, epsilon spent, the threshold and the last test, shown from the first report on."""

    def __init__(self, title: str, bar: Progress, metric: str) -> None:
        self._title, self._bar, self._metric = title, bar, metric
        self._task: TaskID | None = None

    def __call__(self, progress: "TrainingProgress") -> None:
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=progress.steps, epsilon="-", score="-", threshold="-")
        self._bar.update(
            self._task,
            completed=progress.step,
            epsilon=short(progress.epsilon),
            score=metric_text(self._metric, progress.score),
            threshold=short(progress.threshold),
        )


@contextmanager
def training_bar(title: str, *, visible: bool, metric: str = "accuracy") -> Iterator[TrainingBar]:
    """A live bar while the block runs; nothing at all if it is not visible."""
    fields = ("ε {task.fields[epsilon]}", "R {task.fields[threshold]}", "test {task.fields[score]}")
    bar = progress_bar("{task.completed}/{task.total} steps", *fields, visible=visible)
    try:
        yield TrainingBar(title, bar, metric)
    finally:
        if bar.tasks:
            with suppress(OSError):  # the run is saved, and goes on to its summary
                bar.stop()

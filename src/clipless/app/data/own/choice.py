"""What the user states about data of their own: the target, the task, and the public rules of the columns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from clipless.arguments import named
from clipless.errors import InvalidArgument

# The words of the command line, and the tasks of clipless.app.training.
TASK_WORDS = {"classes": "classes", "regression": "numbers", "labels": "labels"}


@dataclass(frozen=True)
class OwnData:
    """`target` names the columns to predict, `task` is one of `TASK_WORDS`, `classes` a number or names separated by commas.
    `columns` has the rules of the columns as in a schema file, `made_from` the digest of the table that the schema was made
    from. `drop` names columns that are left out, `test` a table of test records."""

    target: tuple[str, ...] = ()
    task: str | None = None
    classes: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    made_from: str | None = None
    drop: tuple[str, ...] = ()
    test: str | None = None

    def refuse_on(self, what: str, allowed: tuple[str, ...] = ()) -> None:
        """Raises InvalidArgument if anything is stated that data of this kind does not need."""
        given = [one.name for one in fields(self) if getattr(self, one.name) and one.name not in allowed]
        if given:
            raise InvalidArgument(
                f"--{given[0].replace('_', '-')} is for tables (csv, Parquet), and {what}: leave it out."
            )

    def class_names(self) -> list[str] | None:
        """The stated classes: 0, 1, 2, ... for a number; None if none are stated.

        >>> OwnData(classes="3").class_names(), OwnData(classes="no, yes").class_names()
        (['0', '1', '2'], ['no', 'yes'])
        """
        if self.classes is None:
            return None
        names = [name.strip() for name in self.classes.split(",")]
        if len(names) == 1 and names[0].isdecimal():
            names = [str(number) for number in range(int(names[0]))] if len(names[0]) < 7 else names
        if len(names) < 2 or not all(names) or len(set(names)) < len(names):
            raise InvalidArgument(
                "--classes is the number of classes, at least 2, or their names separated by commas, each once, as no,yes."
            )
        return names

    def stated_task(self) -> str | None:
        """The task by its internal name; None if it is not stated."""
        return None if self.task is None else named("task", self.task, TASK_WORDS)

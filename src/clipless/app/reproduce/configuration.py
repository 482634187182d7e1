"""One experiment of a paper as data: what is trained, over which grid, and what was published. A TOML file each.

The files lie in the package and not in `experiments/`, so that `clipless reproduce` finds them where only the package is
installed.
"""

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from clipless.accounting.selection import RunShape
from clipless.app import clippings
from clipless.app.reproduce import choosing
from clipless.app.reproduce.choosing import Choosing
from clipless.app.training import TrainingSettings
from clipless.app.tuning.candidates import flattened, shape_of
from clipless.arguments import named
from clipless.errors import InvalidArgument

FOLDER = files("clipless.app.reproduce") / "configurations"
ENDING = ".toml"
NOT_FOR_PLAIN = ("epsilon", "accountant", "delta", "noise_multiplier", "unit_gradients")
PER_CLIPPING = "clipping."
ANY_SIZE = 1_000_000


@dataclass(frozen=True)
class Row:
    """One line of a table: a name and the settings that it has of its own. It may leave out parts of the grid, have some
    settings chosen privately, and train on other `data` than the experiment.
    """

    name: str
    settings: Mapping[str, Any]
    without: tuple[str, ...] = ()
    choosing: Choosing | None = None
    data: str | None = None


@dataclass(frozen=True)
class Published:
    """A number of the paper for the runs of `row` at this point of the grid; in percent where ours is an accuracy."""

    row: str
    value: float
    interval: float | None = None
    point: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GridRun:
    """One run: a row at one point of the grid with one seed. With `choosing`, one of its candidates: the settings'
    epsilon then is that of the whole choice.
    """

    row: str
    data: str
    point: Mapping[str, Any]
    settings: TrainingSettings
    choosing: Choosing | None = None
    candidate: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """The name of its file."""
        place = {**self.point, **self.candidate, "seed": self.settings.seed}
        words = [self.row, *(f"{key} {value}" for key, value in place.items())]
        return "-".join("".join(c if c.isalnum() or c in ".=" else "-" for c in word) for word in words).lower()


@dataclass(frozen=True)
class Configuration:
    """An experiment. Every row is run with each setting of the `grid`; `note` says where it differs from the paper. `readme`
    names the rows that a README shows, `pairs` the rows whose difference is shown, seed by seed.
    """

    id: str
    title: str
    source: str
    data: str
    seeds: int
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    published: tuple[Published, ...] = ()
    figure: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    readme: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    measure: tuple[str, ...] = ()
    resume: bool = False
    quick: Mapping[str, Any] = field(default_factory=dict)

    @property
    def research(self) -> bool:
        """Whether single training records are looked at, so that the figures are not private."""
        return "norms" in self.measure

    def cells(self, seeds: int | None = None) -> list[GridRun]:
        """All runs, one seed after the other, so that a grid cut short is cut short evenly."""
        found = []
        for seed in range(self.seeds if seeds is None else seeds):
            for row, point, candidate in self._places():
                settings = self._settings(row, {**point, **candidate}, seed)
                found.append(GridRun(row.name, row.data or self.data, point, settings, row.choosing, candidate))
        return found

    def quickly(self) -> "Configuration":
        """A smaller experiment, whose numbers are not the paper's."""
        changes = dict(self.quick)
        names = changes.pop("rows", None)
        rows = tuple(row for row in self.rows if names is None or row.name in names)
        settings = {**self.settings, **changes.pop("settings", {})}
        grid = {**self.grid, **{key: tuple(values) for key, values in changes.pop("grid", {}).items()}}
        seeds = changes.pop("seeds", 1)
        if changes:
            raise InvalidArgument(f"{self.id}: [quick] has no {', '.join(changes)}.")
        return replace(
            self, rows=rows, settings=settings, grid=grid, seeds=seeds, published=(), title=f"{self.title} (quick)"
        )

    def published_for(self, row: str, point: Mapping[str, Any]) -> Published | None:
        """What the paper has for this row and point."""
        for one in self.published:
            if one.row == row and all(point.get(key) == value for key, value in one.point.items()):
                return one
        return None

    def _places(self) -> Iterator[tuple[Row, dict[str, Any], dict[str, Any]]]:
        for row in self.rows:
            for point in self._points(row):
                for candidate in [{}] if row.choosing is None else row.choosing.candidates():
                    yield row, point, candidate

    def _points(self, row: Row) -> Iterator[dict[str, Any]]:
        plain = row.settings.get("clipping", self.settings.get("clipping")) == "none"
        lists = {
            key: values
            for key, values in self.grid.items()
            if key not in row.without and key not in row.settings and not (plain and key in NOT_FOR_PLAIN)
        }
        for values in itertools.product(*lists.values()):
            yield dict(zip(lists, values, strict=True))

    def _settings(self, row: Row, point: Mapping[str, Any], seed: int) -> TrainingSettings:
        chosen = {**self.settings, **row.settings, **point}
        numbers = {key.removeprefix(PER_CLIPPING): v for key, v in chosen.items() if key.startswith(PER_CLIPPING)}
        plain = {key: value for key, value in chosen.items() if not key.startswith(PER_CLIPPING)}
        made = TrainingSettings(**plain, seed=seed)
        for name, value in numbers.items():
            made = replace(made, clipping=clippings.with_parameter(made.clipping, name, str(value)))
        return made


def configurations() -> dict[str, Configuration]:
    """All experiments by their ids."""
    found = {entry.name.removesuffix(ENDING): entry for entry in FOLDER.iterdir() if is_own(entry.name)}
    return {name: parse(name, found[name].read_text(encoding="utf-8")) for name in sorted(found)}


def configuration(name: str) -> Configuration:
    """The experiment with this id, or the one that a TOML file describes, if `name` is its path."""
    return own(Path(name)) if is_own(name) else named("id", name, configurations())


def is_own(name: str) -> bool:
    """Whether this is the path of a user's configuration and not an id."""
    return name.endswith(ENDING)


def own(path: Path) -> Configuration:
    """The experiment of a user's TOML file. Its id is the file's name; title, source and seeds may be left out.

    Raises InvalidArgument if there is no such file, or with the place of a mistake.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"{path} cannot be read ({error}): give the path of a TOML file, or an id of --list."
        ) from error
    name = path.name.removesuffix(ENDING)
    return parse(name, text, {"title": name, "source": "Own configuration", "seeds": 1})


def parse(name: str, text: str, defaults: Mapping[str, Any] | None = None) -> Configuration:
    """The experiment that a TOML text describes. Raises InvalidArgument with the place of a mistake.

    Args:
        name: Its id.
        text: The TOML.
        defaults: What is taken where the text says nothing.
    """
    try:
        content = {**(defaults or {}), **tomllib.loads(text)}
        rows = tuple(map(_row, content.pop("rows")))
        published = tuple(
            Published(one.pop("row"), one.pop("value"), one.pop("interval", None), one)
            for one in content.pop("published", [])
        )
        grid = {key: tuple(values) for key, values in flattened(content.pop("grid", {})).items()}
        measure, readme = tuple(content.pop("measure", ())), tuple(content.pop("readme", ()))
        pairs = tuple((first, second) for first, second in content.pop("pairs", ()))
        made = Configuration(
            id=name, rows=rows, published=published, grid=grid, measure=measure, readme=readme, pairs=pairs, **content
        )
        for shown in (*made.readme, *itertools.chain.from_iterable(pairs)):
            named("row", shown, {row.name: row for row in rows})  # or raises
        for cell in (*made.cells(), *made.quickly().cells()):
            if cell.settings.private:
                clippings.parse(cell.settings.clipping)  # or raises
        _refuse_unlike(made.cells(1))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"the configuration {name} cannot be read: {error}.") from error
    return made


def _row(content: Mapping[str, Any]) -> Row:
    return Row(
        content["name"],
        content.get("settings", {}),
        tuple(content.get("without", ())),
        choosing.read(content.get("choose")),
        content.get("data"),
    )


def _refuse_unlike(cells: Sequence[GridRun]) -> None:
    """A choice is priced for runs that release alike: as many steps, of batches and noise schedules that are the same."""
    shapes: dict[str, RunShape] = {}
    for cell in cells:
        if cell.choosing is not None:
            shape = shape_of(cell.settings, ANY_SIZE)
            if shapes.setdefault(f"{cell.row} {cell.point}", shape) != shape:
                raise InvalidArgument(f"the candidates of {cell.row!r} differ in steps, batches or noise schedule")

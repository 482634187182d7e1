"""Tables of the user's own: what becomes of each column by public rules alone, and what is refused."""

import datetime
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from clipless.app.data import Data, OwnData, load, load_features
from clipless.app.data.own.reading import read
from clipless.app.data.own.splitting import test_rows as rows_for_testing
from clipless.errors import InvalidArgument, MissingLibrary

JOBS = ("cook", "clerk", "smith")
COLUMNS: dict[str, Any] = {
    "age": {"low": 0, "high": 100, "missing": 50},
    "height": {"centre": 170, "scale": 10},
    "job": {"categories": ["cook", "clerk"]},
    "born": {"low": datetime.date(1900, 1, 1), "high": datetime.date(2000, 1, 1)},
    "note": {"use": False},
}
HEADER = "age,height,job,born,note,paid"
ROWS = [f"{i % 120},{150 + i % 50},{JOBS[i % 3]},{1900 + i % 100}-01-01,<b>{i}</b>,{i % 2}" for i in range(60)]
STATED = OwnData(target=("paid",), classes="2", columns=COLUMNS)


def write(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def people(folder: Path, rows: list[str] = ROWS, header: str = HEADER, name: str = "t.csv") -> Path:
    return write(folder, "\n".join([header, *rows]) + "\n", name)


def records(data: Data) -> list[tuple[float, ...]]:
    """All records, in an order of their own."""
    parts = (torch.cat([x, y.reshape(len(y), -1).float()], dim=1) for x, y in (data.train.tensors, data.test.tensors))
    return sorted(tuple(row) for part in parts for row in part.tolist())


def test_columns_become_numbers_by_their_rules(tmp_path: Path) -> None:
    row = "25,180,cook,1900-01-01,x,1"
    data = load(people(tmp_path, [*ROWS, row]), own=STATED)
    assert (data.shape, data.classes, data.task, data.notes) == ((6,), 2, "classes", ())
    assert (-0.5, 1.0, 1.0, 0.0, 0.0, -1.0, 1.0) in records(data)
    assert data.columns is not None
    assert data.columns["features"] == ["age", "height", "job", "born"]


def test_new_rows_are_encoded_as_in_training(tmp_path: Path) -> None:
    """By what run.json holds, in which dates are texts; without the target, in another order, with columns of no use."""
    path = people(tmp_path, [*ROWS, ",180,baker,1950-07-01,x,1"])
    data = load(path, own=replace(STATED, test=str(path)))
    stored = json.loads(json.dumps(data.columns))
    assert stored["classes"] == ["0", "1"]
    table = read(path)
    names = ["born", "job", "other", "height", "age"]
    rows = zip(*(table.columns.get(name, ["?"] * len(table)) for name in names), strict=True)
    new = write(tmp_path, "\n".join([",".join(names), *map(",".join, rows)]) + "\n", "new.csv")
    assert torch.equal(load_features(new, stored), data.test.tensors[0])
    with pytest.raises(InvalidArgument, match=r"new\.csv has no column 'aged': did you mean 'age'\?"):
        load_features(new, stored | {"features": ["aged"]})


def test_the_classes_of_a_run_are_those_of_the_schema(tmp_path: Path) -> None:
    columns = COLUMNS | {"paid": {"categories": ["1", "0"]}}
    data = load(people(tmp_path), own=replace(STATED, classes=None, columns=columns))
    assert data.columns is not None
    assert data.columns["classes"] == ["1", "0"]


def test_missing_and_unknown_values_have_places_of_their_own(tmp_path: Path) -> None:
    data = load(people(tmp_path, [*ROWS, ",170,pilot,2100-05-05,x,0", "500,170,NA,1800-05-05,x,0"]), own=STATED)
    assert (0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0) in records(data)
    assert (1.0, 0.0, 0.0, 0.0, 1.0, -1.0, 0.0) in records(data)


@given(st.integers(0, 59), st.lists(st.integers(0, 5), min_size=6, max_size=60))
def test_a_row_is_encoded_and_put_aside_by_itself(left_out: int, values: list[int]) -> None:
    """Removing one row changes neither what the others become nor which of them are for testing: so the training parts of
    two such tables differ in one record at most, equal rows included."""
    import tempfile

    rows = [f"{v},{160 + v},{JOBS[v % 3]},1950-01-0{v + 1},x,{v % 2}" for v in values]
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for kept in (rows, [row for place, row in enumerate(rows) if place != left_out % len(rows)]):
            table = read(people(Path(folder), kept))
            parts.append(sorted(zip(zip(*table.columns.values(), strict=True), rows_for_testing(table), strict=True)))
    whole, less = parts
    for one in less:
        whole.remove(one)
    assert len(whole) == 1


def test_the_order_of_rows_does_not_matter(tmp_path: Path) -> None:
    forth, back = (load(people(tmp_path, rows), own=STATED) for rows in (ROWS, ROWS[::-1]))
    assert sorted(map(tuple, forth.test.tensors[0].tolist())) == sorted(map(tuple, back.test.tensors[0].tolist()))
    assert 4 <= len(forth.test) <= 25


FORMS: dict[str, Callable[[Path], Path]] = {
    "semicolons": lambda p: write(p, "\n".join([HEADER, *ROWS]).replace(",", ";")),
    "tabs": lambda p: write(p, "\n".join([HEADER, *ROWS]).replace(",", "\t"), "t.tsv"),
    "byte order mark": lambda p: write(p, "\ufeff" + "\n".join([HEADER, *ROWS])),
    "carriage returns": lambda p: write(p, "\r\n".join([HEADER, *ROWS, ""])),
    "gzip": lambda p: write(p, gzip.compress("\n".join([HEADER, *ROWS]).encode()), "t.csv.gz"),
    "quotes": lambda p: write(p, "\n".join([HEADER, *ROWS]).replace("cook", '"cook"').replace(",", ", ")),
    "empty rows": lambda p: write(p, "\n".join([HEADER, *ROWS, ",,,,,", "", ",,,,,"])),
    "parquet": lambda p: to_parquet(p, "t.parquet"),
}


def to_parquet(folder: Path, name: str, **changes: Any) -> Path:
    cells = list(zip(*(row.split(",") for row in ROWS), strict=True))
    table = {
        "age": [int(cell) for cell in cells[0]],
        "height": np.array(cells[1], dtype=np.float32),
        "job": pyarrow.array(cells[2]).dictionary_encode(),
        "born": [datetime.date.fromisoformat(cell) for cell in cells[3]],
        "note": cells[4],
        "paid": [cell == "1" for cell in cells[5]],
    } | changes
    parquet.write_table(pyarrow.table(table), folder / name)
    return folder / name


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_table_gives_the_same_records(tmp_path: Path, form: str) -> None:
    assert records(load(FORMS[form](tmp_path), own=STATED)) == records(load(people(tmp_path, name="a.csv"), own=STATED))


def test_regression_and_labels(tmp_path: Path) -> None:
    path = people(tmp_path)
    drop = ("job", "born", "note")
    number = load(path, own=OwnData(target=("height",), columns={"height": {"low": 100, "high": 200}}, drop=drop))
    assert (number.task, number.classes, number.shape) == ("numbers", 1, (2,))
    assert float(number.train.tensors[1].max()) == pytest.approx(0.98)
    stated = load(path, own=OwnData(target=("height",), task="regression", drop=drop))
    assert float(stated.train.tensors[1].max()) == 199
    rows = [f"{i},{'yes' if i % 2 else 'NO'},{'tall' if i % 3 else 'short'}" for i in range(40)]
    columns = {"size": {"categories": ["tall", "short"]}}
    labels = load(people(tmp_path, rows, "a,paid,size"), own=OwnData(target=("paid", "size"), columns=columns))
    assert (labels.task, labels.classes) == ("labels", 2)
    assert {row for row in records(labels) if row[0] < 3} == {(0.0, 0.0, 1.0), (1.0, 1.0, 0.0), (2.0, 0.0, 0.0)}


def test_columns_without_a_rule_are_used_as_they_are_and_said_to_be(tmp_path: Path) -> None:
    data = load(people(tmp_path), own=OwnData(target=("paid",), classes="0,1", drop=("job", "born", "note")))
    assert data.notes[0].startswith("age, height: used as numbers, as they are.")
    assert float(data.train.tensors[0].max()) > 100


def test_test_records_of_their_own(tmp_path: Path) -> None:
    other = people(tmp_path, ROWS[:7], name="test.csv")
    data = load(people(tmp_path), own=OwnData(**{**vars(STATED), "test": str(other)}))
    assert (len(data.train), len(data.test)) == (60, 7)


SIMPLE = OwnData(target=("y",), classes="2")


def table(text: str, **stated: Any) -> Callable[[Path], tuple[Path, OwnData]]:
    return lambda folder: (write(folder, text), OwnData(**{**vars(SIMPLE), **stated}))


SECRET = "77.123secret"
BAD: dict[str, tuple[Callable[[Path], tuple[Path, OwnData]], str]] = {
    "no target": (table("a,y\n1,0\n2,1\n", target=()), "which of the 2 columns of .* Give --target NAME"),
    "wrong target": (table("a,income\n1,0\n2,1\n", target=("incme",)), "did you mean column 2"),
    "target twice": (table("a,y\n1,0\n2,1\n", target=("y", "y"), classes=None), "given twice"),
    "wrong column": (table("age,y\n1,0\n2,1\n", columns={"agee": {"low": 0, "high": 1}}), "did you mean column 1"),
    "wrong key": (table("age,y\n1,0\n2,1\n", columns={"age": {"lo": 0, "high": 1}}), "did you mean 'low'"),
    "half a range": (table("age,y\n1,0\n2,1\n", columns={"age": {"low": 0}}), "lacks high"),
    "two rules": (
        table("age,y\n1,0\n2,1\n", columns={"age": {"low": 0, "high": 1, "categories": ["a"]}}),
        "contradict",
    ),
    "range turned": (table("age,y\n1,0\n2,1\n", columns={"age": {"low": 1, "high": 0}}), "not below its high"),
    "range of nan": (
        table("age,y\n1,0\n2,1\n", columns={"age": {"low": float("nan"), "high": 1}}),
        "not a finite number",
    ),
    "scale 0": (table("age,y\n1,0\n2,1\n", columns={"age": {"centre": 1, "scale": 0}}), "not positive"),
    "categories twice": (table("a,y\n1,0\n2,1\n", columns={"a": {"categories": ["1", 1]}}), "each once"),
    "no table": (table("a,y\n1,0\n2,1\n", columns={"a": 3}), "is not a table"),
    "classes not said": (table("a,y\n1,0\n2,1\n", classes=None), "They are not inferred from the records"),
    "one class": (table("a,y\n1,0\n2,1\n", classes="1"), "at least 2"),
    "one category": (
        table("a,y\n" + "1,0\n2,0\n" * 9, classes=None, columns={"y": {"categories": [0]}}),
        "at least two",
    ),
    "another class": (
        table(f"a,y\n1,{SECRET}\n" + "2,1\n" * 30),
        "line 2 of .*the target 'y', is none of the 2 classes",
    ),
    "missing target": (table("a,y\n1,\n" + "2,1\n" * 30), "line 2 of .*the target 'y', is none of the 2"),
    "missing": (
        table("a,y\n,0\nNaN,1\n" + "2,1\n" * 30),
        r"column 1 of .* has missing values. State .*columns\.NAME\]",
    ),
    "missing in a stated column": (
        table("a,y\n,0\nNaN,1\n" + "2,1\n" * 30, columns={"a": {"low": 0, "high": 1}}),
        r"column 'a' of .* has missing values. State .*columns\.a\]",
    ),
    "text": (table(f"a,y\n1,0\n{SECRET},0\n" + "2,1\n" * 30), "line 3 of .*column 1, is not a number. Correct it"),
    "text in a stated column": (
        table(f"a,y\n1,0\n{SECRET},0\n" + "2,1\n" * 30, columns={"a": {"low": 0, "high": 1}}),
        "line 3 of .*column 'a', is not a number. Correct it",
    ),
    "date": (table("a,y\n2020-01-31,0\n" + "2,1\n" * 30), "is not a number but a date"),
    "decimal comma": (table("a;y\n1,5;0\n" + "2;1\n" * 30), "write decimals with a point"),
    "infinity": (table("a,y\ninf,0\n" + "2,1\n" * 30), "line 2 of .*is not a number"),
    "beyond float32": (table("a,y\n1e39,0\n" + "2,1\n" * 30), "line 2 of .*is not a number"),
    "huge integer": (table("a,y\n" + "9" * 400 + ",0\n" + "2,1\n" * 30), "line 2 of .*is not a number"),
    "two columns": (table("a,a,y\n1,2,0\n"), "columns 1 and 2 of .* have the same name"),
    "no name": (table(",a,y\n0,1,0\n"), r"column 1 of .* has no name.*index=False"),
    "no header": (table("1,2,0\n3,4,1\n"), "looks like a record.* as column 1 shows"),
    "number in the header": (table(f"{SECRET},7,y\n" + "1,2,0\n" * 30), "looks like a record.* as column 2 shows"),
    "date in the header": (table(f"{SECRET},2026-01-31,y\n" + "1,2,0\n" * 30), "looks like a record.* as column 2"),
    "missing value in the header": (table(f"{SECRET},NA,y\n" + "1,2,0\n" * 30), "looks like a record.* as column 2"),
    "yes in the header": (table(f"{SECRET},Yes,y\n" + "1,2,0\n" * 30), "looks like a record.* as column 2 shows"),
    "value in the header": (
        table(f"{SECRET},b,y\n" + "1,b,0\n2,c,1\n" * 30),
        "looks like a record.* as column 2 shows",
    ),
    "record as the header": (
        table(f"{SECRET},b,y\n" + "x,c,0\n" * 30, columns={"y": {"low": 0, "high": 1}}, classes=None),
        "line 2 of .*column 1, is not a number",
    ),
    "record as the header, no target": (table(f"{SECRET},b\n" + "x,c\n" * 30, target=()), "which of the 2 columns"),
    "record as the header, wrong target": (
        table(f"{SECRET},b\n" + "x,c\n" * 30, target=(SECRET[:-1],)),
        "did you mean column 1",
    ),
    "record twice in the header": (table(f"{SECRET},{SECRET},y\n" + "x,c,0\n" * 30), "columns 1 and 2 of .*same name"),
    "record as the header of tests": (
        lambda p: (
            write(p, "a,y\n1,0\n"),
            OwnData(**{**vars(SIMPLE), "test": str(write(p, f"{SECRET},y\nx,0\n", "u.csv"))}),
        ),
        "u.csv lacks column 1 of .*t.csv",
    ),
    "empty": (table(""), "is empty"),
    "blank": (table("\n\n \n"), "no rows|is empty"),
    "header only": (table("a,y\n"), "has no rows"),
    "one row": (table("a,y\n1,0\n"), "too few rows"),
    "ragged": (table("a,y\n1,0\n1,2,3\n"), "line 3 of .* does not have as many cells"),
    "open quote": (table('a,y\n"1,0\n2,1\n'), "is not csv"),
    "only the target": (table("y\n0\n1\n"), "nothing to predict from"),
    "target dropped": (table("a,y\n1,0\n2,1\n", drop=("y",)), "left out of the table"),
    "unknown task": (table("a,y\n1,0\n2,1\n", task="regresion", classes=None), "did you mean 'regression'"),
    "classes and regression": (
        table("a,y\n1,0\n2,1\n", task="regression"),
        "leave out --classes, or --task",
    ),
    "classes and labels": (table("a,b,y\n1,1,0\n", target=("b", "y")), "--classes is for one target"),
    "two targets as classes": (
        table("a,b,y\n1,1,0\n", target=("b", "y"), classes=None, task="classes"),
        "several targets",
    ),
    "label that is none": (
        table("a,b,y\n1,maybe,0\n" + "1,yes,no\n" * 30, target=("b", "y"), classes=None),
        "line 2 of .*the label 'b', is none of 0, 1",
    ),
    "number of categories": (
        table("a,y\n" + "1,0\n2,1\n" * 9, task="regression", classes=None, columns={"y": {"categories": ["0", "1"]}}),
        "predicts numbers",
    ),
    "date range for numbers": (
        table("a,y\n17,0\n" + "2,1\n" * 30, columns={"a": COLUMNS["born"]}),
        "line 2 of .*is not a date",
    ),
    "date and number": (
        table("a,y\n17,0\n", columns={"a": {"low": datetime.date(2000, 1, 1), "high": 7}}),
        "a high that is not one",
    ),
    "test without a column": (
        lambda p: (write(p, "a,y\n1,0\n"), OwnData(**{**vars(SIMPLE), "test": str(write(p, "b,y\n1,0\n", "u.csv"))})),
        "u.csv lacks column 1 of .*t.csv",
    ),
    "latin-1": (lambda p: (write(p, "a,y\n\xe9,0\n".encode("latin-1")), SIMPLE), "not UTF-8.*iconv"),
    "utf-16": (lambda p: (write(p, "a,y\n1,0\n".encode("utf-16")), SIMPLE), "not UTF-8.*iconv -f UTF-16"),
    "not gzip": (lambda p: (write(p, b"hello", "t.csv.gz"), SIMPLE), "cannot be read"),
    "not parquet": (lambda p: (write(p, b"hello", "t.parquet"), SIMPLE), "cannot be read as Parquet"),
    "parquet lists": (
        lambda p: (to_parquet(p, "t.parquet", note=[[1]] * 60), STATED),
        "column 5 of .* is of type list<.*without that",
    ),
    "target of digits": (lambda p: (Path("digits"), SIMPLE), "--target is for tables"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_refused_with_the_remedy_and_without_its_contents(tmp_path: Path, case: str) -> None:
    make, message = BAD[case]
    path, stated = make(tmp_path)
    with pytest.raises(InvalidArgument, match=message) as refused:
        load(path, own=stated)
    assert SECRET not in str(refused.value)
    assert "30" not in str(refused.value).replace(str(tmp_path), "")  # how many rows have the fault, or do not


def test_names_that_the_user_states_may_look_like_values(tmp_path: Path) -> None:
    """Columns of pixels, or of years: whoever names them in a schema knows them."""
    path = write(tmp_path, "2019,2020,y\n" + "".join(f"{i},{i % 7},{i % 2}\n" for i in range(60)))
    columns = {"2019": {"low": 0, "high": 60}, "2020": {"low": 0, "high": 7}}
    assert load(path, own=OwnData(target=("y",), classes="2", columns=columns)).shape == (2,)
    assert load(path, own=OwnData(target=("y",), classes="2", columns=columns, drop=("2020",))).shape == (1,)
    with pytest.raises(InvalidArgument, match="as column 2 shows"):
        load(path, own=OwnData(target=("y",), classes="2", columns={"2019": columns["2019"]}))


def test_names_in_parquet_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"0": range(60), "y": [i % 2 for i in range(60)]}), path)
    assert load(path, own=OwnData(target=("y",), classes="2")).shape == (1,)


def test_a_schema_made_from_the_table_itself_is_refused(tmp_path: Path) -> None:
    path = people(tmp_path)
    made = OwnData(**{**vars(STATED), "made_from": read(path).digest})
    with pytest.raises(InvalidArgument, match="computed from the records"):
        load(path, own=made)
    assert len(load(people(tmp_path, ROWS[1:]), own=made).train)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = to_parquet(tmp_path, "t.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingLibrary, match=r"pip install 'clipless\[parquet\]'"):
        load(path, own=STATED)


FUNCTIONS = """
import numpy as np, torch
x, y = np.ones((20, 3), dtype=np.float32), np.arange(20) % 2
def good(): return {"train": (x, y), "test": (torch.ones(5, 3), torch.arange(5) % 2), "classes": 2}
def numbers(): return {"train": (x, y[:, None] * 1.0), "test": (x, y[:, None] * 1.0), "task": "regression"}
def unsaid(): return {"train": (x, y), "test": (x, y)}
def nothing(): return None
def half(): return {"train": (x, y)}
def extra(): return {"train": (x, y), "tst": (x, y)}
value = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, FUNCTIONS, "my_own_data.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_own_data", raising=False)


@pytest.mark.usefixtures("mine")
def test_data_of_a_function() -> None:
    data = load("my_own_data:good")
    assert (data.name, data.classes, data.shape, len(data.train), len(data.test)) == (
        "my_own_data.good",
        2,
        (3,),
        20,
        5,
    )
    assert load("my_own_data:unsaid", own=OwnData(classes="4")).classes == 4
    assert load("my_own_data:numbers").task == "numbers"


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unsaid", "how many classes"),
        ("nothing", "returned NoneType"),
        ("half", "no pair .* as 'test'"),
        ("extra", "did you mean 'test'"),
        ("god", "did you mean 'good'"),
        ("value", "is int. Name a callable"),
    ],
)
def test_a_function_that_returns_no_data_is_told_what_to_return(name: str, message: str) -> None:
    with pytest.raises((InvalidArgument, TypeError), match=message):
        load(f"my_own_data:{name}")
    with pytest.raises(InvalidArgument, match="cannot import the data"):
        load("no_such_module:load")

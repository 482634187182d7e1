"""Nothing that a program says shows what a record holds: data with marked values goes through every refusal there is."""

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless.app.data import OwnData, load, load_features
from clipless.app.data.tables import ADULT_COLUMNS
from clipless.distributed import Ranks
from commanding import Done, run_main

# Marked values: no name or count is like them, and a hash hardly ever.
CELL, LABEL = "SECRETCELL", 867530
MARKS = re.compile(r"secret|867530|8\.6753", re.IGNORECASE)
RECORD = f"{CELL},SECRETILL,SECRETTOWN"
QUICK = ["--model", "linear", "--epochs", "1", "--batch-size", "16", "--accountant", "rdp", "--out", "out"]
GOOD = "".join(f"{i % 7},{'b' if i % 3 else 'c'},{i % 2}\n" for i in range(60))
OWN = ["--data", "t.csv", "--target", "y", "--classes", "2"]
SCHEMA = "[columns.a]\nlow = 0\nhigh = 9\n[columns.b]\ncategories = ['b', 'c']\n"


def csv(
    *rows: str, header: str = "a,b,y", more: str = GOOD, name: str = "t.csv", encoding: str = "utf-8"
) -> Callable[[Path], None]:
    content = "\n".join([header, *rows]) + "\n" + more
    return lambda folder: (folder / name).write_bytes(content.encode(encoding))


def both(*writers: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda folder: [writer(folder) for writer in writers] and None  # type: ignore[func-returns-value, return-value]


def npz(y: np.ndarray | None = None, x: np.ndarray | None = None, **others: np.ndarray) -> Callable[[Path], None]:
    plain = np.arange(60) % 3
    features = np.ones((60, 4), np.float32)
    arrays = {
        "x_train": features if x is None else x,
        "y_train": plain if y is None else y,
        "x_test": features,
        "y_test": plain,
    } | others
    return lambda folder: np.savez(folder / "d.npz", **arrays)


def labels(value: object, kind: type = np.int64) -> np.ndarray:
    found = (np.arange(60) % 3).astype(kind)
    found[17] = value
    return found


def code(text: str) -> Callable[[Path], None]:
    start = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
    start += "x, y = torch.ones(60, 4), torch.arange(60) % 2\n"
    return lambda folder: (folder / "mine.py").write_text(start + text)


def named(name: str, text: str, *more: tuple[str, str]) -> Callable[[Path], None]:
    """Files of a named data set, with a record that is not as it should be."""

    def write(folder: Path) -> None:
        for file, content in ((name, text), *more):
            (folder / file).write_text(content)

    return write


def parquet_file(folder: Path) -> None:
    parquet.write_table(pyarrow.table({"a": [[CELL]] * 60, "y": [i % 2 for i in range(60)]}), folder / "t.parquet")


def damaged_parquet(folder: Path) -> None:
    (folder / "t.parquet").write_bytes(f"PAR1{RECORD}PAR1".encode())


def adult(folder: Path) -> None:
    row = dict.fromkeys(ADULT_COLUMNS, "1") | {"age": CELL}
    line = ", ".join(row.values())
    (folder / "adult.data").write_text("\n".join([line] * 32_561))
    (folder / "adult.test").write_text("\n".join(["|1x3 Cross validator", *[line] * 16_281]))


TOKENS = (
    "def load():\n    t = torch.randint(1, 9, (60, 5))\n    y = t.clone()\n    y[:, 2] = {value}\n"
    "    return dict(train=(t, y), test=(t, t), task='tokens', classes=9, vocabulary=9)\n"
)
FUNCTION = ["--data", "mine:load"]
NAMED = ["--data-dir", "."]

# What the data is like, and the options with which it is refused, or fails.
REFUSED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "number": (csv(f"{CELL},b,0"), [*OWN, "--schema", "s.toml"]),
    "number without a rule": (csv(f"{CELL},b,0"), [*OWN, "--drop", "b"]),
    "date": (csv(f"{CELL},b,0"), [*OWN, "--schema", "dates.toml"]),
    "number too large": (csv(f"{LABEL}e300,b,0"), [*OWN, "--schema", "s.toml"]),
    "decimal comma": (csv(f"{LABEL};b;0", header="a;b;y", more=f"{LABEL},5;b;1\n" * 30), [*OWN, "--schema", "s.toml"]),
    "class": (csv(f"1,b,{CELL}"), [*OWN, "--schema", "s.toml"]),
    "class that is a number": (csv(f"1,b,{LABEL}"), [*OWN, "--schema", "s.toml"]),
    "label": (csv(f"1,b,{CELL}"), ["--data", "t.csv", "--target", "y", "--target", "b", "--drop", "a"]),
    "target of regression": (
        csv(f"1,b,{CELL}"),
        ["--data", "t.csv", "--target", "y", "--task", "regression", "--drop", "b"],
    ),
    "missing": (csv(f",{CELL},0"), [*OWN, "--schema", "s.toml"]),
    "too many cells": (csv(f"1,{CELL},{LABEL},0"), OWN),
    "quotation mark": (csv(f'1,"{CELL},0'), OWN),
    "quotation mark within": (csv(f'1,"{CELL}"{LABEL},0'), OWN),
    "zero byte": (csv(f"1,{CELL}\0,0"), OWN),
    "latin-1": (csv(f"1,{CELL}\xe9,0", encoding="latin-1"), OWN),
    "utf-16": (csv(f"1,{CELL},0", encoding="utf-16"), OWN),
    "no header": (csv(header=RECORD), ["--data", "t.csv"]),
    "no header, wrong target": (csv(header=RECORD), OWN),
    "no header, number": (csv(header=f"{CELL},{LABEL},y"), OWN),
    "no header, yes": (csv(header=f"{CELL},no,y"), OWN),
    "no header, text": (csv(f"{CELL}2,b,0", header=f"{CELL},SECRETILL,y"), OWN),
    "no header, missing": (csv(",b,0", header=f"{CELL},SECRETILL,y"), [*OWN, "--drop", "b"]),
    "no header, twice": (csv(header=f"{CELL},{CELL},y"), OWN),
    "no header, no name": (csv(header=f"{CELL},,y"), OWN),
    "no header, wrong rule": (csv(header=f"{CELL},SECRETILL,y"), [*OWN, "--schema", "s.toml"]),
    "no header, wrong drop": (csv(header=f"{CELL},SECRETILL,y"), [*OWN, "--drop", "a"]),
    "no header, too many cells": (csv(f"1,2,3,{CELL}", header=RECORD), OWN),
    "no header, one line": (csv(header=RECORD, more=""), OWN),
    "no header, tests": (
        both(csv(), csv(header=RECORD, name="u.csv")),
        [*OWN, "--schema", "s.toml", "--test", "u.csv"],
    ),
    "no header, training alone": (
        both(csv(header=f"{CELL},SECRETILL,y", more="1,2,0\n2,1,1\n" * 30), csv(name="u.csv")),
        [*OWN, "--test", "u.csv"],
    ),
    "compared": (csv(f"{CELL},b,0"), ["compare", *OWN, "--schema", "s.toml"]),
    "tuned": (csv(f"{CELL},b,0"), ["tune", "--try", "lr=0.1,0.2", *OWN, "--schema", "s.toml"]),
    "checked": (csv(f"{CELL},b,0"), ["check", *OWN, "--schema", "s.toml"]),
    "audited": (csv(f"{CELL},b,0"), ["audit", *OWN, "--schema", "s.toml"]),
    "schema of another target": (csv(header=RECORD), ["schema", "t.csv", "--target", "y"]),
    "parquet of lists": (parquet_file, ["--data", "t.parquet", "--target", "y", "--classes", "2"]),
    "damaged parquet": (damaged_parquet, ["--data", "t.parquet", "--target", "y", "--classes", "2"]),
    "archive, label": (npz(labels(LABEL)), ["--data", "d.npz"]),
    "archive, label of a test": (npz(y_test=labels(LABEL)), ["--data", "d.npz"]),
    "archive, label a little too large": (npz(y_test=labels(7)), ["--data", "d.npz"]),
    "archive, huge label": (npz(labels(LABEL * 10**9)), ["--data", "d.npz"]),
    "archive, negative label": (npz(labels(-LABEL)), ["--data", "d.npz"]),
    "archive, label with a fraction": (npz(labels(LABEL + 0.5, np.float64)), ["--data", "d.npz"]),
    "archive, label of text": (npz(np.array([CELL] * 60)), ["--data", "d.npz"]),
    "archive, features of text": (npz(x=np.array([[CELL]] * 60)), ["--data", "d.npz"]),
    "archive, objects": (npz(x=np.array([[CELL, None]] * 60, dtype=object)), ["--data", "d.npz"]),
    "archive, infinite": (npz(x=np.full((60, 4), LABEL * 1e300)), ["--data", "d.npz"]),
    "archive, no archive": (lambda folder: (folder / "d.npz").write_bytes(RECORD.encode()), ["--data", "d.npz"]),
    "archive, odd header": (
        lambda folder: (folder / "d.npz").write_bytes(b"\x93NUMPY\x01\x00v\x00{" + RECORD.encode()),
        ["--data", "d.npz"],
    ),
    "function, key": (code(f"def load(): return {{'{CELL}': (x, y)}}\n"), FUNCTION),
    "function, label": (code(f"def load(): return dict(train=(x, y + {LABEL}), test=(x, y), classes=2)\n"), FUNCTION),
    "function, number": (
        code("def load(): return dict(train=(x, x * 867530e40), test=(x, x), task='numbers')\n"),
        FUNCTION,
    ),
    "function, text": (
        code(f"def load(): return dict(train=(x, ['{CELL}'] * 60), test=(x, y), classes=2)\n"),
        FUNCTION,
    ),
    "function, token": (code(TOKENS.format(value=LABEL)), [*FUNCTION, "--model", "decoder"]),
    "function that fails": (code(f"def load(): return float('{CELL}')\n"), FUNCTION),
    "function that asserts": (code(f"def load(): assert y[0] == 7, '{CELL}'\n"), FUNCTION),
    "module that fails": (code(f"float('{CELL}')\n"), FUNCTION),
    "model that fails": (
        code(
            f"def load(): return dict(train=(x * {LABEL}, y), test=(x, y), classes=2)\n"
            "class Failing(nn.Linear):\n    def forward(self, x):\n"
            f"        if (x == {LABEL}).any(): raise RuntimeError(str(x.max().item()))\n        return super().forward(x)\n"
            "def build(shape, classes): return Failing(*shape, classes)\n"
        ),
        [*FUNCTION, "--model", "mine:build"],
    ),
    "loss that fails": (
        code(
            f"def load(): return dict(train=(x * {LABEL}, y), test=(x, y), classes=2)\n"
            "def build(shape, classes): return Both(*shape, classes)\n"
            "class Both(nn.Linear):\n    def forward(self, x): return super().forward(x), x\n"
            "def loss(output, y):\n"
            f"    if (output[1] == {LABEL}).any(): raise KeyError(output[1].max().item())\n"
            "    return F.cross_entropy(output[0], y, reduction='none')\n"
        ),
        [*FUNCTION, "--model", "mine:build", "--loss", "mine:loss"],
    ),
    "wine": (named("winequality-red.csv", "header\n" + f"{CELL};" * 11 + "1\n"), ["--data", "wine", *NAMED]),
    "wine of other columns": (named("winequality-red.csv", f"header\n{LABEL};1\n"), ["--data", "wine", *NAMED]),
    "housing": (named("cal_housing.data", f"{CELL},1,2,3,4,5,6,7,8\n"), ["--data", "housing", *NAMED]),
    "adult": (adult, ["--data", "adult", *NAMED]),
    "names": (named("names.tsv", f"name\tlanguage\n{CELL}\tSECRETISH\n"), ["--data", "names", *NAMED]),
    "sst2": (
        named("train.tsv", f"sentence\tlabel\nfine\t{LABEL}\n", ("dev.tsv", "sentence\tlabel\nfine\t1\n")),
        ["--data", "sst2", *NAMED],
    ),
    "sst2, cells": (
        named("train.tsv", "sentence\tlabel\n" + f"{CELL}\t" * 8675 + "1\n", ("dev.tsv", "sentence\tlabel\nfine\t1\n")),
        ["--data", "sst2", *NAMED],
    ),
    "sst2 in latin-1": (
        lambda folder: [
            (folder / f).write_bytes(b"sentence\tlabel\n" + CELL.encode() + b"\xe9\t1\n")
            for f in ("train.tsv", "dev.tsv")
        ],
        ["--data", "sst2", *NAMED],
    ),
    "svhn": (
        lambda folder: [(folder / f"{part}_32x32.mat").write_bytes(RECORD.encode() * 90) for part in ("train", "test")],
        ["--data", "svhn", *NAMED],
    ),
}


def in_files(folder: Path) -> list[str]:
    """The files that clipless has written and that have a marked value."""
    return [
        str(path) for path in folder.rglob("*") if path.is_file() and MARKS.search(path.read_bytes().decode("latin-1"))
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "s.toml").write_text(SCHEMA)
    (tmp_path / "dates.toml").write_text(SCHEMA.replace("0\n", "2000-01-01\n").replace("9\n", "2001-01-01\n"))
    return tmp_path


def ran(folder: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> Done:
    command, rest = (options[0], options[1:]) if not options[0].startswith("-") else ("train", options)
    more = {
        "train": QUICK,
        "compare": [*QUICK, "--seeds", "1"],
        "check": QUICK[:2],
        "audit": QUICK[:-2],
        "tune": [*QUICK[:4], *QUICK[-2:]],
    }
    chosen = more.get(command, [])
    if "--model" in rest:
        chosen = chosen[2:]
    return run_main([command, *rest, *chosen], folder, capsys)


@pytest.mark.parametrize("case", REFUSED)
def test_no_refusal_shows_what_a_record_holds(folder: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    write, options = REFUSED[case]
    write(folder)
    before = {path for path in folder.rglob("*") if path.is_file()}
    done = ran(folder, options, capsys)
    assert done.returncode in (1, 2), done
    assert done.stderr.count("Error:") == 1
    assert not MARKS.search(done.stdout + done.stderr), done
    written = [path for path in folder.rglob("*") if path.is_file() and path not in before and path.suffix != ".pyc"]
    assert not [path for path in written if MARKS.search(path.read_bytes().decode("latin-1"))]


def test_a_run_that_succeeds_shows_and_keeps_nothing_of_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts and numbers that a rule takes: in no output, and in no file."""
    csv(f"{LABEL},{CELL},1")(folder)
    for arguments in (
        ["train", *OWN, "--schema", "s.toml", *QUICK],
        ["train", *OWN, "--schema", "s.toml", *QUICK[:-1], "json", "--json", "--tensorboard", "out/board"],
        ["report", "out", "--html", "out/page.html"],
        ["report", "out", "--json"],
        ["check", *OWN, "--schema", "s.toml", *QUICK[:2]],
        ["compare", *OWN, "--schema", "s.toml", *QUICK[:-1], "compared", "--clippings", "auto-s", "--seeds", "1"],
        ["train", *OWN, "--schema", "s.toml", *QUICK],
    ):
        done = run_main(arguments, folder, capsys)
        assert not MARKS.search(done.stdout + done.stderr), done
    (folder / "t.csv").unlink()
    assert (folder / "out" / "page.html").exists()
    assert not in_files(folder)


def test_new_records_are_not_shown_either(tmp_path: Path) -> None:
    csv()(tmp_path)
    columns = {"a": {"low": 0, "high": 9}, "b": {"categories": ["b", "c"]}}
    data = load(tmp_path / "t.csv", own=OwnData(target=("y",), classes="2", columns=columns))
    stored = json.loads(json.dumps(data.columns))
    for writer in (csv(f"{CELL},b,0"), csv(header=RECORD), csv(header=f"{CELL},{LABEL},y"), csv(f"1,{CELL},{LABEL},0")):
        writer(tmp_path)
        with pytest.raises(clipless.errors.InvalidArgument) as refused:
            load_features(tmp_path / "t.csv", stored)
        assert not MARKS.search(str(refused.value))


def test_the_library_shows_no_label_and_no_size_of_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """Marked by what occurs nowhere else: the size of the drawn batch, and the label."""
    torch.manual_seed(0)
    x, y = torch.randn(2_000, 6), torch.full((2_000,), LABEL)

    class Fixed(nn.Linear):
        """For the first batch only: it cannot be probed."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(sizes[0], 2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Callable[[Tensor], Tensor]) -> None:
        budget = {"noise_multiplier": 1.0, "delta": 1e-6, "batch_size": 1_000, "steps": 3, "accountant": "rdp"}
        private = clipless.make_private(model, optimizer, TensorDataset(x, y), seed=1, **budget)  # type: ignore[arg-type]
        try:
            for features, _ in private.loader:
                sizes.append(len(features))
                private.backward(losses(model(features)))
                optimizer.step()
        finally:
            private.detach()

    sizes: list[int] = []
    for make, losses in (
        (lambda: nn.Linear(6, 2), lambda output: output.sum(1)[:-1]),
        (lambda: nn.Linear(6, 2), lambda output: output),
        (lambda: nn.Linear(6, 2), lambda output: output.sum()),
        (lambda: Fixed(6, 2), lambda output: output.sum(1)),
        (lambda: nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2)), lambda output: output.sum(1)),
        (lambda: nn.Linear(6, 2), lambda output: (output - output.mean(0)).square().sum(1)),
    ):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sizes.clear()
        with pytest.raises(clipless.errors.CliplessError) as refused:
            train(model, optimizer, losses)
        assert not sizes or sizes[0] != 1_000
        assert not MARKS.search(str(refused.value))
        for size in sizes:
            assert str(size) not in re.sub(r"0x\w+", "", str(refused.value))


def test_other_ranks_are_told_what_failed_and_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(Ranks, "_exchanged", lambda self, what, failure="", value="": told.append(failure))
    ranks = object.__new__(Ranks)
    for error in (
        KeyError(CELL),
        IndexError(f"Target {LABEL} is out of bounds."),
        clipless.errors.Misuse("step first."),
    ):
        with pytest.raises(type(error)), ranks.together("step 1"):
            raise error
    assert told == ["KeyError", "IndexError", "Misuse: step first."]


def test_reliability_shows_no_label() -> None:
    with pytest.raises(clipless.errors.InvalidArgument) as refused:
        clipless.reliability.ece(np.full((3, 2), 0.5), np.array([0, 1, LABEL]))
    assert not MARKS.search(str(refused.value))


def test_the_marks_are_found_where_they_are() -> None:
    for text in (CELL, f"labels go up to {LABEL}", str(LABEL + 0.5), f"{LABEL * 1e30}", repr(RECORD), "secretcell"):
        assert MARKS.search(text), text
    assert not MARKS.search(f"line 3 of t.csv, column 1, {datetime.date(2026, 1, 31)}")

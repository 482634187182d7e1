"""`clipless train` on a table and code of the user's own, by flags or a configuration file."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clipless.app.commands.begin import slug
from clipless.app.data.own.reading import read
from clipless.app.toml_text import toml_text
from commanding import Shell

JOBS = ("cook", "clerk", "smith")
HEADER = "id,age,job,born,paid"
ROWS = [
    f"{i * 7919 % 1000},{20 + i % 50},{JOBS[i % 3]},{1950 + i % 50}-02-01,{'yes' if i % 2 else 'no'}" for i in range(80)
]
SCHEMA = """
[columns.age]
low = 0
high = 120
[columns.job]
categories = ["cook", "clerk"]
[columns.born]
low = 1900-01-01
high = 2026-01-01
"""
OWN = ["--data", "people.csv", "--target", "paid", "--classes", "no,yes", "--schema", "schema.toml", "--drop", "id"]
QUICK = ["--model", "linear", "--epochs", "2", "--batch-size", "32", "--accountant", "rdp"]
CODE = """
import torch
from torch import nn
from torch.nn import functional as F

def build(shape, classes): return nn.Sequential(nn.Linear(*shape, 3), nn.Tanh(), nn.Linear(3, classes))
def load():
    x = torch.linspace(-1, 1, 64).view(32, 2)
    return {"train": (x, (x[:, 0] > 0).long()), "test": (x, (x[:, 0] > 0).long()), "classes": 2}
def doubled(output, y): return 2 * F.cross_entropy(output, y, reduction="none")
def mean(output, y): return F.cross_entropy(output, y)
def failing(output, y): return output.nothing
def mixed(output, y):
    losses = F.cross_entropy(output, y, reduction="none")
    return losses * losses.detach().mean()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "people.csv").write_text("\n".join([HEADER, *ROWS]) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "my_code.py").write_text(CODE)
    return tmp_path


@pytest.fixture
def shell(folder: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(folder, capsys)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(folder / "model.pt", weights_only=True))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_table_is_trained_on_and_the_stored_configuration_repeats_the_run(shell: Shell) -> None:
    first = shell.good("train", *OWN, *QUICK, "--seed", "5", "--lr", "0.3", "--out", "a")
    stored = (shell.folder / "a" / "config.toml").read_text()
    assert tomllib.loads(stored)["columns"] == tomllib.loads(SCHEMA)["columns"]
    assert "seed" not in tomllib.loads(stored)
    (shell.folder / "schema.toml").unlink()  # its rules are in the configuration
    again = shell.good("train", "--config", "a/config.toml", "--seed", "5", "--out", "b")
    assert first["metrics"]["test_accuracy"] == again["metrics"]["test_accuracy"]
    assert same(weights(shell.folder / "a"), weights(shell.folder / "b"))
    assert (shell.folder / "b" / "config.toml").read_text() == stored
    record = json.loads((shell.folder / "a" / "run.json").read_text())
    assert record["columns"]["features"] == ["age", "job", "born"]
    assert record["columns"]["rules"]["born"] == {"low": "1900-01-01", "high": "2026-01-01"}


def test_no_file_of_a_run_has_a_cell_of_the_table(shell: Shell) -> None:
    (shell.folder / "people.csv").write_text("\n".join([HEADER, *(row.replace("smith", "Zaphod") for row in ROWS)]))
    shell.good("train", *OWN, *QUICK, "--out", "a")
    for path in (shell.folder / "a").iterdir():
        assert b"Zaphod" not in path.read_bytes()


def test_flags_win_over_the_file(shell: Shell) -> None:
    (shell.folder / "run.toml").write_text(
        f'data = "people.csv"\ntarget = "paid"\nclasses = ["no", "yes"]\ndrop = ["id"]\nmodel = "linear"\nepochs = 3\n'
        f'batch-size = 32\nnoise_multiplier = 4.0\naccountant = "rdp"\n{SCHEMA}'
    )
    plain = shell.good("train", "--config", "run.toml", "--out", "a")
    assert (plain["plan"]["noise_multiplier"], plain["plan"]["expected_batch"]) == (4.0, 32)
    assert plain["metrics"]["steps"] == 3 * plain["plan"]["steps_per_pass"]
    other = shell.good("train", "--config", "run.toml", "--epochs", "1", "--epsilon", "2", "--out", "b")
    assert other["plan"]["epsilon"] == 2
    assert other["metrics"]["steps"] == other["plan"]["steps_per_pass"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("epsilonn = 3", "unknown option in run.toml 'epsilonn': did you mean 'epsilon'?"),
        ('epsilon = "three"', "Invalid value for '--epsilon'"),
        ("epochs = 1.5", "Invalid value for '--epochs'"),
        ("epochs = [1, 2]", "epochs takes one value"),
        ("[data]\nfile = 1", "write data = value"),
        ("resume = true", "resume is given on the command line only"),
        ("columns = 3", "write a table [columns.NAME]"),
        ("epsilon = ", "run.toml is not TOML"),
        ("epsilon = 1\nnoise_multiplier = 1", "contradict each other"),
    ],
)
def test_a_wrong_configuration_is_refused(shell: Shell, content: str, message: str) -> None:
    (shell.folder / "run.toml").write_text(content)
    assert message in shell.bad("train", "--config", "run.toml")


def test_code_of_the_users_own(shell: Shell) -> None:
    options = [
        "--data",
        "my_code:load",
        "--model",
        "my_code:build",
        "--batch-size",
        "8",
        "--epochs",
        "1",
        "--seed",
        "1",
    ]
    plain = shell.good("train", *options, "--out", "a")
    assert plain["data"] == "my_code.load"
    shell.good("train", *options, "--loss", "my_code:doubled", "--out", "b")
    shell.good("train", *options, "--loss", "my_code:doubled", "--clipping", "abadi", "--out", "c")
    assert not same(weights(shell.folder / "a"), weights(shell.folder / "c"))
    assert tomllib.loads((shell.folder / "b" / "config.toml").read_text())["loss"] == "my_code:doubled"
    assert shell.good("check", *options[:4], "--loss", "my_code:doubled")["sound"]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("mean", "one loss per record"),
        ("mixed", "made-up records"),
        ("failing", "failed on made-up records"),
        ("doubld", "did you mean 'doubled'?"),
    ],
)
def test_a_loss_that_breaks_the_promise_is_refused_and_leaves_the_folder_free(
    shell: Shell, loss: str, message: str
) -> None:
    options = [*OWN, *QUICK, "--out", "a"]
    assert message in shell.bad("train", *options, "--loss", f"my_code:{loss}")
    shell.good("train", *options)


def test_a_run_that_another_process_has_begun_stays(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no step yet. If a second one removed its ledger, what it spends would be lost."""
    options = [*OWN, *QUICK, "--out", "a"]
    with monkeypatch.context() as patch:
        patch.setattr("clipless.app.terminal.signals.Stop.__call__", lambda self: True)
        assert shell("train", *options).returncode == 130
    before = {path.name: path.read_bytes() for path in (shell.folder / "a").iterdir()}
    assert {"ledger.jsonl", "checkpoint.pt"} <= before.keys()
    assert "holds an interrupted run" in shell.bad("train", *options)
    assert {path.name: path.read_bytes() for path in (shell.folder / "a").iterdir()} == before


def test_a_run_that_fails_after_its_first_step_stays(shell: Shell) -> None:
    """What it spent stays spent: its ledger is not removed."""
    (shell.folder / "my_fault.py").write_text(
        "from torch.nn import functional as F\ncalls = []\ndef loss(output, y):\n    calls.append(1)\n"
        "    if len(calls) > 40: raise RuntimeError('too late')\n"
        "    return F.cross_entropy(output, y, reduction='none')\n"
    )
    options = [*OWN, *QUICK, "--epochs", "40", "--out", "a"]
    assert shell("train", *options, "--loss", "my_fault:loss").returncode == 1
    assert len((shell.folder / "a" / "ledger.jsonl").read_text().splitlines()) > 1
    assert "holds an interrupted run" in shell.bad("train", *options)


def test_an_interrupted_run_on_a_table_goes_on_as_it_was_begun(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [*OWN, *QUICK, "--seed", "5", "--out"]
    shell.good("train", *options, "whole")
    asked = iter([False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr("clipless.app.terminal.signals.Stop.__call__", lambda self: next(asked))
        assert shell("train", *options, "cut").returncode == 130
    for other in (["--target", "job"], ["--drop", "age"], ["--classes", "yes,no"], ["--data", "digits"]):
        assert "other arguments (about the data)" in shell.bad("train", "--resume", "--out", "cut", *other)
    (shell.folder / "schema.toml").unlink()
    shell.good("train", "--resume", "--out", "cut")
    assert same(weights(shell.folder / "whole"), weights(shell.folder / "cut"))


@pytest.mark.parametrize(
    ("extra", "covered"), [([], "private"), (["--seed", "1"], "not_private"), (["--clipping", "none"], "not_private")]
)
def test_tensorboard_tells_private_from_not_private(shell: Shell, extra: list[str], covered: str) -> None:
    shell.good("train", *OWN, *QUICK, "--tensorboard", "board", "--out", "a", *extra)
    events = EventAccumulator(str(shell.folder / "board")).Reload()
    tags = {f"{covered}/epsilon", f"{covered}/threshold"} if "none" not in extra else set()
    assert set(events.Tags()["scalars"]) == tags | {"not_private/test_accuracy"}
    assert len(events.Scalars("not_private/test_accuracy")) == 2


def test_regression_and_labels_from_the_command_line(shell: Shell) -> None:
    rest = ["--schema", "schema.toml", "--drop", "id", "--drop", "job", *QUICK]
    number = shell.good("train", "--data", "people.csv", "--target", "age", "--drop", "paid", *rest, "--out", "a")
    assert "test_squared_error" in number["metrics"]
    (shell.folder / "two.csv").write_text("a,b,c\n" + "".join(f"{i % 7},{i % 2},{i % 3 == 0}\n" for i in range(60)))
    labels = shell.good("train", "--data", "two.csv", "--target", "b", "--target", "c", *QUICK, "--out", "b")
    assert "test_label_accuracy" in labels["metrics"]
    assert labels["notes"][0].startswith("a: used as numbers, as they are.")


def test_a_schema_from_a_public_table(shell: Shell) -> None:
    public = [
        HEADER,
        *(f"{i},{'' if i == 3 else 18 + i},{JOBS[i % 3]},1960-01-{1 + i % 28},no" for i in range(60)),
        "9,20,cook,1960-01-01,yes",
    ]
    (shell.folder / "public.csv").write_text("\n".join(public))
    done = shell("schema", "public.csv", "--target", "paid")
    assert "make it from a public table only" in done.stderr
    made = tomllib.loads(done.stdout)
    assert made["columns"]["age"] == {"low": 18, "high": 77, "missing": 47.5}
    assert made["columns"]["paid"] == {"categories": ["no", "yes"]}
    assert made["made_from"] == read(shell.folder / "public.csv").digest
    (shell.folder / "made.toml").write_text(done.stdout)
    options = ["--target", "paid", "--schema", "made.toml", "--drop", "id", *QUICK]
    shell.good("train", "--data", "people.csv", *options, "--out", "a")
    assert "was made from public.csv itself" in shell.bad("train", "--data", "public.csv", *options, "--out", "b")
    stored = ["--config", "a/config.toml", "--data", "public.csv"]
    assert "was made from public.csv itself" in shell.bad("train", *stored, "--out", "b")


def test_names_of_columns_and_files_cannot_write_into_the_report(shell: Shell) -> None:
    nasty = '<script>alert("1")</script>'
    (shell.folder / "[red]<b>.csv").write_text(f'"{nasty.replace(chr(34), chr(34) * 2)}",[bold]y\n' + "1,0\n2,1\n" * 30)
    options = ["--data", "[red]<b>.csv", "--target", "[bold]y", "--classes", "2", *QUICK]
    done = shell("train", *options, "--out", "a")
    assert done.returncode == 0, done.stderr
    assert "[red]<b>" in done.stdout
    assert nasty in done.stderr
    assert shell("report", "a", "--html", "page.html").returncode == 0
    page = (shell.folder / "page.html").read_text()
    assert "<script>alert" not in page
    assert "[red]<b>" not in page
    assert "[red]&lt;b&gt;" in page
    compared = shell("compare", *options, "--clippings", "auto-s", "--seeds", "1", "--out", "c")
    assert compared.returncode == 0, compared.stderr
    assert "[red]<b>, linear" in compared.stdout
    assert slug("[red]<b>", "linear") == "red-b--linear"


def test_compare_keeps_runs_of_other_rules_apart(shell: Shell) -> None:
    options = [*OWN, *QUICK, "--clippings", "auto-s", "--seeds", "1", "--out", "c"]
    shell.good("compare", *options)
    (shell.folder / "schema.toml").write_text(SCHEMA.replace("120", "100"))
    assert "runs of another configuration" in shell.bad("compare", *options)


plain = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=4) | st.dates(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def without_tables_in_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_tables_in_lists(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_tables_in_lists(one) for one in value if not isinstance(one, dict)]
    return value


@given(st.dictionaries(st.text(max_size=4), plain, max_size=3))
def test_toml_text_is_read_back_as_it_was(content: dict[str, Any]) -> None:
    content = without_tables_in_lists(content)
    assert tomllib.loads(toml_text(content)) == content

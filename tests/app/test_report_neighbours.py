"""`clipless report` says who is a neighbour: of a run with a public or a secret number of records, and of one that an
earlier version stored."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import clipless
from clipless.runs.ledger_file import sealed
from commanding import Shell

SIZE = 7919  # a number that nothing else on the page can be
EVERY = {"zero-out": {}, "add-remove": {"neighbours": "add-remove", "sample_rate": 0.01}}


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, capsys)


def written(path: Path, **settings: Any) -> None:
    """A ledger of two steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"noise_multiplier": 1.0, "delta": 1e-6, "batch_size": 64, "steps": 2} | settings
    private = clipless.make_private(model, optimizer, TensorDataset(torch.randn(SIZE, 3)), **given)
    private.save_to(path)
    for (x,) in private.loader:
        private.backward(model(x)[:, 0].square())
        optimizer.step()
    private.detach()


def as_stored_before(path: Path) -> None:
    """Replace the first line by that of an earlier version, and the others by ones that follow from it."""
    previous, lines = "", []
    for number, line in enumerate(path.read_text().splitlines()):
        fields = json.loads(line)
        del fields["hash"]
        if number == 0:
            del fields["plan"]["neighbours"]
            fields["plan"]["neighbouring"] = "add or remove one record"
        sealed_line, previous = sealed(fields | {"previous": previous})
        lines.append(sealed_line)
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("relation", EVERY)
def test_a_report_says_who_is_a_neighbour_and_shows_no_secret_number(
    relation: str, tmp_path: Path, shell: Shell
) -> None:
    written(tmp_path / "ledger.jsonl", **EVERY[relation])
    shown, record = shell("report", "ledger.jsonl", "--html", "page.html"), shell.good("report", "ledger.jsonl")
    page = re.sub(r"<[^>]*>", "", (tmp_path / "page.html").read_text(encoding="utf-8"))
    assert shown.returncode == 0
    assert record["promised"]["neighbours"] == relation
    assert record["notes"] == []
    public = relation == "zero-out"
    for text, number in ((shown.stdout, "7919"), (page, "7,919"), (json.dumps(record), "7919")):
        assert f"{relation}: one record is" in text
        assert (number in text) == public
    assert ("How many there are is secret" in page) != public
    assert "earlier version" not in page + shown.stdout + shown.stderr


def test_a_report_of_an_earlier_version_says_what_was_accounted(tmp_path: Path, shell: Shell) -> None:
    written(tmp_path / "ledger.jsonl")
    before = shell.good("report", "ledger.jsonl")
    as_stored_before(tmp_path / "ledger.jsonl")
    shown, record = shell("report", "ledger.jsonl", "--html", "page.html"), shell.good("report", "ledger.jsonl")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert shown.returncode == 0
    assert record["promised"] == before["promised"]
    assert record["spent"] == before["spent"]
    (note,) = record["notes"]
    for text in (" ".join((shown.stdout + shown.stderr).split()), page.replace("&#34;", '"'), note):
        assert "what is accounted is zero-out: one record is replaced by an empty one" in text
    assert json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])["plan"]["neighbouring"].startswith("add")

"""`clipless reproduce`: every figure drawn, the page, and what the command says."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clipless.app.cli import app
from clipless.app.reproduce import reproductions, theory
from clipless.app.reproduce.drawing import Drawing
from clipless.errors import InvalidArgument

FEW = theory.DRAWINGS[7:9]


@pytest.mark.scripts
@pytest.mark.parametrize("drawing", theory.DRAWINGS, ids=lambda drawing: drawing.stem)
def test_figure_has_titles_axes_and_legends(drawing: Drawing) -> None:
    figure = drawing.draw()
    figure.draw_without_rendering()
    named = False
    for axes in figure.axes:
        assert axes.get_title()
        assert axes.get_xlabel()
        assert axes.lines or axes.patches
        shown = axes.get_legend()
        named = named or bool(shown and shown.get_texts())
        for line in axes.lines:
            assert len(line.get_xdata()) == len(line.get_ydata())
    assert named
    assert figure.get_size_inches()[0] <= 13.5, "wider ones cannot be read on a laptop"


def test_every_drawing_has_a_name_and_a_sentence_of_its_own() -> None:
    assert len({drawing.stem for drawing in theory.DRAWINGS}) == len(theory.DRAWINGS)
    assert all(drawing.sentence.endswith(".") for drawing in theory.DRAWINGS)
    sources = " ".join(drawing.source for drawing in theory.DRAWINGS)
    assert all(f"AUTO fig. {number}" in sources for number in range(2, 12))


def test_command_writes_figures_and_a_page_that_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "DRAWINGS", FEW)
    done = CliRunner().invoke(app, ["reproduce", "theory", "--out", str(tmp_path / "new"), "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    page = (tmp_path / "new" / "index.html").read_text(encoding="utf-8")
    assert record["page"] == str(tmp_path / "new" / "index.html")
    assert re.findall(r'<img src="([^"]+)"', page) == [Path(figure["file"]).name for figure in record["figures"]]
    for figure, drawing in zip(record["figures"], FEW, strict=True):
        assert Path(figure["file"]).read_bytes().startswith(b"\x89PNG")
        assert figure["shows"] == drawing.sentence
        assert f"<b>{drawing.source}.</b>" in page


def test_command_tells_people_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "DRAWINGS", FEW[:1])
    done = CliRunner().invoke(app, ["reproduce", "theory", "--out", str(tmp_path), "--format", "svg"])
    assert done.exit_code == 0, done.output
    assert f"written: {tmp_path / 'index.html'}" in done.output.replace("\n", "")
    assert (tmp_path / f"{FEW[0].stem}.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_list_names_everything() -> None:
    done = CliRunner().invoke(app, ["reproduce", "--list", "--json"])
    assert json.loads(done.stdout) == {name: each.what for name, each in reproductions().items()}
    assert "theory" in CliRunner().invoke(app, ["reproduce", "--list"]).stdout


def test_help_has_an_example() -> None:
    assert "Example:" in CliRunner().invoke(app, ["reproduce", "--help"]).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["theroy"], "theory"),
        ([], "--list"),
        (["theory", "--format", "bmp"], "png"),
        (["theory", "--out", "FILE"], "FILE"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_drawn(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("a file, not a folder")
    with pytest.raises(InvalidArgument, match=words):
        CliRunner().invoke(app, ["reproduce", *arguments], catch_exceptions=False)
    assert not (tmp_path / "runs").exists()

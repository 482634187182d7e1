"""`clipless budget --draw`: the pictures, their data, and what is refused before any work."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clipless.accounting import epsilon
from clipless.app.cli import app
from clipless.errors import InvalidArgument

RUN = ["budget", "--dataset-size", "5000", "--batch-size", "100", "--epochs", "4", "--delta", "1e-5"]


def answer(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*RUN, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_folder_gets_three_pictures_and_their_data(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "figures"
    record = json.loads(answer("--epsilon", "2", "--draw", str(folder), "--json"))
    names = {"budget-steps.svg", "budget-noise.svg", "budget-tuning.svg", "budget.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert {Path(path).name for path in record["drawn"]} == names
    assert json.loads((folder / "budget.json").read_text()) == record["curves"]
    last = record["curves"]["steps"]["lines"][0]
    assert (last["label"], last["x"][-1]) == ("pld", 200)
    assert last["y"][-1] == record["epsilon"] == epsilon(record["noise_multiplier"], 0.02, 200, 1e-5)
    picture = (folder / "budget-steps.svg").read_text()
    assert "<svg" in picture


@pytest.mark.parametrize("name", ["all.png", "all.svg"])
def test_a_file_gets_all_in_one(name: str, tmp_path: Path) -> None:
    shown = answer("--noise-multiplier", "1.1", "--draw", str(tmp_path / name))
    assert "Privacy budget" in shown
    assert {path.name for path in tmp_path.iterdir()} == {name, "all.json"}
    data = json.loads((tmp_path / "all.json").read_text())
    assert set(data) == {"steps", "noise", "tuning"}
    labels = [line["label"] for line in data["noise"]["lines"]]
    assert [label for label in labels if "approximation" in label] == ["gdp (approximation, can under-report)"]


def test_infinite_epsilons_have_a_place_in_the_data_and_none_in_the_picture(tmp_path: Path) -> None:
    record = json.loads(answer("--noise-multiplier", "0.02", "--accountant", "gdp", "--draw", str(tmp_path), "--json"))
    assert record["epsilon"] == "inf"
    gdp = next(line for line in record["curves"]["steps"]["lines"] if line["approximate"])
    assert gdp["y"][-1] == "inf"
    assert (tmp_path / "budget-steps.svg").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "2", "--draw", "picture.gif"], "end its name in"),
        (["--draw", "here"], "either --noise-multiplier"),
        (["--epsilon", "2", "--ledger", "ledger.jsonl", "--draw", "here"], "--ledger describes its whole run"),
    ],
)
def test_drawing_is_refused_with_a_remedy(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=message):
        CliRunner().invoke(app, [*RUN, *arguments], catch_exceptions=False)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_command_says_what_to_install(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None\n"
        f"sys.argv = {['clipless', *RUN, '--epsilon', '2', '--draw', 'here']!r}\n"
        "from clipless.app.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: drawing needs matplotlib: pip install 'clipless[figures]'")
    assert not list(tmp_path.iterdir())


def test_the_data_has_no_number_that_is_not_json(tmp_path: Path) -> None:
    answer("--epsilon", "0.5", "--draw", str(tmp_path / "small.svg"))
    data = json.loads((tmp_path / "small.json").read_text(), parse_constant=pytest.fail)
    assert all(math.isfinite(y) for line in data["noise"]["lines"] for y in line["y"])

"""`--config` of the commands besides train: the file of a run is taken, and what a command stores repeats it."""

import tomllib
from pathlib import Path

import pytest

import clipless
from clipless.app.report import read_run
from clipless.app.report_page.audit import differences, read_audit
from commanding import Shell

TABLE = "id,age,paid\n" + "".join(f"{i},{20 + i % 50},{'yes' if i % 2 else 'no'}\n" for i in range(120))
RUN = """
data = "people.csv"
target = "paid"
classes = ["no", "yes"]
drop = ["id"]
model = "linear"
epochs = 2
batch_size = 32
accountant = "rdp"

[columns.age]
low = 0
high = 120
"""


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    (tmp_path / "people.csv").write_text(TABLE)
    (tmp_path / "run.toml").write_text(RUN)
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize("extra", [[], ["--clipping", "abadi(threshold=0.5)", "--noise-multiplier", "2"]], ids=str)
def test_an_audit_of_a_run_by_its_configuration_is_one_of_that_run(shell: Shell, extra: list[str]) -> None:
    run = shell.good("train", "--config", "run.toml", *extra, "--out", "run")
    games = ["--games", "step", "--releases", "100"]
    found = shell.good("audit", "--config", "run/config.toml", *games, "--out", "run/audit.json")
    assert found["noise_multiplier"] == run["plan"]["noise_multiplier"]
    reading = read_run(shell.folder / "run", None)
    audited = read_audit(reading)
    assert audited
    assert differences(reading, audited) == []


def test_an_audit_takes_the_noise_in_place_of_epsilon(shell: Shell) -> None:
    options = ["--config", "run.toml", "--noise-multiplier", "3", "--games", "step", "--releases", "100"]
    found = shell.good("audit", *options)
    expected = clipless.epsilon(3.0, found["sample_rate"], found["steps"], found["delta"], accountant="rdp")
    assert found["claimed_epsilon"] == pytest.approx(expected)
    assert "contradict each other" in shell.bad("audit", *options, "--epsilon", "1")


def test_check_uses_what_concerns_it(shell: Shell) -> None:
    shell.good("train", "--config", "run.toml", "--averaging", "0.9", "--lr", "0.3", "--out", "run")
    found = shell.good("check", "--config", "run/config.toml")
    assert (found["sound"], found["model"], found["data"]) == (True, "linear", "people")
    other = shell.good("check", "--config", "run/config.toml", "--clipping", "abadi")
    assert other["clipping"] == "abadi"


def test_a_stored_comparison_is_repeated(shell: Shell) -> None:
    options = ["--config", "run.toml", "--clippings", "auto-s,none", "--seeds", "1", "--seed", "5", "--lr", "0.2"]
    first = shell.good("compare", *options, "--out", "a")
    content = tomllib.loads(shell.stored("a"))
    assert (content["clippings"], content["seeds"], content["lr"]) == ("auto-s,none", 1, 0.2)
    assert content["columns"] == {"age": {"low": 0, "high": 120}}
    assert "seed" not in content
    again = shell.good("compare", "--config", "a/config.toml", "--seed", "5", "--out", "b")
    assert [one["scores"] for one in again["clippings"]] == [one["scores"] for one in first["clippings"]]
    assert shell.stored("b") == shell.stored("a")


GRID = """
[grid]
"clipping.percentile" = [0.3, 0.5]

[settings]
momentum = 0.5
"""


def test_a_stored_search_is_repeated(shell: Shell) -> None:
    (shell.folder / "grid.toml").write_text(GRID)
    tried = ["--grid", "grid.toml", "--try", "lr=0.05,0.1", "--clipping", "dc-p", "--method", "grid"]
    first = shell.good("tune", "--config", "run.toml", *tried, "--seed", "5", "--out", "a")
    content = tomllib.loads(shell.stored("a"))
    assert content["grid"] == {
        "momentum": [0.5],
        "clipping.percentile": [0.3, 0.5],
        "lr": [0.05, 0.1],
    }
    assert (content["model"], content["clipping"], content["method"]) == ("linear", "dc-p", "grid")
    assert "seed" not in content
    (shell.folder / "grid.toml").unlink()
    again = shell.good("tune", "--config", "a/config.toml", "--seed", "5", "--out", "b")
    assert again["tuning"] == first["tuning"]
    assert shell.stored("b") == shell.stored("a")


def test_options_win_over_the_grid_of_a_file(shell: Shell) -> None:
    (shell.folder / "search.toml").write_text(RUN + "\n[grid]\nlr = [0.1, 0.2]\n")
    priced = ["--config", "search.toml", "--method", "grid", "--dry-run"]
    assert [one["lr"] for one in shell.good("tune", *priced)["candidates"]] == [0.1, 0.2]
    tried = shell.good("tune", *priced, "--try", "lr=0.3,0.4,0.5")
    assert [one["lr"] for one in tried["candidates"]] == [0.3, 0.4, 0.5]
    assert "lr has one value for all candidates and a list to try" in shell.bad("tune", *priced, "--lr", "0.3")


@pytest.mark.parametrize(
    ("command", "line", "message"),
    [
        ("audit", "averaging = 0.9", "averaging in run.toml is an option of clipless train that audit does not have"),
        ("audit", 'loss = "my:loss"', "loss in run.toml is an option of clipless train that audit does not have"),
        ("audit", "conficence = 0.9", "did you mean 'confidence'?"),
        ("compare", 'clipping = "abadi"', "clipping in run.toml is an option of clipless train that compare does not"),
        ("tune", "momentum = 0.5", "momentum in run.toml is an option of clipless train that tune does not have"),
        ("tune", 'grid = ["lr"]', "grid takes one value"),
        ("check", "clippin = 1", "did you mean 'clipping'?"),
        ("check", "test_every = 1", "unknown option in run.toml 'test_every'"),
        ("check", "json = true", "unknown option in run.toml 'json'"),
    ],
)
def test_what_a_command_would_ignore_is_refused(shell: Shell, command: str, line: str, message: str) -> None:
    (shell.folder / "run.toml").write_text(line + RUN)
    assert message in shell.bad(command, "--config", "run.toml")


@pytest.mark.parametrize("command", ["audit", "compare", "tune", "check"])
def test_the_defaults_of_a_run_are_accepted(shell: Shell, command: str) -> None:
    (shell.folder / "run.toml").write_text('averaging = 0\nlr_schedule = "constant"\n' + RUN)
    options = {
        "audit": ["--games", "step", "--releases", "100"],
        "compare": ["--clippings", "auto-s", "--seeds", "1", "--epochs", "1"],
        "tune": ["--try", "lr=0.1,0.2", "--dry-run"],
        "check": [],
    }
    shell.good(command, "--config", "run.toml", *options[command])

"""`clipless bench --processes 2`, on a tiny model, with processes of their own."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from children import InsteadOfSubprocess
from clipless.app.bench import processes
from clipless.app.bench.processes import Comparison, World
from clipless.app.cli import app


def test_two_processes_are_measured_against_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(processes, "subprocess", InsteadOfSubprocess(tmp_path / "notes"))
    options = ["--processes", "2", "--models", "mlp", "--quick", "--no-memory", "--json", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 0, done.output
    (written,) = tmp_path.glob("*/processes.json")
    assert json.loads(done.stdout) == json.loads(written.read_text())
    (found,) = json.loads(done.stdout)["models"]
    assert found["bytes_sent"] == 4 * (784 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10)
    for world, size in ((found["one"], 1), (found["several"], 2)):
        assert world["processes"] == size
        sharded = {"plain sharded", "auto-s sharded"} if size == 2 else set()
        assert world["min_ms"].keys() == {"plain", "auto-s"} | sharded
        assert all(0 < world["min_ms"][way] <= world["median_ms"][way] for way in world["min_ms"])


def test_throughput_is_that_of_one_batch() -> None:
    one = World(1, {"plain": 10.0, "auto-s": 12.0}, {}, {})
    times = {"plain": 5.0, "auto-s": 7.0, "plain sharded": 8.0, "auto-s sharded": 10.0}
    several = World(2, times, {}, {"auto-s": 100.0, "auto-s sharded": 60.0})
    found = Comparison("mlp", one, several, 0, 80.0, 0)
    assert found.speedup("plain") == 2.0
    assert found.speedup("auto-s sharded") == pytest.approx(1.2)
    assert found.to_dict()["private_over_plain"] == {
        "one": pytest.approx({"auto-s": 1.2}),
        "several": pytest.approx({"auto-s": 1.4, "auto-s sharded": 1.25}),
    }
    assert found.saved_share == 0.5

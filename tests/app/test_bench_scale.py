"""The cost model of many devices, and the page that is written from it."""

import json
from pathlib import Path

import pytest

import children
from clipless.app.bench import scale
from clipless.app.bench.scale import (
    DEVICES,
    END,
    FORMS,
    START,
    WORKLOADS,
    Workload,
    checked_bytes,
    seconds,
    sent_bytes,
    state_bytes,
)
from clipless.errors import InvalidArgument

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    text = scale.table(scale.fitted(ROOT / "benchmarks" / "results"))
    assert f"{START}\n{text}{END}" in page, "run python benchmarks/scale.py --page docs/scale.md"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_shards_are_smaller_and_send_more(workload: Workload) -> None:
    for devices in DEVICES:
        for held in (state_bytes, checked_bytes):
            assert held(workload, devices.count, FORMS[1]) < held(workload, devices.count, FORMS[0])
        assert sent_bytes(workload, devices.count, FORMS[1]) >= 1.5 * sent_bytes(workload, devices.count, FORMS[0])
        whole, shards = (seconds(workload, devices, form, 1.2) for form in FORMS)
        assert whole[0] == shards[0]
        assert shards[2] == pytest.approx(whole[2] / devices.count)


def test_what_sending_takes_is_fitted(tmp_path: Path) -> None:
    """Times that were made from 2 GB/s and 3 ms give these back."""
    ways = {"plain": 100.0, "auto-s": 120.0}
    figures = {way: {"figures": {"min_ms": ms}} for way, ms in ways.items()}
    bench = {"models": {name: {"ways": figures} for name in ("encoder", "lora")}}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    models = []
    for parameters in (1e6, 2e7):
        workload = Workload("", parameters, parameters)
        sent = {way: sent_bytes(workload, 2, FORMS[way.endswith("sharded")]) for way in scale.PAIRS_IN_ONE}
        several = {way: ways[scale.PAIRS_IN_ONE[way]] / 2 + 3 + 1e3 * sent[way] / 2e9 for way in sent}
        one = {"min_ms": ways}
        models.append({"one": one, "several": {"processes": 2, "min_ms": several}, "parameters": parameters})
    (tmp_path / "processes.json").write_text(json.dumps({"models": models}))
    fit = scale.fitted(tmp_path)
    assert fit.full == fit.lora == pytest.approx(1.2)
    assert fit.link == pytest.approx(2e9)
    assert fit.fixed_ms == pytest.approx(3.0)
    assert "2 GB/s, and 3 ms" in scale.table(fit)


def test_without_results_there_is_nothing_to_fit(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="run clipless bench --out first"):
        scale.fitted(tmp_path)


@pytest.mark.scripts
def test_the_command_prints_the_tables() -> None:
    done = children.run(ROOT / "benchmarks" / "scale.py", "--from", ROOT / "benchmarks" / "results")
    assert done.returncode == 0, done.stderr
    assert "**1,024 devices**" in done.stdout

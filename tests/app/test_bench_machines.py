"""Results of several machines, with and without the allocator's variables: where they are kept, and the tables of all."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from test_bench import made_up
from typer.testing import CliRunner

from clipless.app.bench import machine, readme, results, store
from clipless.app.bench.results import BenchResult
from clipless.app.cli import app
from clipless.errors import InvalidArgument

ROOT = Path(__file__).parents[2]
INTEL = {"cpu": "Intel(R) Xeon(R) Processor", "vector_extensions": ["AVX2", "AVX-512", "AMX"], "usable_cores": 4}


def on(allocator: dict[str, str], **facts: object) -> BenchResult:
    """A result of another machine, whose private steps take twice as long."""
    mlp = made_up().models["mlp"]
    slower = replace(mlp.ways["auto-s"], ms=tuple(2 * ms for ms in mlp.ways["auto-s"].ms))
    models = {"mlp": replace(mlp, ways={**mlp.ways, "auto-s": slower})}
    return made_up(machine={**made_up().machine, **facts, "allocator": allocator}, models=models)


def test_the_machine_tells_what_a_measurement_depends_on() -> None:
    facts = machine.facts()
    assert {"cpu", "vector_extensions", "usable_cores", "threads", "versions", "allocator"} <= facts.keys()
    assert facts["versions"]["torch"] is not None
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert ("AVX2" in facts["vector_extensions"]) == (" avx2 " in flags)
    assert (facts["cpu_model"] is None) == ("cpu family" not in flags)
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (INTEL, "intel-xeon-amx-4-cores"),
        ({"cpu": "AMD EPYC", "usable_cores": 2}, "amd-epyc-2-cores"),  # as stored before extensions were told
        (
            {"cpu": "AMD EPYC", "cpu_model": "family 26 model 2", "usable_cores": 2},
            "amd-epyc-family-26-model-2-2-cores",
        ),
        ({"cpu": "AMD EPYC", "cpu_model": None, "usable_cores": 2}, "amd-epyc-2-cores"),
        ({"cpu": "../a b/Ä", "usable_cores": 1, "vector_extensions": []}, "a-b-1-core"),
    ],
)
def test_a_machine_has_a_folder_name(facts: dict[str, object], name: str) -> None:
    assert machine.slug(facts) == name


def test_extensions_that_only_refine_others_do_not_tell_machines_apart() -> None:
    assert machine.widest({"vector_extensions": ["AVX2", "AVX-512", "AVX-512 BF16"]}) == ["AVX-512"]
    assert machine.vector_extensions("Features\t: fp asimd sve\n") == ["NEON", "SVE"]


def test_a_processor_without_numbers_has_no_model() -> None:
    assert machine.cpu_model("Features\t: fp asimd sve\nCPU part\t: 0xd40\n") is None


def test_results_of_two_machines_and_both_allocators_are_kept_apart(tmp_path: Path) -> None:
    kept = [on({}), on(store.MALLOC), on({}, **INTEL), on(store.MALLOC, **INTEL)]
    for result in kept:
        store.keep(result, tmp_path)
    found = store.load(tmp_path)
    assert len(found) == 4
    assert sorted(path.relative_to(tmp_path).as_posix() for path in found) == [
        "intel-xeon-amx-4-cores/bench-malloc.json",
        "intel-xeon-amx-4-cores/bench.json",
        "some-2-cores/bench-malloc.json",
        "some-2-cores/bench.json",
    ]
    assert all(result in kept for result in found.values())
    store.keep(made_up(), tmp_path)
    assert store.load(tmp_path)[tmp_path / "some-2-cores" / "bench.json"] == made_up()


def test_the_tables_show_every_machine_and_both_allocators(tmp_path: Path) -> None:
    for result in (made_up(), on(store.MALLOC), on({}, **INTEL)):
        store.keep(result, tmp_path)
    page = tmp_path / "README.md"
    page.write_text("\n".join([readme.START, readme.END, *readme.EVERY_MODEL, ""]))
    done = CliRunner().invoke(app, ["bench", "--from", str(tmp_path), "--readme", str(page)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "| Some CPU, 2 cores | not set | decoder x3.00 | x1.20 | **x1.90** |" in text
    assert "| Some CPU, 2 cores | set | mlp x2.40 |  | **x2.40** |" in text
    assert "| Intel(R) Xeon(R) Processor, AMX, 4 cores | not set | mlp x2.40 |  | **x2.40** |" in text
    assert "| MLP | 512 | 10 ms | x1.20 | x9.00 | unsupported | x1.25 | x2.40 |" in text  # the last with the variables
    assert "| MLP | 512 | 10 ms | x2.40 | x9.00 | unsupported | x1.25 |\n" in text
    assert text.count("auto-s, MALLOC variables set") == 1


def test_what_older_versions_stored_is_still_read(tmp_path: Path) -> None:
    """They stored the machine without vector extensions, no tabular model and no curve of the number of records."""
    path = ROOT / "benchmarks" / "results" / "amd-epyc-avx-512-2-cores" / "bench.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    for fact in ("cpu_model", "vector_extensions", "vector_limits", "torch_kernels"):
        record["machine"].pop(fact, None)
    del record["models"]["tabular"], record["scaling"]["records"]
    (tmp_path / "bench.json").write_text(json.dumps(record), encoding="utf-8")
    result = results.load(tmp_path / "bench.json")
    assert "mlp" in result.models
    assert readme.where(result).startswith("AMD EPYC, 2 cores, ")
    assert readme.block([result])


def test_the_pages_of_the_repository_are_what_the_stored_results_say() -> None:
    found = list(store.load(ROOT / "benchmarks" / "results").values())
    assert f"{readme.START}\n{readme.block(found)}{readme.END}" in (ROOT / "README.md").read_text(encoding="utf-8")
    first, last = readme.EVERY_MODEL
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert f"{first}\n{readme.every_model(found)}{last}" in page


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds no result"):
        store.load(tmp_path)


def test_the_allocator_is_left_alone_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:  # Dask sets one
        monkeypatch.delenv(name)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("OTHER", "x")
    assert store.environment(malloc=False) == {k: v for k, v in os.environ.items() if k != "MALLOC_ARENA_MAX"}
    with_both = store.environment(malloc=True)
    assert {k: v for k, v in with_both.items() if k.startswith("MALLOC_")} == store.MALLOC
    assert with_both["OTHER"] == "x"

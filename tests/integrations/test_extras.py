"""Integrations are optional: the package neither loads nor needs their libraries."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES = {"transformers", "accelerate", "datasets", "peft", "lightning", "opacus", "jax", "optax", "trl"}


def test_the_package_loads_none_of_their_libraries() -> None:
    code = (
        "import sys, clipless\n"
        "for name in clipless.__all__: getattr(clipless, name)\n"
        "import clipless.integrations, clipless.app.cli\n"
        f"print(sorted({LIBRARIES!r} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_library_is_in_an_extra_and_none_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (own,) = [re.fullmatch(r"clipless\[(.*)\]", item)[1] for item in extras["integrations"] if "[" in item]  # type: ignore[index]
    listed = [item for name in [*own.split(","), "integrations"] for item in extras[name]]
    assert {re.split(r"[\[>]", item)[0] for item in listed} >= LIBRARIES
    assert not {re.split(r"[\[>]", item)[0] for item in project["dependencies"]} & LIBRARIES


def test_continuous_integration_runs_these_tests() -> None:
    assert "make test-integrations" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()

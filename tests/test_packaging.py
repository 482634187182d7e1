"""What is said of the package agrees everywhere, and importing it or asking for help is light."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import clipless
from clipless.app.cli import COMMANDS
from compiling import build_hook

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Slow to import, or an extra: the first needs of a stranger must not wait for them.
HEAVY = "{'torch', 'numpy', 'scipy', 'sklearn', 'dp_accounting', 'matplotlib', 'jinja2', 'cryptography', 'transformers', \
'accelerate', 'datasets', 'peft', 'lightning', 'opacus', 'jax', 'optax', 'pandas', 'pyarrow', 'tensorboard', 'distributed'}"


def loaded(code: str) -> str:
    """Which heavy packages a fresh process has loaded after this code."""
    program = f"{code}\nimport sys; print(sorted({HEAVY} & sys.modules.keys()))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_loads_nothing_heavy() -> None:
    assert loaded("import clipless; dir(clipless); clipless.BudgetSpent; clipless.errors") == "[]"


def test_asking_for_help_loads_nothing_heavy() -> None:
    """One after the other in one process, which shows the first that loads anything."""
    asks = [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
    program = (
        "from typer.testing import CliRunner; from clipless.app.cli import app; import sys\n"
        f"for ask in {asks}:\n"
        "    shown = CliRunner().invoke(app, ask, prog_name='clipless')\n"
        f"    assert shown.exit_code == 0 and 'clipless' in shown.output and not {HEAVY} & sys.modules.keys(), ask"
    )
    assert loaded(program) == "[]"


COMPLETED = {
    "tr": "train",
    "train --noise-m": "--noise-multiplier",
    "train --data fash": "fashion-mnist",
    "train --model enc": "encoder",
    "train --clipping quant": "quantile",
    "train --noise see": "seeded",
    "train --optimizer na": "nadam",
    "compare --clippings auto-s,non": "auto-s,none",
    "tune --method li": "liu-talwar",
    "audit --games step,one": "step,one-run",
    "bench --models mlp,cn": "mlp,cnn",
    "reproduce auto-fa": "auto-fashion",
}


def test_completion_loads_nothing_heavy() -> None:
    program = (
        "from typer.testing import CliRunner; from clipless.app.cli import app; import sys\n"
        f"for words, expected in {COMPLETED}.items():\n"
        "    line = {'COMP_WORDS': 'clipless ' + words, 'COMP_CWORD': str(len(words.split()))}\n"
        "    environment = line | {'_CLIPLESS_COMPLETE': 'complete_bash'}\n"
        "    shown = CliRunner().invoke(app, [], prog_name='clipless', env=environment)\n"
        f"    assert shown.output.split() == [expected] and not {HEAVY} & sys.modules.keys(), (words, shown.output)"
    )
    assert loaded(program) == "[]"


def test_the_test_would_see_it() -> None:
    assert loaded("import clipless; clipless.make_private").startswith("['cryptography'")


def test_the_version_is_the_same_everywhere() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert cited
    assert clipless.__version__ == PROJECT["version"] == cited[1]
    assert f"Version {clipless.__version__}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_the_package_says_of_itself() -> None:
    assert (Path(clipless.__file__).parent / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert PROJECT["requires-python"] == ">=3.11"
    assert not any(line.startswith("License ::") for line in PROJECT["classifiers"]), (
        "the license has a field of its own"
    )


def test_every_package_of_the_site_and_of_packaging_is_pinned() -> None:
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    for extra in ("docs", "package"):
        named = {re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["optional-dependencies"][extra]}  # type: ignore[index]
        assert named <= pinned


def test_a_tag_releases_what_was_tested() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert 'tags: ["v*"]' in workflow
    jobs = re.findall(r"^  (\w+):\n    (?:needs: (\w+))?", workflow.partition("jobs:")[2], flags=re.MULTILINE)
    assert jobs == [("test", ""), ("package", "test"), ("publish", "package")]
    assert ".ci/run" in workflow
    assert "make package-check" in workflow


def test_the_wheel_is_compiled_for_every_processor() -> None:
    """Functions for newer processors are chosen when the library is loaded, and no flag asks for one at build time."""
    assert not [flag for flag in build_hook().FLAGS if flag.startswith("-m")]

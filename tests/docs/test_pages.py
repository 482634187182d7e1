"""Every block of code in the documentation and the README is run or parsed, and every link leads somewhere."""

import json
import re
import shlex
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import clipless
from clipless.app.cli import COMMANDS, _load_command
from pages import DOCS, PAGES, ROOT, anchors, blocks, links

# Pages whose Python is run by a test of its own, which checks more than that it runs.
ELSEWHERE = {
    "README.md": "tests/docs/test_readme.py",
    "huggingface.md": "tests/integrations/test_huggingface_page.py",
    "jax.md": "tests/integrations/test_jax_page.py",
    "lightning.md": "tests/integrations/test_lightning_page.py",
    "listings.md": "tests/integrations/test_listings_page.py",
    "migrating.md": "tests/integrations/test_migrating.py",
    "own_data.md": "tests/docs/test_own_data_page.py",
    "reliability.md": "tests/test_reliability.py",
    "tuning.md": "tests/app/test_tuning.py",
}
# The same with fewer steps.
SHORTER = {
    "langevin.md": [("steps=10_000", "steps=8"), ("batch_size=1000", "batch_size=100"), ("thinning=100", "thinning=2")],
    "ledger.md": [("epochs=40", "epochs=2"), ("        ...\n", "        take_a_step(private, x, y)\n")],
    "distributed.md": [("batch_size=2048", "batch_size=16"), ("epochs=10", "epochs=1")],
}
WITH_PYTHON = [name for name, path in PAGES.items() if any(block.kind == "python" for block in blocks(path))]
HERE = [name for name in WITH_PYTHON if name not in ELSEWHERE]
# What a shell block may begin with, besides clipless, make and python, which are looked at.
OTHER_COMMANDS = {"pip", "git", "cd", "apt-get", "torchrun", "docker"}
SHELL = [
    (name, line)
    for name, path in PAGES.items()
    for block in blocks(path)
    if block.kind == "sh"
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines()
    if line.partition("#")[0].strip()
]


def given() -> dict[str, Any]:
    """What pages take as given: a model, its optimizer, records."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def take_a_step(private: clipless.Private, x: torch.Tensor, y: torch.Tensor) -> None:
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()

    return {
        "__name__": "page",
        "clipless": clipless,
        "torch": torch,
        "F": F,
        "Path": Path,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "dataset": TensorDataset(torch.randn(512, 4), torch.randint(0, 3, (512,))),
        "test_x": torch.randn(5, 4),
        "take_a_step": take_a_step,
    }


def code_of(name: str) -> list[str]:
    """The Python of a page, shortened. A page's text must hold what is replaced."""
    found = [block.text for block in blocks(PAGES[name]) if block.kind == "python"]
    for old, new in SHORTER.get(name, []):
        assert any(old in text for text in found), (name, old)
        found = [text.replace(old, new) for text in found]
    return found


@pytest.mark.parametrize("name", [name for name in HERE if name != "distributed.md"])
def test_python_of_the_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "ledger.md":
        (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    names = given()
    for number, text in enumerate(code_of(name)):
        exec(compile(text, f"{name} block {number}", "exec"), names)
    for held in list(names.values()):
        if isinstance(held, clipless.Private):
            held.detach()


WORLD = """
import os, sys, torch, clipless
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
build_model = Net
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
"""


def test_python_of_the_page_about_processes_runs(tmp_path: Path) -> None:
    """In a process of its own, as a world of one."""
    whole, sharded = code_of("distributed.md")
    script = f"{WORLD}{whole}\nprivate.detach()\nmodel = Net()\n{sharded}\nprint(private.plan)\nprivate.detach()\n"
    script += "torch.distributed.destroy_process_group()\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "ledger.jsonl").read_text().count("\n") > 1


def test_pages_that_are_run_elsewhere_are_named_there() -> None:
    assert ELSEWHERE.keys() <= set(WITH_PYTHON)
    for name, test in ELSEWHERE.items():
        assert name in (ROOT / test).read_text(encoding="utf-8"), test


def test_every_block_is_of_a_kind_that_is_looked_at() -> None:
    kinds = {(name, block.kind) for name, path in PAGES.items() for block in blocks(path)}
    drawings = {"design.md", "distributed.md", "ledger.md"}  # folders, timelines, lines of a file
    assert {kind for _, kind in kinds} <= {"python", "sh", "toml", "diff", "yaml", ""}
    assert {name for name, kind in kinds if not kind} <= drawings


@pytest.mark.parametrize(("name", "line"), SHELL)
def test_command_is_one_that_exists(name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options are parsed as the command line does; nothing is run. A configuration that it names has the model only."""
    first, *rest = shlex.split(line.partition(" > ")[0], comments=True)
    if "--config" in rest:
        monkeypatch.chdir(tmp_path)
        config = Path(rest[rest.index("--config") + 1])
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text('model = "mlp"\n')
    while "=" in first:
        first, *rest = rest
    if first == "clipless":
        parses(rest)
    elif first == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in rest if "=" not in target)
    elif first == "python" and rest[0] == "-m":
        assert rest[1] in ("clipless", "build", "pytest", "venv")
    elif first in ("python", ".venv/bin/python"):
        assert (ROOT / rest[0]).is_file()
    else:
        assert first in OTHER_COMMANDS, line


def parses(arguments: list[str]) -> None:
    command, *options = arguments
    assert command in COMMANDS
    if "..." not in options:
        with _load_command(command).make_context(command, options):
            pass


def test_a_wrong_option_would_be_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        parses(["train", "--epsilom", "3"])


@pytest.mark.parametrize("name", PAGES)
def test_toml_is_toml(name: str) -> None:
    for block in blocks(PAGES[name]):
        if block.kind == "toml":
            tomllib.loads(block.text)


@pytest.mark.parametrize("name", PAGES)
def test_no_link_is_dead(name: str) -> None:
    page = PAGES[name]
    for link in links(page):
        if re.match("https?://", link):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), link
        assert page.parent != DOCS or file.is_relative_to(DOCS), f"{link}: the site holds docs alone"
        assert not anchor or anchor in anchors(file), link


def test_every_page_is_in_the_navigation() -> None:
    """As text, since the site's own packages are not installed for the tests; `make docs` is strict about the rest."""
    named = re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(named) == len(set(named))
    assert {path.name for path in DOCS.glob("*.md")} <= set(named)


def test_every_public_name_is_in_the_reference() -> None:
    told = re.findall(r"^::: clipless\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(told) == sorted([*clipless.__all__, "reliability"])


def test_the_table_of_epsilons_is_true() -> None:
    """Bounds are rounded up to the digits shown."""
    from clipless.app.report_page.promise import most_probable, right_guesses

    page = (DOCS / "epsilon.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) % \|", page, flags=re.MULTILINE)
    assert len(rows) == 5
    for epsilon, *told in rows:
        true = (100 * most_probable(0.01, float(epsilon), 1e-5), 100 * right_guesses(float(epsilon), 1e-5))
        for text, value in zip(told, true, strict=True):
            assert 0 <= float(text) - value < 10 ** -len(text.partition(".")[2]), (epsilon, text, value)


def test_the_table_of_clippings_is_that_of_the_stored_runs() -> None:
    """`make figures` writes both."""
    runs = json.loads((DOCS / "figures" / "clipping.json").read_text(encoding="utf-8"))["runs"]
    table = (DOCS / "clipping.md").read_text(encoding="utf-8").partition("<!-- table -->")[2]
    for name, found in runs.items():
        percent = [100 * run["accuracy"] for run in found]
        assert f"| {name} | {statistics.mean(percent):.1f} ± {statistics.stdev(percent):.1f} % |" in table

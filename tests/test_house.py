"""The rules of the house, read off the source: who may import whom, and what no file may do."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import clipless
import house
from clipless import defaults

# Files to split next. The list may only shrink.
STILL_LONG = {"gradients/capture/recorder.py"}

TEXT = {".py", ".md", ".toml", ".c", ".h", ".txt", ".cff", ""}
FOLDERS = ("docs", "tests", "src", "experiments", "benchmarks", "examples")


def files_of(*rooms: str) -> list[Path]:
    return [path for module, path in house.MODULES.items() if house.room(module) in rooms]


def importing(files: list[Path], unwanted: Callable[[str], bool]) -> list[str]:
    return [
        f"{path.relative_to(house.SOURCE)}: {name}" for path in files for name in house.imports(path) if unwanted(name)
    ]


def using(attribute: Callable[[str], bool]) -> set[str]:
    """The rooms whose files use such an attribute."""
    return {
        house.room(module)
        for module, path in house.MODULES.items()
        for node in ast.walk(house.tree(path))
        if isinstance(node, ast.Attribute) and attribute(node.attr)
    }


def calling(name: str) -> set[str]:
    """The rooms whose files call a function by this bare name."""
    return {
        house.room(module)
        for module, path in house.MODULES.items()
        for node in ast.walk(house.tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    }


def test_every_room_has_a_layer() -> None:
    rooms = {house.room(module) for module in house.MODULES} - {""}
    assert rooms <= house.LAYER_OF.keys()
    assert sum(map(len, house.LAYERS)) == len(house.LAYER_OF)


def test_no_modules_import_each_other() -> None:
    assert house.cycles() == []


def test_a_name_of_a_class_has_one_meaning() -> None:
    assert house.repeated_names() == {}


def test_rooms_import_lower_layers_only() -> None:
    assert house.upward_imports() == []


def test_the_library_imports_neither_the_application_nor_the_experiments() -> None:
    library = [path for module, path in house.MODULES.items() if house.room(module) not in ("app", "__main__")]
    assert importing(library, lambda name: re.match(r"clipless\.app\b|experiments\b|benchmarks\b", name)) == []


def test_accounting_and_theory_import_no_torch() -> None:
    assert files_of("accounting")
    assert files_of("theory")
    assert importing(files_of("accounting", "theory"), lambda name: name.split(".")[0] == "torch") == []


def test_the_maths_of_clipping_imports_no_modules() -> None:
    assert files_of("clipping")
    assert importing(files_of("clipping", "thresholds", "partition"), lambda name: name.startswith("torch.nn")) == []


def test_the_oracle_is_independent_of_the_engine() -> None:
    below: set[str] = set()
    waiting = ["clipless.oracle"]
    while waiting:
        module = waiting.pop()
        below.add(module)
        waiting += house.imported_modules(module) - below
    assert not {module for module in below if house.room(module) in ("gradients", "native")}


def private_names_of_torch(path: Path) -> set[str]:
    """What a file imports or reads of torch that begins with an underscore."""
    names = {name for name in house.imports(path) if name.split(".")[0] == "torch"}
    for node in ast.walk(house.tree(path)):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"(torch|nn|F)(\.\w+)+", name := ast.unparse(node)):
            names.add(name)
    return {name for name in names if re.search(r"\._[a-zA-Z]", name)}


def test_what_is_private_to_torch_is_used_in_one_file() -> None:
    using = {module for module, path in house.MODULES.items() if private_names_of_torch(path)}
    assert using == {"clipless.torch_internals"}


def test_only_gradients_registers_module_hooks() -> None:
    """The callback for Lightning has one on the loss, to undo Lightning's division by the number of parts."""
    assert using(lambda name: "forward" in name and name.startswith("register_")) == {"gradients"}
    assert using(lambda name: name == "register_hook") == {"gradients", "integrations"}


def test_nothing_is_printed_outside_the_application_and_no_attribute_is_set_by_name() -> None:
    assert calling("print") <= {"app"}
    assert calling("setattr") == set()


def test_files_and_functions_stay_readable() -> None:
    assert house.long_files().keys() <= STILL_LONG
    assert house.long_functions() == {}


def test_operators_are_defined_in_one_file_of_tests() -> None:
    """Defined twice, as in a file of tests that is imported under two names, the first one's memory is gone while it is
    still called: torch reads what is there now, and once in a while a process of tests ends by a signal."""
    tests = house.REPOSITORY / "tests"
    definition = "@torch.library." + "custom_op"
    defining = [path for path in tests.rglob("*.py") if definition in path.read_text(encoding="utf-8")]
    assert defining == [tests / "operators.py"]
    importing = {name for path in tests.rglob("*.py") for name in house.imports(path) if ".operators." in f".{name}"}
    assert importing
    assert all(name.startswith("operators.") for name in importing)


def tracked_texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=house.REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [house.REPOSITORY / name for name in listed.stdout.splitlines()]
    return [path for path in paths if path.suffix in TEXT and path.is_file()]


def test_no_file_cites_one_outside_the_repository() -> None:
    cited = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w/-]+\.(?:py|md|json|svg|png|c|toml)\b")
    missing = []
    for path in tracked_texts():
        text = path.read_text(encoding="utf-8")
        names = {house.REPOSITORY / name for name in cited.findall(text)}
        if path.suffix == ".md":
            links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
            names |= {path.parent / link for link in links}
        missing += [f"{path.name}: {name}" for name in names if not name.exists()]
        missing += [f"{path.name}: {name}" for name in names if house.REPOSITORY not in name.resolve().parents]
        missing += re.findall(r"(?<![\w.])/(?:work|home|root)/\S*", text)
    assert missing == []


# Public names.


def in_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


LOADED = "import sys; print(sorted({'torch', 'matplotlib', 'sklearn'} & sys.modules.keys()))"


WITHOUT_TORCH = (
    "import clipless.accounting",
    "import clipless; clipless.epsilon(1.1, 0.01, 10, 1e-5); clipless.noise_multiplier(1.0, 1e-5, 0.01, 10)",
    "import clipless; clipless.Ledger, clipless.InvalidArgument, clipless.errors, clipless.read_ledger, dir(clipless)",
    "import clipless.theory, clipless.reliability; clipless.reliability.ece([0.5], [0])",
    "import clipless.app.cli",
    "from typer.testing import CliRunner; from clipless.app.cli import app\n"
    "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
    "from typer.testing import CliRunner; from clipless.app.cli import app\n"
    "run = ['--sample-rate', '0.01', '--steps', '10', '--delta', '1e-5']\n"
    "assert CliRunner().invoke(app, ['budget', '--noise-multiplier', '1', *run]).exit_code == 0",
)


def test_what_needs_no_torch_does_not_load_it() -> None:
    """One after the other in one process: none of them loads it."""
    codes = (f"{code}\n{LOADED}\n" for code in WITHOUT_TORCH)
    assert in_fresh_process("".join(codes)).splitlines() == ["[]"] * len(WITHOUT_TORCH)


def test_what_is_slow_to_import_is_loaded_at_the_first_epsilon() -> None:
    slow = "{'dp_accounting', 'scipy.stats', 'scipy.optimize'}"
    code = f"import sys, clipless.accounting; print(sorted({slow} & sys.modules.keys()))"
    assert in_fresh_process(code).strip() == "[]"


def test_every_public_name_resolves_to_what_type_checkers_see() -> None:
    (checked,) = [node for node in house.tree(house.SOURCE / "__init__.py").body if isinstance(node, ast.If)]
    declared = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert set(clipless.__all__) == set(declared)
    assert set(clipless.__all__) <= set(dir(clipless))
    for name, module in declared.items():
        assert getattr(clipless, name) is getattr(sys.modules[str(module)], name), name
    assert {name: module for name, module in declared.items() if module != "clipless"} == clipless._MODULE_OF


def test_submodules_are_attributes_and_other_names_are_not() -> None:
    code = (
        "import clipless; print(clipless.oracle.__name__, clipless.errors.__name__, clipless.thresholds.DCE.__name__)"
    )
    assert in_fresh_process(code) == "clipless.oracle clipless.errors DCE\n"
    with pytest.raises(AttributeError, match="no attribute 'make_privat'"):
        clipless.make_privat


def test_signatures_agree_with_the_defaults() -> None:
    for function in (clipless.make_private, clipless.check, clipless.clipped_sum, clipless.oracle.clipped_sum):
        assert inspect.signature(function).parameters["clipping"].default == defaults.CLIPPING
    assert inspect.signature(clipless.make_private).parameters["accountant"].default == defaults.ACCOUNTANT
    assert inspect.signature(clipless.epsilon).parameters["accountant"].default == defaults.ACCOUNTANT
    assert inspect.signature(clipless.noise_multiplier).parameters["accountant"].default == defaults.ACCOUNTANT
    for function in (clipless.make_private, clipless.check):
        assert inspect.signature(function).parameters["loss_reduction"].default is None

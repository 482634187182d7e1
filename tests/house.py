"""The house as the source tells it: rooms, imports between them, long files and functions. `python tests/house.py`.

A room is a module or package directly under `clipless`. `LAYERS` lists the rooms from bottom to top; a room may import
rooms of lower layers only.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "clipless"
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES, MOST_FUNCTION_LINES = 500, 50

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"arrays", "errors", "rounding"}),
    frozenset({"torch_internals"}),
    frozenset(
        {
            "arguments",
            "defaults",
            "clipped",
            "closures",
            "heap",
            "native",
            "noise_schedule",
            "processes",
            "processor",
            "random_state",
        }
    ),
    frozenset(
        {"accounting", "theory", "partition", "noise", "thresholds", "foreign", "replacing", "averaging", "neighbours"}
    ),
    frozenset({"clipping", "sampling", "runs"}),
    frozenset({"phases"}),
    frozenset({"distributed", "gradients", "oracle", "plan", "privacy", "reliability"}),
    frozenset({"planning", "preflight", "refusals", "splitting", "stepping"}),
    frozenset({"run_state"}),
    frozenset({"saved_run"}),
    frozenset({"private"}),
    frozenset({"auditing", "integrations", "langevin"}),
    frozenset({"app"}),
    frozenset({"__main__"}),
)
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}


def layer(room: str) -> int:
    """The number of a room's layer; a room without one is above all others."""
    return LAYER_OF.get(room, len(LAYERS))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def room(module: str) -> str:
    """The room of a module of clipless; "" for the package's own `__init__`, which loads names of all rooms lazily."""
    return [*module.split("."), ""][1]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below one, without what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not _type_checking(child):
            yield child
            yield from _nodes(child)


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of everything a file imports, in functions too: `from a import b` gives `a.b`."""
    found: set[str] = set()
    for node in _nodes(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def imported_modules(module: str) -> set[str]:
    """The modules of clipless that a module imports."""
    found = set()
    for name in imports(MODULES[module]):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name:
            found.add(name)
    return found - {module, "clipless"}


def imports_between_rooms() -> Mapping[str, set[str]]:
    """For each room the other rooms that it imports."""
    between: dict[str, set[str]] = {}
    for module in MODULES:
        between.setdefault(room(module), set()).update(map(room, imported_modules(module)))
    return {name: others - {name, ""} for name, others in sorted(between.items()) if name}


def cycles() -> list[list[str]]:
    """Groups of modules that import each other, directly or not (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in imported_modules(module):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in MODULES:
        if module not in order:
            visit(module)
    return found


def upward_imports() -> list[str]:
    """Imports of a room that is not in a lower layer."""
    return [
        f"{module} -> {other}"
        for module in MODULES
        for other in sorted(imported_modules(module))
        if room(module) and room(other) != room(module) and layer(room(other)) >= layer(room(module))
    ]


def long_files() -> dict[str, int]:
    """Files of more than `MOST_LINES` lines."""
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    return {name: length for name, length in lengths.items() if length > MOST_LINES}


def long_functions() -> dict[str, int]:
    """Functions of more than `MOST_FUNCTION_LINES` lines, without signature and docstring."""
    found = {}
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                if length > MOST_FUNCTION_LINES:
                    found[f"{path.relative_to(SOURCE)}:{node.name}"] = length
    return found


def _defined_names(path: Path) -> Iterator[str]:
    """The classes of a file and its other capitalised names, such as types and type variables, but no constants."""
    for node in ast.walk(tree(path)):
        names = [node.name] if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        yield from (name for name in names if name[0].isupper() and not name.isupper())


def repeated_names() -> dict[str, list[str]]:
    """Names of classes and types that several files define: one word, one meaning."""
    files: dict[str, list[str]] = {}
    for path in FILES:
        for name in _defined_names(path):
            files.setdefault(name, []).append(str(path.relative_to(SOURCE)))
    return {name: places for name, places in files.items() if len(places) > 1}


def main() -> None:
    lines: dict[str, int] = {}
    for module, path in MODULES.items():
        lines[room(module)] = lines.get(room(module), 0) + len(path.read_text().splitlines())
    between = imports_between_rooms()
    print("Rooms, from bottom to top: lines, and the rooms they import")
    for number, rooms in enumerate(LAYERS):
        for name in sorted(rooms & lines.keys()):
            print(f"  {number}  {name:12} {lines[name]:6}  {' '.join(sorted(between[name]))}")
    for title, found in (
        ("Cycles", [" ".join(group) for group in cycles()]),
        ("Upward imports", upward_imports()),
        (f"Files over {MOST_LINES} lines", [f"{name}: {length}" for name, length in long_files().items()]),
        (f"Functions over {MOST_FUNCTION_LINES} lines", [f"{n}: {length}" for n, length in long_functions().items()]),
        ("Names with two meanings", [f"{name}: {' '.join(places)}" for name, places in repeated_names().items()]),
    ):
        print(title + ("" if found else ": none"))
        for line in found:
            print("  " + line)


if __name__ == "__main__":
    main()

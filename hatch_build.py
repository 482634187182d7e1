"""Compiles src/clipless/native while the package is built, where there is a C compiler.

Without one the package works just the same, more slowly.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES, LIBRARY = "src/clipless/native", "src/clipless/native/_compiled.so"
FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-fPIC"]
# Files that numpy must be able to repeat bit for bit: each operation rounds once, none are fused.
EXACT = {"noise.c"}
# With threads, or without them where the compiler has none.
THREADS = (["-fopenmp"], [])


def compile_all(sources: Path, library: Path) -> str | None:
    """Compile the C files of a folder, or say why not."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if os.name != "posix" or shutil.which(compiler[0]) is None:
        return "there is no C compiler"
    problem: str | None = None
    for threads in THREADS:
        problem = compile_with([*compiler, *threads], sources, library)
        if problem is None:
            break
    return problem


def compile_with(compiler: list[str], sources: Path, library: Path) -> str | None:
    """Compile with this compiler, or say why not."""
    with tempfile.TemporaryDirectory() as folder:
        objects, made, stamp = [], Path(folder, library.name), Path(folder, "stamp.c")
        stamp.write_text(f'const char clipless_sources[] = "{digest(sources)}";\n', encoding="ascii")
        for source in (*sorted(sources.glob("*.c")), stamp):
            objects.append(str(Path(folder, source.name).with_suffix(".o")))
            contract = f"-ffp-contract={'off' if source.name in EXACT else 'fast'}"
            problem = run([*compiler, *FLAGS, contract, "-c", str(source), "-o", objects[-1]])
            if problem:
                return problem
        problem = run([*compiler, "-shared", *objects, "-o", str(made), "-lm"])
        if not problem:
            shutil.move(made, library)
        return problem


def digest(sources: Path) -> str:
    """Of all C files of a folder: `native/library.py` uses no library that was made of others."""
    files = sorted([*sources.glob("*.c"), *sources.glob("*.h")])
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


def run(command: list[str]) -> str | None:
    """Run, or say why not."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr or f"{command[0]} ended with {done.returncode}") if done.returncode else None


class Compiled(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        root = Path(self.root)
        (root / LIBRARY).unlink(missing_ok=True)
        problem = compile_all(root / SOURCES, root / LIBRARY)
        if problem is not None:
            self.app.display_warning(f"nothing is compiled, numpy and torch will do: {problem}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"] = [LIBRARY]

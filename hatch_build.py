"""Compiles the fast form of src/clipless/noise/normals.py while the package is built, where there is a C compiler.

Without one the package works just the same: numpy computes the same numbers, more slowly.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE, LIBRARY = "src/clipless/noise/normals.c", "src/clipless/noise/_normals.so"
# Each operation rounds once: no contraction, and none of the liberties of -ffast-math.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]


def compile_normals(source: Path, library: Path) -> str | None:
    """Compile, or say why not."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if os.name != "posix" or shutil.which(compiler[0]) is None:
        return "there is no C compiler"
    unfinished = library.with_suffix(".new")
    done = subprocess.run(
        [*compiler, *FLAGS, str(source), "-o", str(unfinished), "-lm"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        return done.stderr or f"{compiler[0]} ended with {done.returncode}"
    unfinished.replace(library)
    return None


class CompiledNoise(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        root = Path(self.root)
        (root / LIBRARY).unlink(missing_ok=True)
        problem = compile_normals(root / SOURCE, root / LIBRARY)
        if problem is not None:
            self.app.display_warning(f"noise is not compiled, numpy will do: {problem}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"] = [LIBRARY]

"""The C compiler and the build hook, for tests of what is compiled with the package."""

import functools
import importlib.util
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from clipless.native import LIBRARY

ROOT = Path(__file__).parents[1]


@functools.cache
def build_hook() -> ModuleType:
    """hatch_build.py, as the packager loads it."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has_compiler(*flags: str) -> bool:
    """Whether there is one that compiles the smallest of programs, headers and all, with these flags."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "one.c")
        source.write_text("#include <math.h>\nint main(void) { return 0; }\n")
        try:
            done = subprocess.run(
                ["cc", *flags, str(source), "-o", str(Path(folder, "one")), "-lm"], capture_output=True
            )
        except OSError:
            return False
        return done.returncode == 0


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C compiler")
needs_library = pytest.mark.skipif(
    not LIBRARY.exists(), reason="the package was installed without its compiled part: pip install -e . again"
)

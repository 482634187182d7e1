"""The C compiler and the build hook, for tests of what is compiled with the package."""

import functools
import importlib.util
import platform
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from clipless.native import LIBRARY

ROOT = Path(__file__).parents[1]
# The noise is compiled for processors with AES instructions.
NO_NOISE = platform.machine() != "x86_64"


@functools.cache
def build_hook() -> ModuleType:
    """hatch_build.py, as the packager loads it."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
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
# With a compiler a library that is missing is a failure, and nothing is skipped.
needs_library = pytest.mark.skipif(
    not LIBRARY.exists() and not has_compiler(), reason="there is neither a compiled library nor a C compiler"
)


def loaded(user: ModuleType, *library: Path) -> Any:
    """What this module takes from the compiled library. Where there is a C compiler it must be there and pass its check: if
    torch or numpy took its place unseen, a test would pass without having seen it. Without a compiler it is skipped."""
    form = user.compiled(*library)
    if form is None and (not has_compiler() or (NO_NOISE and ".noise." in user.__name__)):
        pytest.skip("there is neither a compiled library nor a C compiler for this processor")
    assert form is not None, (
        f"{user.__name__} does without its compiled function: the library is missing, of other sources, or computes "
        "something else. Compile it again: pip install -e ."
    )
    return form

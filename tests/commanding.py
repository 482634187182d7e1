"""The command line from its beginning to its exit code, without a process of its own, which would take seconds to start.

What only a process can show is tested with one: signals, that nothing else is on stdout, the installed script.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from clipless.app.cli import main


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_main(arguments: list[str], cwd: Path, capsys: pytest.CaptureFixture[str]) -> Done:
    """What `clipless` with these arguments, in this folder, exits with and writes. Modules that it imports from the folder
    are forgotten again."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["clipless", *arguments])
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("COLUMNS", "200")
        patch.setenv("NO_COLOR", "1")
        with pytest.raises(SystemExit) as exited:
            main()
    for name in {path.stem for path in cwd.glob("*.py")}:
        sys.modules.pop(name, None)
    return Done(int(exited.value.code or 0), *capsys.readouterr())

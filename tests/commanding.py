"""The command line from its beginning to its exit code, without a process of its own, which would take seconds to start.

What only a process can show is tested with one: signals, that nothing else is on stdout, the installed script.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

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


class Shell:
    """Runs `clipless` in a folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def __call__(self, *arguments: str) -> Done:
        return run_main(list(arguments), self.folder, self._capsys)

    def good(self, *arguments: str) -> dict[str, Any]:
        """What it prints as JSON."""
        done = self(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def bad(self, *arguments: str) -> str:
        """Why it refuses, in one or two lines."""
        done = self(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) <= 2
        return done.stderr

    def stored(self, folder: str) -> str:
        """The configuration that is stored with what it made."""
        return (self.folder / folder / "config.toml").read_text(encoding="utf-8")

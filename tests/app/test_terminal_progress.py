"""The bar that long work moves by reports: on a terminal, and only there."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from clipless.app.terminal.output import quietly
from clipless.app.terminal.progress import reporting_bar

with quietly("quiet" in sys.argv), reporting_bar(visible=True) as report:
    if "nothing" not in sys.argv:
        report("features +patches", 0, 4)
        report("features +patches", 2, 4)
"""


def on_a_terminal(*arguments: str) -> str:
    """What a process writes to a terminal that is its standard error."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    subprocess.run(command, stderr=theirs, stdout=subprocess.DEVNULL, check=True, env=environment)
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says so at the end
            part = b""
        if not part:
            os.close(ours)
            return written.decode()
        written += part


@pytest.mark.skipif(not Path("/dev/ptmx").exists(), reason="this system has no pseudo-terminals")
def test_the_bar_appears_with_the_first_report() -> None:
    shown = on_a_terminal()
    assert "features +patches" in shown
    assert "50 %" in shown
    assert on_a_terminal("nothing") == ""
    assert on_a_terminal("quiet") == ""


def test_no_log_has_a_bar() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""

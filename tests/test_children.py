"""Children are like processes that were started anew, but for their imports."""

import os
import signal
from pathlib import Path

import pytest
import torch

import children


def test_a_child_has_its_own_arguments_folder_environment_and_output(tmp_path: Path) -> None:
    code = (
        "import os, sys\nprint(sys.argv[1:], os.getcwd(), os.environ['TOLD'], __name__, flush=True)\n"
        "os.environ['TOLD'] = 'changed'\nsys.stderr.write('wrong')\nsys.exit(3)"
    )
    for _ in range(2):
        done = children.run_code(code, "a", cwd=tmp_path, environment={"TOLD": "this"})
        assert done == (3, f"['a'] {tmp_path} this __main__\n", "wrong")
    assert "TOLD" not in os.environ


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("", 0, ""),
        ("raise SystemExit('told why')", 1, "told why\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_a_child_ends_as_python_does(code: str, exit_code: int, said: str) -> None:
    done = children.run_code(code)
    assert done.returncode == exit_code
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)


def test_children_draw_other_numbers_and_share_no_thread() -> None:
    code = "import random, threading, torch; print(random.random(), float(torch.rand(())), threading.active_count())"
    one, other = (children.run_code(code).stdout.split() for _ in range(2))
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert one[2] == other[2] == "1"


def test_warnings_are_shown_or_are_errors() -> None:
    code = "import warnings; warnings.warn('look'); print('on')"
    shown, refused = children.run_code(code), children.run_code(code, strict=True)
    assert (shown.returncode, shown.stdout, "UserWarning: look" in shown.stderr) == (0, "on\n", True)
    assert (refused.returncode, refused.stdout) == (1, "")


def test_a_child_heeds_signals_and_is_waited_for(tmp_path: Path) -> None:
    code = "import time\nprint('begun', flush=True)\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    exit(7)"
    (tmp_path / "sleeper.py").write_text(code)
    for number, exit_code in ((signal.SIGINT, 7), (signal.SIGTERM, -15), (signal.SIGKILL, -9)):
        child = children.Child(tmp_path / "sleeper.py", cwd=tmp_path, notes=tmp_path)
        child.wait_for("begun")
        assert child.poll() is None
        child.send_signal(number)
        assert child.wait() == child.returncode == exit_code
        child.kill()
    with pytest.raises(TimeoutError, match="not done after"):
        children.Child(tmp_path / "sleeper.py", cwd=tmp_path, notes=tmp_path).wait(0.01)


WAITS = """
import time

def stands_here():
    while True:
        time.sleep(1)

print("begun", flush=True)
stands_here()
"""


@pytest.mark.parametrize(("other", "code"), [(WAITS, -3), ("raise ValueError('not this one')", 1), ("", 0)])
def test_of_processes_that_wait_for_each_other_none_is_waited_for_in_vain(
    other: str, code: int, tmp_path: Path
) -> None:
    """Neither until all of them have had their time, nor once one has failed; each says where it stood."""
    started = []
    for number, program in enumerate((WAITS, other)):
        (tmp_path / f"{number}.py").write_text(program)
        started.append(children.Child(tmp_path / f"{number}.py", cwd=tmp_path, notes=tmp_path))
    started[0].wait_for("begun")
    waiting, ended = children.all_done(started, timeout=600 if code == 1 else 1, grace=0)
    assert (waiting.returncode, ended.returncode) == (-3, code)
    assert "in stands_here" in waiting.stderr
    assert ("not this one" in ended.stderr) == (code == 1)


def test_processes_that_come_to_an_end_are_waited_for(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys, time; time.sleep(float(sys.argv[1])); print(sys.argv[1])")
    (tmp_path / "dies.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    programs = [("ends.py", "0.5"), ("dies.py", ""), ("ends.py", "0.1")]
    started = [children.Child(tmp_path / name, how, cwd=tmp_path, notes=tmp_path) for name, how in programs]
    found = children.all_done(started, grace=0)
    assert [done.returncode for done in found] == [0, -9, 0]
    assert [done.stdout for done in found] == ["0.5\n", "", "0.1\n"]


def test_what_is_imported_is_that_of_the_tests() -> None:
    code = "import clipless, torch; print(clipless.__file__, torch.__version__, torch.get_num_threads())"
    import clipless

    assert children.run_code(code).stdout.split() == [clipless.__file__, str(torch.__version__), "1"]

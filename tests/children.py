"""Python programs in processes of their own that start in milliseconds: each is forked from a clean process that has
imported torch and clipless and done nothing else. Every process of tests has one such server, once it needs it.

Only imports are shared. A child has its own arguments, folder, environment, warnings and random numbers; it exits, writes
and is killed like any other. What it cannot show is how the interpreter starts, and what is imported when: that is tested
with real starts.
"""

import atexit
import faulthandler
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

HERE = Path(__file__).parent
# What most programs need. What else they import they import themselves.
IMPORTS = (
    "torch, torch.distributed.fsdp, sklearn.datasets, scipy.stats, dp_accounting, clipless.private, clipless.oracle, \
clipless.app.training, clipless.app.commands.train, clipless.app.commands.report, clipless.app.tuning, \
clipless.app.bench.problems"
)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Child:
    """A program that was started: a script by its path, or a module by its name, as after `python -m`.

    With `strict` every warning is an error. What it writes goes to files in `notes`, or to `err`.
    """

    def __init__(
        self,
        program: str | Path,
        *arguments: str | Path,
        cwd: Path,
        notes: Path,
        environment: Mapping[str, str] | None = None,
        strict: bool = False,
        err: Path | None = None,
    ) -> None:
        name = time.monotonic_ns()
        self.out, self.err = notes / f"{name}.out", err or notes / f"{name}.err"
        self.out.touch()
        self.err.touch()
        self._server = server(os.getpid())
        self.returncode: int | None = None
        self.pid = self._server.asked(
            {
                "program": str(program),
                "arguments": list(map(str, arguments)),
                "cwd": str(cwd),
                "out": str(self.out),
                "err": str(self.err),
                "environment": dict(os.environ) | dict(environment or {}),
                "path": sys.path,
                "strict": strict,
            }
        )

    def poll(self) -> int | None:
        """The exit code, negative if a signal ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.asked({"pid": self.pid})
        return self.returncode

    def wait(self, timeout: float = 240) -> int:
        deadline, pause = time.monotonic() + timeout, 0.002
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"not done after {timeout} s; it wrote {self.err.read_text()}")
            time.sleep(pause)
            pause = min(2 * pause, 0.03)  # who waits long asks less often
        return code

    def done(self, timeout: float = 240) -> Done:
        return Done(self.wait(timeout), self.out.read_text("utf-8"), self.err.read_text("utf-8"))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Until it has written this to stdout."""
        deadline = time.monotonic() + timeout
        while text not in self.out.read_text("utf-8"):
            assert self.poll() is None, self.err.read_text("utf-8")
            assert time.monotonic() < deadline
            time.sleep(0.01)


def run(program: str | Path, *arguments: str | Path, cwd: Path | None = None, **further: Any) -> Done:
    """What the program exits with and writes; `further` as for `Child`."""
    with tempfile.TemporaryDirectory() as notes:
        return Child(program, *arguments, cwd=cwd or Path.cwd(), notes=Path(notes), **further).done()


def run_code(code: str, *arguments: str | Path, cwd: Path | None = None, **further: Any) -> Done:
    """The same for a program that is given as text."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "program.py")
        script.write_text(code, encoding="utf-8")
        return run(script, *arguments, cwd=cwd, **further)


def all_done(started: Sequence[Child], timeout: float = 240, grace: float = 5) -> list[Done]:
    """What processes that wait for each other end with and write.

    All of them have `timeout` seconds, and `grace` more once one has failed, since the others may wait for it in vain. Those
    that are left are ended, and write where they stood. One that was killed has not failed.
    """
    deadline, pause = time.monotonic() + timeout, 0.002
    while None in (codes := [process.poll() for process in started]) and time.monotonic() < deadline:
        if any(code not in (None, 0, -signal.SIGKILL) for code in codes):
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(pause)
        pause = min(2 * pause, 0.03)
    for process in started:
        process.send_signal(signal.SIGQUIT)
    return [process.done(timeout=30) for process in started]


def rank_environments(size: int) -> list[dict[str, str]]:
    """What torchrun tells each of so many ranks."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    return [
        where | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        for rank in range(size)
    ]


class InsteadOfSubprocess:
    """The part of `subprocess` with which clipless itself starts modules: `monkeypatch.setattr(module, "subprocess",
    InsteadOfSubprocess(tmp_path))`."""

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def run(self, command: Sequence[str], *, timeout: float, capture_output: bool, text: bool) -> Done:
        assert capture_output
        assert text
        return self._started(command).done(timeout)

    def Popen(self, command: Sequence[str], *, env: Mapping[str, str], stderr: IO[str]) -> Child:
        return self._started(command, env, Path(stderr.name))

    def _started(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, err: Path | None = None
    ) -> Child:
        python, option, module, *arguments = command
        assert (python, option) == (sys.executable, "-m")
        return Child(module, *arguments, cwd=Path.cwd(), notes=self.notes, environment=environment, err=err)


class Server:
    """The process from which children are forked, as long as this one lives."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, text=True, bufsize=1, **pipes)  # type: ignore[call-overload]
        atexit.register(self._close, os.getpid())

    def asked(self, request: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(request) + "\n")
        return json.loads(self._process.stdout.readline())

    def _close(self, owner: int) -> None:
        if os.getpid() == owner:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()


@cache
def server(owner: int) -> Server:
    """The server of this process, and not of one that it was forked from."""
    return Server()


def _become(request: Mapping[str, Any]) -> None:
    """What the interpreter does before a program."""
    for target, path, mode in ((0, os.devnull, os.O_RDONLY), (1, request["out"], _WRITE), (2, request["err"], _WRITE)):
        opened = os.open(path, mode, 0o600)
        os.dup2(opened, target)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8") for number in range(3)
    )
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    faulthandler.register(signal.SIGQUIT, sys.stderr, chain=True)  # writes where it stands, then ends
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    warnings.simplefilter("error" if request["strict"] else "default")
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


_WRITE = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def _run(request: Mapping[str, Any]) -> int:
    """Be that program to its end; gives the exit code."""
    try:
        _become(request)
        program = request["program"]
        sys.argv, sys.path[:] = [program, *request["arguments"]], request["path"]
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        else:
            sys.path.insert(0, request["cwd"])
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve() -> None:
    """Fork a child for every line that describes one and tell its number, or tell how one of them ended. In the end none is
    left."""
    exec(f"import {IMPORTS}", {})
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    running: set[int] = set()
    for line in orders:
        request = json.loads(line)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            running.discard(pid)
        else:
            answer = os.fork()
            if answer == 0:
                os.close(orders.fileno())
                os.close(answers.fileno())
                code = _run(request)
                atexit._run_exitfuncs()
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(code)
            running.add(answer)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in running:  # left by tests that failed
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    serve()

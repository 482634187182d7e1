"""A measurement of `clipless bench` with the memory allocator set as asked for: in this process if it is set so, else in a
new one, `python -m clipless.app.commands.bench_process '{"settings": ...}'`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from clipless.app.bench import store
from clipless.app.bench.run import BenchSettings, run
from clipless.app.progress import OnProgress
from clipless.app.terminal.progress import PERCENT, progress_bar


def measure_to_file(settings: BenchSettings, out: Path, *, malloc: bool, visible: bool) -> Path:
    """Measure, and return the file that the result went to. Ends with the exit code of the other process if that failed."""
    wanted = store.environment(malloc)
    if wanted == dict(os.environ):
        return measure_here(settings, out, visible)
    request = json.dumps({"settings": asdict(settings), "out": str(out), "visible": visible})
    done = subprocess.run([sys.executable, "-m", __name__, request], env=wanted, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return Path(done.stdout.splitlines()[-1])


def measure_here(settings: BenchSettings, out: Path, visible: bool) -> Path:
    with _progress(visible=visible) as report:
        result = run(settings, report, keep=lambda so_far: store.keep(so_far, out))
    return store.place(result, out)


@contextmanager
def _progress(*, visible: bool) -> Iterator[OnProgress]:
    with progress_bar(PERCENT, visible=visible) as bar:
        task = bar.add_task("one step of each model", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def main(request: str) -> None:
    asked = json.loads(request)
    settings = asked["settings"].items()
    values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in settings}
    sys.stdout.write(f"{measure_here(BenchSettings(**values), Path(asked['out']), asked['visible'])}\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""Where runs are executed: here, in processes of this machine, or on a Dask cluster."""

import importlib
import multiprocessing.context
import multiprocessing.process
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from typing import Any, Protocol

import torch

from clipless.app.names import EXECUTORS
from clipless.arguments import unknown_name, whole
from clipless.errors import InvalidArgument, Misuse

CONNECT_SECONDS = 15


class Submits(Protocol):
    """Anything that runs functions as `concurrent.futures` does."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> "Future[Any]":
        """Start `fn(*args)`."""


class Pool(Protocol):
    """Executes up to `width` runs at a time. An exception of a type in `lost` means that the run's process died."""

    width: int
    lost: tuple[type[BaseException], ...]

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> "Future[Any]":
        """Start `fn(*args)`."""

    def renew(self) -> None:
        """Make the pool usable after a loss."""

    def close(self) -> None:
        """Stop what is still running and release all resources."""


class InProcess:
    """One run after the other, in this process."""

    width = 1
    lost: tuple[type[BaseException], ...] = ()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def renew(self) -> None:
        pass

    def close(self) -> None:
        pass


class Borrowed:
    """The caller's executor, which the caller closes."""

    lost: tuple[type[BaseException], ...] = (BrokenExecutor, CancelledError)

    def __init__(self, executor: Submits, width: int = 1) -> None:
        if not callable(getattr(executor, "submit", None)):
            raise InvalidArgument(f"an executor has submit(fn, *args) -> Future, got {executor!r}.")
        self.width = whole("width", width)
        self._executor = executor

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> "Future[Any]":
        return self._executor.submit(fn, *args)

    def renew(self) -> None:
        try:
            self._executor.submit(os.getpid).result()
        except self.lost as error:
            raise Misuse(
                "the executor broke when a worker died, and clipless cannot replace it: pass "
                "clipless.app.tuning.Processes(n), which starts a new one. What the search costs is counted."
            ) from error

    def close(self) -> None:
        pass


class _Tracked(multiprocessing.context.SpawnContext):
    """Remembers the processes it starts, so that they can be ended."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[multiprocessing.process.BaseProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # noqa: N802
        process = multiprocessing.context.SpawnProcess(*args, **kwargs)
        self.started.append(process)
        return process


class Processes:
    """Fresh processes of this machine, each with an equal number of the processor's cores."""

    lost: tuple[type[BaseException], ...] = (BrokenExecutor, CancelledError)

    def __init__(self, workers: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.width = whole("workers", cores if workers is None else workers)
        self._threads = max(1, cores // self.width)
        self._start()

    def _start(self) -> None:
        self._context = _Tracked()
        self._executor = ProcessPoolExecutor(self.width, self._context, _begin_worker, (self._threads,))

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> "Future[Any]":
        return self._executor.submit(fn, *args)

    def renew(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        for process in self._context.started:
            process.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)


def _begin_worker(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process, which ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)


def _end_with_parent() -> None:
    """A parent that was killed ends nobody: its workers would wait for their next run for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _distributed() -> Any:
    try:
        return importlib.import_module("distributed")
    except ImportError as error:
        raise InvalidArgument("a Dask cluster needs the package distributed: pip install 'clipless[dask]'.") from error


class DaskCluster:
    """A Dask cluster by the address of its scheduler. Its workers have clipless installed and can read the data.

    A run whose worker dies is given to another by the cluster itself; one that kills worker after worker is lost.
    """

    def __init__(self, address: str, width: int | None = None) -> None:
        self.lost: tuple[type[BaseException], ...] = (_distributed().KilledWorker, CancelledError)
        self._address = address
        self._connect()
        workers = len(self._client.scheduler_info(n_workers=-1)["workers"])
        self.width = whole("workers", max(1, workers) if width is None else width)

    def _connect(self) -> None:
        distributed = _distributed()
        try:
            self._client = distributed.Client(self._address, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise InvalidArgument(
                f"cannot reach a Dask scheduler at {self._address} ({error}). Give the address that `dask scheduler` "
                "shows, as tcp://host:8786."
            ) from error
        self._executor: Executor = self._client.get_executor(pure=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> "Future[Any]":
        return self._executor.submit(fn, *args)

    def renew(self) -> None:
        if self._client.status != "running":
            self.close()
            self._connect()

    def close(self) -> None:
        self._executor.shutdown(wait=False)
        self._client.close()


def open_pool(name: str, workers: int | None = None, address: str | None = None) -> Pool:
    """The pool of that name: local, processes or dask."""
    if (name == "dask") != (address is not None):
        raise InvalidArgument("--executor dask and --dask-address belong together: give both, or neither.")
    if name == "local":
        if workers not in (None, 1):
            raise InvalidArgument(f"{workers} workers need --executor processes or dask; local runs one at a time.")
        return InProcess()
    if name == "processes":
        return Processes(workers)
    if name == "dask":
        return DaskCluster(str(address), workers)
    raise unknown_name("executor", name, EXECUTORS)

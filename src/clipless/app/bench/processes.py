"""A private step of several processes against plain `DistributedDataParallel` and plain FSDP2, and all against one process.

Every world is made of fresh processes of one thread each, `python -m clipless.app.bench.processes REQUEST`, joined by gloo,
each on a core of its own.
The same batch is divided over the ranks, so a world of two that takes half as long has twice the throughput.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clipless.app.bench import memory
from clipless.app.bench.problems import PROBLEMS, TINY_PROBLEMS, Block, Problem, Residual
from clipless.app.bench.timing import interleave
from clipless.app.bench.ways import PLAIN, SEED, Runner, private, train_step
from clipless.clipping import auto_s
from clipless.errors import Misuse

PRIVATE = "auto-s"
SHARDED, PRIVATE_SHARDED = f"{PLAIN} sharded", f"{PRIVATE} sharded"
# Each private way beside the plain one that it is measured against.
PAIRS = {PRIVATE: PLAIN, PRIVATE_SHARDED: SHARDED}
# Each way of several processes beside the way of one that does the same.
PAIRS_IN_ONE = {PLAIN: PLAIN, PRIVATE: PRIVATE, SHARDED: PLAIN, PRIVATE_SHARDED: PRIVATE}
SECONDS = 1800
MEMORY_ROUNDS = 3
# glibc's allocator gives freed memory back at once, so that the peak is of what is held.
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


@dataclass(frozen=True)
class Request:
    """What the ranks of one world do. `folder` is where they meet and leave their answers."""

    model: str
    processes: int
    ways: tuple[str, ...]
    rounds: int
    tiny: bool
    folder: str


@dataclass(frozen=True)
class World:
    """A world's times of a step, least and median of the rounds, and the most memory that a rank took above its imports,
    if that was measured."""

    processes: int
    min_ms: dict[str, float]
    median_ms: dict[str, float]
    peak_above_import_mb: dict[str, float]

    @property
    def private_over_plain(self) -> dict[str, float]:
        """For each private way how many times longer it takes than its plain one."""
        return {way: self.min_ms[way] / self.min_ms[plain] for way, plain in PAIRS.items() if way in self.min_ms}


@dataclass(frozen=True)
class Comparison:
    """One process and several, on one model. `bytes_sent` is what a rank hands to the reduction at each step, `state_mb`
    what parameters, gradients and the optimizer's state take where nothing is sharded, `parameters` how many are trained."""

    model: str
    one: World
    several: World
    bytes_sent: int
    state_mb: float
    parameters: int

    def speedup(self, way: str) -> float:
        """How many times the throughput of one process several have."""
        return self.one.min_ms[PAIRS_IN_ONE[way]] / self.several.min_ms[way]

    @property
    def saved_share(self) -> float | None:
        """By how much of `state_mb` the peak of a rank is lower if the private model is sharded; None if not measured."""
        peaks = self.several.peak_above_import_mb
        return (peaks[PRIVATE] - peaks[PRIVATE_SHARDED]) / self.state_mb if PRIVATE_SHARDED in peaks else None

    def to_dict(self) -> dict[str, Any]:
        speedups = {way: self.speedup(way) for way in self.several.min_ms}
        ratios = {"one": self.one.private_over_plain, "several": self.several.private_over_plain}
        found = {"speedup": speedups, "private_over_plain": ratios, "saved_share_of_state": self.saved_share}
        return asdict(self) | found


def compare(model: str, processes: int, rounds: int, tiny: bool = False, peak: bool = True) -> Comparison:
    """Measure one model in a world of one process and in a world of several; `peak` says whether memory is measured, which
    takes worlds of its own."""
    problem = (TINY_PROBLEMS if tiny else PROBLEMS)[model]
    built = problem.build()
    trained = [p for p in built.parameters() if p.requires_grad]
    sent = sum(4 * p.numel() for p in trained)
    numbers = sum(p.numel() for p in built.parameters()) + sum(p.numel() for p in trained) * (
        1 + _moments(problem, built)
    )
    one, several = (_world(model, size, rounds, tiny, peak) for size in (1, processes))
    return Comparison(model, one, several, sent, 4 * numbers / 1e6, sent // 4)


def _moments(problem: Problem, model: nn.Module) -> int:
    """How many numbers the optimizer keeps for each parameter."""
    return 2 if isinstance(problem.optimizer(model), torch.optim.Adam) else 0


def _world(model: str, processes: int, rounds: int, tiny: bool, peak: bool) -> World:
    ways = (PLAIN, PRIVATE) if processes == 1 else tuple(PAIRS_IN_ONE)
    times: dict[str, list[float]] = _answers(model, processes, ways, rounds, tiny)[0]["ms"]
    peaks = {}
    for way in ways if peak else ():
        peaks[way] = max(
            said["peak_mb"] for said in _answers(model, processes, (way,), MEMORY_ROUNDS, tiny, GIVING_BACK)
        )
    medians = {way: sorted(found)[len(found) // 2] for way, found in times.items()}
    return World(processes, {way: min(found) for way, found in times.items()}, medians, peaks)


def _answers(
    model: str,
    processes: int,
    ways: tuple[str, ...],
    rounds: int,
    tiny: bool,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """What every rank of a fresh world found."""
    with tempfile.TemporaryDirectory() as folder:
        request = json.dumps(asdict(Request(model, processes, ways, rounds, tiny, folder)))
        alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        ranks = []
        for rank in range(processes):
            with open(Path(folder, f"{rank}.txt"), "w") as errors:
                command = [sys.executable, "-m", __name__, request, str(rank)]
                environment = alone | {"OMP_NUM_THREADS": "1"} | dict(settings)
                ranks.append(subprocess.Popen(command, env=environment, stderr=errors))
        try:
            until = time.monotonic() + SECONDS
            while any(process.poll() is None for process in ranks) and time.monotonic() < until:
                if any(process.returncode for process in ranks):
                    break  # the others would wait for it
                time.sleep(0.2)
        finally:
            failed = [rank for rank, process in enumerate(ranks) if process.poll() != 0]
            failed.sort(key=lambda rank: ranks[rank].returncode is not None)  # last what ended by itself
            for process in ranks:
                process.kill()
                process.wait()
        if failed:
            said = "".join(Path(folder, f"{rank}.txt").read_text() for rank in failed).strip().splitlines()[-1:]
            raise Misuse(
                f"a rank of {model} failed or took too long: {''.join(said)}. Run this model alone to see why."
            )
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]


def _plain(problem: Problem, rank: int, processes: int) -> Runner:
    """Training without privacy, on this rank's share of the batch."""
    model, x, y = problem.make(SEED)
    model = DistributedDataParallel(model) if processes > 1 else model
    own = x[rank::processes], y[rank::processes]
    return Runner(lambda: own, partial(train_step, problem, model, problem.optimizer(model)), lambda: None)


def _plain_sharded(problem: Problem, rank: int, processes: int) -> Runner:
    model, x, y = problem.make(SEED)
    own = x[rank::processes], y[rank::processes]
    step = partial(train_step, problem, _sharded(model), problem.optimizer(model))
    return Runner(lambda: own, step, lambda: None)


def _sharded(model: nn.Module) -> nn.Module:
    """The model sharded by FSDP2: every block, or every layer where there are none, apart from the rest."""
    from torch.distributed.fsdp import fully_shard

    blocks: list[nn.Module] = [m for m in model.modules() if isinstance(m, Block | Residual | nn.Embedding)]
    for module in blocks or [child for child in model.children() if any(True for _ in child.parameters())]:
        fully_shard(module)
        if isinstance(module, nn.Embedding):  # whose backward pass has no use for its weight
            cast(Any, module).set_unshard_in_backward(False)
    fully_shard(model)
    return model


def main(request: Request, rank: int) -> None:
    """One rank: take the steps, and write down how long they took and the peak of memory."""
    if sys.platform == "linux":  # or two of them may share a core while another one idles
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    memory.import_all()
    folder = Path(request.folder)
    if request.processes > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=request.processes
        )
    problem = (TINY_PROBLEMS if request.tiny else PROBLEMS)[request.model]
    if request.processes > 1:
        import_module("torch.distributed.fsdp")  # for every way, so that it counts as imported
    imported = memory.resident("VmRSS")
    makers = {
        PLAIN: lambda: _plain(problem, rank, request.processes),
        PRIVATE: lambda: private(problem, auto_s()),
        SHARDED: lambda: _plain_sharded(problem, rank, request.processes),
        PRIVATE_SHARDED: lambda: private(problem, auto_s(), _sharded),
    }
    runners = {way: makers[way]() for way in request.ways}
    memory.forget_peak()
    interleave(runners, 2)
    series = interleave(runners, request.rounds)
    found = {way: list(one.step_ms.values()) for way, one in series.items()}
    said = {"ms": found, "peak_mb": memory.resident("VmHWM") - imported}
    (folder / f"{rank}.json").write_text(json.dumps(said))
    if request.processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Request(**json.loads(sys.argv[1])), int(sys.argv[2]))

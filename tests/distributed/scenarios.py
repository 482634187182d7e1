"""What the ranks do. Each scenario is called on every rank and gives what the tests look at."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hurried import hurried
from open_runs import OPEN, gone_on, left_open
from shared_run import SIZE, backward, begin, between, dataset, network, refused, released, steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import TensorDataset
from wrapping import averaged, in_buckets, joined, wrapped

import clipless
from clipless.clipping import CLIPPINGS

PARTITIONS = ("flat", "per-layer", "per-parameter")
CASES = [(name, groups) for name in CLIPPINGS for groups in PARTITIONS]
# Members of the worlds that are made of the four ranks; in one of them a rank's number is not its number in the world.
WORLDS = {2: [1, 3], 3: [0, 1, 2], 4: [0, 1, 2, 3]}


def cases_of(size: int) -> list[tuple[str, str]]:
    """All in the world of two; in each of the others a half of them with every clipping, whole batches and parts."""
    half = {2: (0, 1, 2, 3), 3: (0, 1), 4: (2, 3)}[size]
    return [case for number, case in enumerate(CASES) if number % 4 in half]


def case(name: str, groups: str, **changes: Any) -> dict[str, Any]:
    """One clipping with one partition, every other one in micro-batches."""
    micro = 2 if CASES.index((name, groups)) % 2 else None
    make: Any = getattr(clipless, "global_" if name == "global" else name.replace("-", "_"))
    options = {"cutoff": 5.0} if name == "global" else {}  # a cutoff that keeps some records
    return released(micro=micro, clipping=make(groups=groups, **options), **changes)


def everything(folder: Path) -> dict[Any, Any]:
    """All that ranks can do together, in every world that this one is in; in the end the last rank is killed."""
    said: dict[Any, Any] = {}
    for size, members in WORLDS.items():
        group = None if size == dist.get_world_size() else between(members)
        if dist.get_rank() in members:
            said[size] = {f"{name} {groups}": case(name, groups, group=group) for name, groups in cases_of(size)}
            said[size] |= {"noise": pure_noise(group), "batches": batches(group), "secure": secure(group)}
        if size == 2:
            if dist.get_rank() in members:
                said[size] |= one_world(group, folder)
            else:
                said["outside"] = refused(lambda: begin(group=group))  # noqa: B023
    pairs = [between(members) for members in ([0, 1], [2, 3])]
    said["hanging"] = hanging()
    torch.save(said, folder / f"{dist.get_rank()}.pt")
    pair, dying = dist.get_rank() // 2, dist.get_rank() % 2 == 1
    for lost in (0, 1):
        left_open(folder / OPEN[pair], pairs[pair], lost)
    return said | {"killed": killed(folder, pairs[pair], dying, ("recording", "add_up")[pair])}


def one_world(group: Any, folder: Path) -> dict[str, Any]:
    """What needs to be seen in one world only."""
    rank = dist.get_rank(group)
    model = network(seed=rank)
    clipless.broadcast_weights(model, group)

    def ddp(**options: Any) -> nn.Module:
        return DistributedDataParallel(network(seed=rank), process_group=group, **options)

    return {
        "broadcast": released(model, group=group),
        "ddp": released(ddp(), group=group),
        "ddp in parts": released(ddp(find_unused_parameters=True), micro=1, group=group),
        "plain again": plain_after(ddp(), group),
        "alone": released(seed=rank, group=False),
        "without a record": [unnoised(without, group) for without in (None, 0, SIZE - 1)],
        "refused": refusals(rank, group),
        "wrapped": wrapped(group),
        "averaged": averaged(group),
        "in buckets": in_buckets(group),
        "joined": joined(group),
        "hurried": hurried(rank, group, folder),
        "failures": failures(rank, group),
        "left": left_behind(rank, group, folder),
    }


def pure_noise(group: Any = None, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> dict[str, Any]:
    """Noise of the plan's size on gradients that are zero; enough of it to measure."""
    torch.manual_seed(0)
    data = TensorDataset(torch.zeros(SIZE, 64), torch.zeros(SIZE, dtype=torch.long))
    return released(wrap(nn.Linear(64, 64, bias=False)), data=data, noise_multiplier=1.5, group=group)


def secure(group: Any = None) -> dict[str, Any]:
    return released(seed=None, clipping="dc-e", noise_multiplier=1.0, group=group)


def batches(group: Any = None) -> list[list[list[float]]]:
    """The records of this rank in every batch, many of them empty."""
    model, optimizer, private = begin(steps=12, batch_size=2, group=group)
    found = []
    for batch in private.loader:
        found.append(batch[0].tolist())
        backward(model, private, batch)
        optimizer.step()
    return found


def unnoised(without: int | None, group: Any = None) -> list[torch.Tensor]:
    """The clipped mean of all records, or of all but one."""
    data, model = dataset(without=without), network(bias=False)
    return released(model, data=data, clipping="auto-v", batch_size=SIZE, steps=1, group=group)["gradients"][0]


def plain_after(model: DistributedDataParallel, group: Any) -> list[torch.Tensor]:
    """A gradient of plain training after the private run, which is the mean over the ranks again."""
    released(model, group=group)
    model.zero_grad()
    x = torch.full((2, 4), 1.0 + dist.get_rank(group))
    model(x).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def refusals(rank: int, group: Any) -> dict[str, str]:
    """What is not the same on both ranks, and wrappers that do not fit."""
    shorter = TensorDataset(*(tensor[: SIZE - rank] for tensor in dataset().tensors))
    mixing = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).train(rank == 1)

    def ddp(**options: Any) -> nn.Module:
        return DistributedDataParallel(network(), process_group=group, **options)

    def tried(model: nn.Module | None = None, **changes: Any) -> str:
        return refused(lambda: begin(model, **({"group": group} | changes)))

    return {
        "weights": tried(network(seed=rank)),
        "seed": tried(seed=rank + 1),
        "seed on one": tried(seed=1 if rank else None),
        "noise": tried(noise_multiplier=1.0 + rank),
        "length": tried(data=shorter),
        "secret length": tried(data=shorter, neighbours="add-remove", sample_rate=0.2),
        "parameters": tried(network(bias=rank == 0)),
        "clipping": tried(clipping="abadi" if rank else "auto-s"),
        "optimizer": tried(lr=0.1 + rank),
        "one rank's argument": tried(clipping="abada" if rank else "abadi"),
        "one rank's model": tried(mixing),
        "not a group": tried(group="gloo"),
        "inside": tried(nn.Sequential(ddp())),
        "static graph": tried(ddp(static_graph=True)),
        "alone and wrapped": tried(ddp(), group=False),
        "afterwards": tried(),
    }


def failures(rank: int, group: Any) -> dict[str, Any]:
    """Ranks that refuse, or do something else, while the others want to step."""
    said: dict[str, Any] = {}
    model, optimizer, private = begin(steps=6, group=group)
    loop = iter(private.loader)
    batch = next(loop)
    if rank == 0:
        backward(model, private, batch)
    said["no backward"] = refused(optimizer.step)
    backward(model, private, private.loader.again())
    optimizer.step()
    said["went on"] = private.ledger.steps
    batch = next(loop)
    if rank == 0:
        backward(model, private, batch)
    else:
        said["skipped"] = refused(lambda: next(loop))
    said["step after skipping"] = refused(optimizer.step)
    backward(model, private, private.loader.again())
    said["another call"] = refused(lambda: private.save_to("never") if rank else optimizer.step())
    said["still open"] = refused(optimizer.step)
    backward(model, private, next(iter(private.loader)))
    with noise_of_its_own(private, rank):
        said["other noise"] = refused(optimizer.step)
    said["steps before"] = private.ledger.steps
    backward(model, private, next(iter(private.loader)))
    if rank:
        vars(private)["_thresholds"] = private.thresholds * 2
    said["diverged"] = refused(optimizer.step)
    said["steps"] = private.ledger.steps
    vars(private)["_thresholds"] = private.thresholds / (1 + rank)
    training = steps(model, optimizer, private)
    next(training)
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    said["other weights"] = refused(lambda: next(training))
    said["steps at last"] = private.ledger.steps
    private.detach()
    return said


@contextmanager
def noise_of_its_own(private: clipless.Private, rank: int) -> Iterator[None]:
    """Ranks other than the first release something else in the last number of the last parameter, and nowhere else."""
    source = vars(private._source)
    release = private._source.release

    def other(*args: Any, **further: Any) -> list[torch.Tensor]:
        released = release(*args, **further)
        released[-1].view(-1)[-1] += 0.25 * rank
        return released

    source["release"] = other
    yield
    del source["release"]


def left_behind(rank: int, group: Any, folder: Path) -> dict[str, Any]:
    """A ledger that cannot be written by the first rank, or is asked for by one rank only."""
    model, optimizer, private = begin(steps=4, group=group)
    said = {"no folder": refused(lambda: private.save_to(folder / "nowhere" / "ledger.jsonl"))}
    said["one rank"] = refused(
        lambda: private.save_to(folder / "one.jsonl") if rank == 0 else private.save_checkpoint(folder / "c")
    )
    said["file"] = (folder / "one.jsonl").exists()
    private.save_to(folder / "full.jsonl")
    training = steps(model, optimizer, private)
    next(training)
    if rank == 0:
        os.dup2(os.open(folder / "full.jsonl", os.O_RDONLY), private._journal._descriptor)  # type: ignore[union-attr]
    said["cannot write"] = refused(lambda: next(training))
    said["gradients"] = [p.grad for p in model.parameters()]
    private.detach()
    return said


def hanging() -> dict[str, Any]:
    """One of two ranks never comes to its second step, and the other waits as long as the group does: three seconds from
    there on, since before both may be slow."""
    members, rank = [0, 1], dist.get_rank()
    group = between(members)
    if rank not in members:
        return {}
    model, optimizer, private = begin(steps=6, group=group)
    training = steps(model, optimizer, private)
    next(training)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
    return {"refused": refused(lambda: next(training)) if rank == 0 else "", "steps": private.ledger.steps}


def killed(folder: Path, group: Any, dying: bool, where: str) -> dict[str, Any]:
    """A rank is killed in the second step: in the reduction, or once the step may have been recorded. The other one must
    neither hang nor go on."""
    model, optimizer, private = begin_dropout(group)
    private.save_to(folder / f"{where}.jsonl")
    private.save_checkpoint(folder / f"{where}.pt", extra="begun")
    training = steps(model, optimizer, private)
    next(training)
    before = [p.detach().clone() for p in model.parameters()]

    def read() -> int:
        return clipless.read_ledger(folder / f"{where}.jsonl", torn=True).recorded().steps

    if dying:

        def die(*_: Any) -> None:
            while where == "recording" and read() < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        vars(private if where == "recording" else private._ranks)[{"recording": "_record"}.get(where, where)] = die
    return {
        "refused": refused(lambda: next(training)),
        "unchanged": all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)),
        "again": refused(lambda: private.save_checkpoint(folder / "checkpoint.pt")),
        "steps": private.ledger.steps,
        "recorded": read(),
    }


# Checkpoints.


def begin_dropout(group: Any = None, rank: int | None = None) -> tuple[nn.Module, Optimizer, clipless.Private]:
    """A run whose every step depends on each rank's random state, with secure noise and a policy."""
    rank = dist.get_rank(group) if rank is None else rank
    model = network(dropout=0.3)
    torch.manual_seed(100 + rank)
    return begin(model, steps=6, seed=None, noise_multiplier=1.0, clipping="dc-e", group=group)


def resumed(folder: Path) -> dict[str, Any]:
    """Three ranks go on with runs of two; then two of them with runs that were interrupted: of two ranks, with a step to
    repeat, and of one process."""
    rank, said = dist.get_rank(), {kind: gone_on(folder / "three" / kind) for kind in OPEN}
    pair = between([0, 1])
    if rank > 1:
        return said
    for name in ("recording", "add_up"):
        model, optimizer, private = begin_dropout(pair)
        torch.manual_seed(5)
        extra = private.load_checkpoint(folder / f"{name}.pt")
        counts = [private.steps_taken, private.ledger.steps]
        gradients = list(steps(model, optimizer, private))
        said[name] = {"extra": extra, "counts": counts, "gradients": gradients, "spent": private.spent().steps}
        private.detach()
    said["interrupted"] = interrupted(folder, pair)
    model, optimizer, private = begin_dropout(pair)
    private.load_checkpoint(folder / "alone.pt")
    said["of one process"] = [private.steps_taken, len(list(steps(model, optimizer, private)))]
    private.detach()
    model, optimizer, private = begin_dropout(pair)
    said["other file"] = refused(lambda: private.load_checkpoint(folder / ("alone.pt" if rank else "recording.pt")))
    said["missing on one"] = refused(lambda: private.load_checkpoint(folder / ("none.pt" if rank else "alone.pt")))
    said["nothing changed"] = private.ledger.steps
    private.load_checkpoint(folder / "third.pt", reseed=True)
    said["reseeded"] = [private.steps_taken, private.ledger.steps]
    said["new keys"] = private.state_dict()["noise"]
    private.detach()
    model, optimizer, private = begin_dropout(pair)
    private.save_to(folder / "last.jsonl")
    for number, _ in enumerate(steps(model, optimizer, private)):
        if number == 2:
            private.save_checkpoint(folder / "last.pt")
            break
    private.detach()
    return said


def interrupted(folder: Path, pair: Any) -> dict[str, Any]:
    """A run of six steps with a checkpoint after the second; then again from there, and with one rank of the two killed."""
    model, optimizer, private = begin_dropout(pair)
    private.save_to(folder / "third.jsonl")
    whole = []
    for number, gradient in enumerate(steps(model, optimizer, private)):
        whole.append(gradient)
        if number == 1:
            private.save_checkpoint(folder / "third.pt")
        if number == 4:
            break
    private.detach()
    model, optimizer, private = begin_dropout(pair)
    private.load_checkpoint(folder / "third.pt")
    pending = private.ledger.steps - private.steps_taken
    again = list(steps(model, optimizer, private))
    said = {
        "whole": whole,
        "again": again,
        "pending": pending,
        "steps": private.ledger.steps,
        "left": private.ledger_file,
    }
    private.detach()
    model, optimizer, private = begin_dropout(pair)
    private.load_checkpoint(folder / "third.pt")
    torch.manual_seed(9)  # another dropout mask: the repeated step would not be the recorded one
    said["differs"] = refused(lambda: next(steps(model, optimizer, private)))
    private.detach()
    return said


# Worlds that do not come to an end.


def one_waits(folder: Path) -> None:
    """The first rank waits for a second one that does something else."""
    if dist.get_rank() == 0:
        begin()
    while True:
        time.sleep(1)


def one_fails(folder: Path) -> None:
    if dist.get_rank():
        raise ValueError("not this one")
    begin()

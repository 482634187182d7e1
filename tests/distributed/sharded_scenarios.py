"""What the ranks of a sharded run do. Each scenario is called on every rank and gives what the tests look at."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scenarios import CASES, case, pure_noise, refused
from shared_run import PLAN, SIZE, backward, begin, between, dataset, network, released, steps, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import clipless
from clipless.app.bench.problems import Block, encoder, lora_encoder

WORLDS = {1: [1], 3: [0, 1, 2], 2: [0, 2]}
# In the world of two every clipping and every partition, half of their combinations; in the others some of all.
SHARDED = {1: CASES[1::5], 2: [case for number, case in enumerate(CASES) if number % 4 < 2], 3: CASES[3::5]}
WORDS = 20
SCHEDULE = clipless.schedule([(0.5, "auto-s"), (0.5, "dc-e")])


def sharded(model: nn.Module, group: Any = None, **options: Any) -> nn.Module:
    """The model, its linear layers or blocks sharded apart from the rest."""
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    for module in list(model.modules()):
        if isinstance(module, Block) or (isinstance(module, nn.Linear) and isinstance(model, nn.Sequential)):
            fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


class Checkpointed(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inside, x, use_reentrant=False)
        return result


class Attending(nn.Module):
    """Attention, an LSTM, a class token and a scale: parameters in and outside layers with a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.ones(4))
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.memory, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        words = F.one_hot(x % 4, 4).float() * self.scale
        seen = self.attention(torch.cat([self.token.expand(len(x), -1, -1), words], 1))
        result: Tensor = self.head(self.memory(seen)[0][:, 0])
        return result


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "attention":
        return Attending()
    model = lora_encoder(12, 2, 6, WORDS) if name == "lora" else encoder(12, 2, 6, WORDS)
    if name == "checkpointed":
        for parent in list(model.modules()):
            for child, module in list(parent.named_children()):
                if isinstance(module, Block):
                    setattr(parent, child, Checkpointed(module))
    return model


def trained(model: nn.Module, scalar: bool = False, **changes: Any) -> list[list[Tensor]]:
    """Released gradients of a model of words, trained by Adam in parts."""
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randint(0, WORDS, (SIZE, 6), generator=generator), torch.arange(SIZE) % 2)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    # Less noise than elsewhere: there are a thousand times as many parameters, and each gets as much.
    settings: dict[str, Any] = PLAN | {"steps": 4, "noise_multiplier": 1e-7} | changes
    private = clipless.make_private(model, optimizer, data, **{"loss_reduction": "mean", **settings})
    found = []
    for parts in private.loader.microbatches(2):
        optimizer.zero_grad()
        for x, y in parts:
            if scalar:
                F.cross_entropy(model(x), y).backward()
            else:
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        found.append([whole(p.grad).clone() for p in model.parameters() if p.grad is not None])
    private.detach()
    return found


def everything_sharded(folder: Path) -> dict[Any, Any]:
    """All that ranks of a sharded run can do together, in every world that this one is in; in the end one is killed."""
    said: dict[Any, Any] = {}
    groups = {size: between(members) for size, members in WORLDS.items()}
    dying = between(WORLDS[2])
    for size, members in WORLDS.items():
        if dist.get_rank() in members:
            group = groups[size]
            said[size] = {
                f"{name} {parts}": case(name, parts, model=sharded(network(), group), group=group)
                for name, parts in SHARDED[size]
            }
            said[size] |= {"noise": pure_noise(group, lambda model: sharded(model, group)), "few": few(group)}  # noqa: B023
            said[size] |= {f"uneven {kind}": uneven(kind, group) for kind in ("plain", "fails", "draws")}
        if dist.get_rank() in members and size == 2:
            said |= one_world(groups[size], folder)
    torch.save(said, folder / f"{dist.get_rank()}.pt")
    if dist.get_rank() not in WORLDS[2]:
        return said
    return said | {"killed": killed(folder, dying, "scatter")}


def lost_while_gathering(folder: Path) -> dict[str, Any]:
    """The other rank is killed while this one waits for a block of the model.

    In a world of its own, because a run that lost a rank does not go on: a process that did, with other groups, was once
    ended by the C library, which found memory damaged in a thread of Gloo.
    """
    torch.save({}, folder / f"{dist.get_rank()}.pt")
    return killed(folder, dist.group.WORLD, "forward")


def few(group: Any = None) -> dict[str, Any]:
    """Batches of one record: most ranks have none."""
    model = network() if group is None else sharded(network(), group, reshard_after_forward=False)
    return released(model, batch_size=1, steps=6, group=group)


class Uneven(nn.Module):
    """Passes on what it gets. Without gradients it fails on one rank, or on that rank it moves all records to their mean."""

    def __init__(self, kind: str, first: bool) -> None:
        super().__init__()
        self.fails, self.mixes = kind == "fails" and first, kind == "mixes" and first

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and not torch.is_grad_enabled():
            raise RuntimeError("not without gradients")
        return x - x.detach().mean(0) if self.mixes and len(x) > 1 else x


def uneven(kind: str, group: Any = None) -> dict[str, Any]:
    """Batches of two or three records on average: a rank has none, one or some of them when all check themselves. Besides
    what is released, how many records this rank had at each step, and how many of its passes were compared."""
    first = group is None or dist.get_rank(group) == 0
    layers = network(dropout=0.3 if kind == "draws" else 0.0)
    model = nn.Sequential(*list(layers.children())[:-1], Uneven(kind, first), list(layers.children())[-1])
    model = model if group is None else sharded(model, group)
    model, optimizer, private = begin(model, batch_size=3, steps=12, clipping=SCHEDULE, group=group)
    compared: list[int] = []
    compare = private._engine.refuse_unsound
    vars(private._engine)["refuse_unsound"] = lambda: compared.append(compare())
    records, found = [], []
    for batch in private.loader:
        records.append(len(batch[0]))
        optimizer.zero_grad()
        backward(model, private, batch)
        optimizer.step()
        found.append([whole(p.grad).clone() for p in model.parameters() if p.grad is not None])
    private.detach()
    return {"gradients": found, "records": records, "compared": compared}


def one_world(group: Any, folder: Path) -> dict[str, Any]:
    """What needs to be seen in one world only."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    names = ("encoder", "lora", "checkpointed", "attention")
    return {
        "models": {name: trained(sharded(model_of(name), group), group=group) for name in names},
        "data parallel": {name: trained(model_of(name), group=group) for name in ("encoder", "lora")},
        "scalar": trained(sharded(model_of("encoder"), group), scalar=True, group=group),
        "half": trained(sharded(model_of("encoder"), group, mp_policy=half), group=group),
        "without a record": [unnoised(without, group) for without in (None, 0, SIZE - 1)],
        "held": held(group),
        "plain again": plain_after(group),
        "refused": refusals(group),
        "mixes": refused(lambda: uneven("mixes", group)),
        "again": again(group),
        "missed": missed(group),
        "saved": saved(folder, group),
    }


def unnoised(without: int | None, group: Any) -> list[Tensor]:
    """The clipped mean of all records, or of all but one."""
    data, model = dataset(without=without), sharded(network(bias=False), group)
    return released(model, data=data, clipping="auto-v", batch_size=SIZE, steps=1, group=group)["gradients"][0]


def held(group: Any) -> dict[str, int]:
    """How many numbers a rank holds between steps: of parameters, sums, gradients and Adam's moments."""
    model = sharded(model_of("encoder"), group)
    everything = sum(p.numel() for p in model.parameters())
    optimizer = AdamW(model.parameters())
    data = TensorDataset(torch.zeros(SIZE, 6, dtype=torch.long), torch.zeros(SIZE, dtype=torch.long))
    private = clipless.make_private(
        model, optimizer, data, **{"loss_reduction": "mean", **(PLAN | {"steps": 1, "group": group})}
    )
    for x, y in private.loader:
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
    local: Any = [p.to_local() for p in model.parameters()]  # type: ignore[operator]
    gradients: Any = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[operator]
    moments = [state["exp_avg"].to_local() for state in optimizer.state.values()]
    sums = [running.block for running in private._engine._sums._sums.values()]
    private.detach()
    counts = {"parameters": local, "gradients": gradients, "moments": moments, "sums": sums}
    return {"all": everything} | {name: sum(t.numel() for t in tensors) for name, tensors in counts.items()}


def plain_after(group: Any) -> list[Tensor]:
    """A gradient of plain training after the private run, which FSDP2 reduces again."""
    model = sharded(network(), group)
    released(model, group=group)
    model.zero_grad()
    model(torch.full((2, 4), 1.0 + dist.get_rank(group))).sum().backward()
    return [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]


class Borrowing(nn.Module):
    """Uses a weight outside the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(F.linear(self.first(x), self.first.weight))
        return result


def refusals(group: Any) -> dict[str, str]:
    """What is sharded in another way, and calls that do not fit."""
    mesh = DeviceMesh.from_group(group, "cpu")

    def tried(model: nn.Module, **changes: Any) -> str:
        return refused(lambda: begin(model, **({"group": group} | changes)))

    parts, bare, borrowing = network(), network(), Borrowing()
    fully_shard(parts[0], mesh=mesh)  # type: ignore[index]
    ignored = network()
    fully_shard(ignored, mesh=mesh, ignored_params={ignored[0].weight})  # type: ignore[index]
    early = SGD(bare.parameters(), lr=0.1)
    fully_shard(bare, mesh=mesh)
    fully_shard(borrowing.first, mesh=mesh)
    fully_shard(borrowing, mesh=mesh)
    model, _, private = begin(sharded(network(), group), group=group)
    x, _ = next(iter(private.loader))
    inside = refused(lambda: model[0](x))  # type: ignore[index]
    private.detach()
    wrong, _, private = begin(borrowing, group=group)
    batch = next(iter(private.loader))
    stray = refused(lambda: backward(wrong, private, batch))
    private.detach()
    torch.manual_seed(0)
    attention = Attending()
    fully_shard(attention.attention.self_attn.out_proj, mesh=mesh)
    fully_shard(attention, mesh=mesh)
    check = (lambda model, batch: model(batch[0]).sum(1), (torch.zeros(2, 4),))
    return {
        "parts": tried(parts),
        "ignored": tried(ignored),
        "offloaded": tried(sharded(network(), group, offload_policy=CPUOffloadPolicy(pin_memory=False))),
        "other ranks": tried(sharded(network(), group), group=None) if dist.get_rank() == 0 else "",
        "alone": tried(sharded(network(), group), group=False),
        "early optimizer": refused(
            lambda: clipless.make_private(
                bare, early, dataset(), **{"loss_reduction": "mean", **(PLAN | {"steps": 2, "group": group})}
            )
        ),
        "check": tried(sharded(network(), group), check=check),
        "checked": refused(lambda: clipless.check(sharded(network(), group), *check)),
        "projections": tried(sharded(network(), group), gradients="jl"),
        "sampler": refused(
            lambda: clipless.sgld(sharded(network(), group), dataset(), step_size=0.1, batch_size=4, steps=2)
        ),
        "broadcast": refused(lambda: clipless.broadcast_weights(sharded(network(), group), group)),
        "inside": inside,
        "stray": stray,
        "never called": refused(lambda: trained(attention, group=group)),
    }


def missed(group: Any) -> dict[str, str]:
    """Ranks that leave out backward(), or a whole part."""
    model, optimizer, private = begin(sharded(network(), group), steps=3, group=group)
    parts = next(iter(private.loader.microbatches(1)))
    model(next(parts)[0])
    next_part = refused(lambda: next(parts))
    step = refused(optimizer.step)
    private.detach()
    return {"next part": next_part, "step": step}


def again(group: Any) -> dict[str, Any]:
    """A pass that fails on all ranks, and a step that one rank is not ready for."""
    model, optimizer, private = begin(sharded(network(), group), steps=3, group=group)
    batch = next(iter(private.loader))
    handle = model[2].register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[index]
    failed = False
    try:
        model(batch[0])
    except ZeroDivisionError:
        failed = True
    handle.remove()
    backward(model, private, private.loader.again())
    rank = dist.get_rank(group)
    saved, private._batch = private._batch, private._batch if rank else None
    not_ready = refused(optimizer.step)
    private._batch = saved
    optimizer.step()
    found = [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
    steps_taken = private.ledger.steps
    private.detach()
    return {"failed": failed, "not ready": not_ready, "gradients": found, "steps": steps_taken}


def killed(folder: Path, group: Any, where: str) -> dict[str, Any]:
    """A rank is killed in the second step: inside the reduction, or while the other one waits for it to gather a block. That
    one must neither hang nor go on."""
    model, optimizer, private = begin(sharded(network(), group), steps=4, group=group)
    private.save_to(folder / f"{where}.jsonl")
    training = steps(model, optimizer, private)
    next(training)
    if dist.get_rank(group) == 1:
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        if where == "scatter":
            vars(private._ranks)[where] = die
        else:
            model[1].register_forward_pre_hook(die)  # type: ignore[index]
    return {
        "refused": refused(lambda: next(training)),
        "again": refused(lambda: private.save_checkpoint(folder / "never.pt")),
        "steps": private.ledger.steps,
        "recorded": clipless.read_ledger(folder / f"{where}.jsonl").recorded().steps,
    }


# Checkpoints.


def begin_dropout(group: Any = None, shard: bool = True) -> tuple[nn.Module, Optimizer, clipless.Private]:
    """A run with secure noise, a policy, an optimizer with a state, and a dropout mask of each rank's own."""
    model = sharded(network(dropout=0.3), group) if shard else network(dropout=0.3)
    torch.manual_seed(100 + (dist.get_rank(group) if dist.is_initialized() else 0))
    optimizer = AdamW(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"steps": 6, "seed": None, "noise_multiplier": 1.0, "clipping": "dc-e", "group": group}
    return (
        model,
        optimizer,
        clipless.make_private(model, optimizer, dataset(), **{"loss_reduction": "mean", **(PLAN | settings)}),
    )


def state(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """The weights and Adam's moments."""
    moments = [whole(own["exp_avg_sq"]) for own in optimizer.state_dict()["state"].values()]
    return [*(whole(value).clone() for value in model.state_dict().values()), *moments]


def saved(folder: Path, group: Any) -> dict[str, Any]:
    """A run that is interrupted, repeated, and gone on from as shards and as a whole."""
    model, optimizer, private = begin_dropout(group)
    private.save_to(folder / "sharded.jsonl")
    first = []
    for number, gradient in enumerate(steps(model, optimizer, private)):
        first.append(gradient)
        if number < 2:
            private.save_checkpoint(folder / "sharded.pt", extra=number)
        if number == 3:
            break
    private.detach()
    said: dict[str, Any] = {"first": first, "folders": len(list(folder.glob("sharded.pt.shards.*")))}
    model, optimizer, private = begin_dropout(group)
    said["extra"] = private.load_checkpoint(folder / "sharded.pt")
    said["repeated"] = list(steps(model, optimizer, private))
    private.save_checkpoint(folder / "end.pt")
    said["end"] = state(model, optimizer)
    private.detach()
    model, optimizer, private = begin_dropout(group, shard=False)
    private.load_checkpoint(folder / "end.pt")
    said["bare"] = state(model, optimizer)
    private.save_checkpoint(folder / "bare.pt")
    private.detach()
    model, optimizer, private = begin_dropout(group)
    private.load_checkpoint(folder / "bare.pt")
    said["sharded again"] = state(model, optimizer)
    private.detach()
    dist.barrier(group)
    damaged = next(folder.glob("end.pt.shards.*")) / ".metadata"
    if dist.get_rank(group) == 0:
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    dist.barrier(group)
    model, optimizer, private = begin_dropout(group)
    said["damaged"] = refused(lambda: private.load_checkpoint(folder / "end.pt"))
    private.detach()
    return said

"""The processes of one private run, and all communication between them.

Whatever can fail on one rank alone is done in `with ranks.together(...)`: at its end every rank learns whether the others
succeeded, and if one has failed, all raise. So no rank continues alone, and none waits for one that has given up.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from clipless.errors import CliplessError, InvalidArgument, RankFailed

T = TypeVar("T")
Arrived = Callable[[Sequence[int]], None]

# The bytes of one message of an agreement, the most characters of an error in it, and the bytes of one bucket of sums: small
# enough that there is something to do while the last one is on its way.
MESSAGE = 512
MOST_TOLD = 200
BUCKET = 8 * 2**20
# Facts whose values are not shown: digests, which mean nothing to a reader and should not appear in a log, and a number of
# records that is secret.
UNSHOWN = ("the seed", "the content of", "the number of records")
# For each group the one that `Ranks.apart` made beside it.
_APART: "WeakKeyDictionary[dist.ProcessGroup, ref[dist.ProcessGroup]]" = WeakKeyDictionary()


@dataclass
class Told:
    """What this rank tells the others at the end of something that they do together, and then what all of them told."""

    own: str = ""
    by_all: list[str] = field(default_factory=list)


def refuse_different(what: str, values: Sequence[str]) -> None:
    """Raises unless all ranks' values are the same."""
    if len(set(values)) > 1:
        raise RankFailed(
            f"the ranks do not have the same at {what}, though they began with the same: nothing was released to the "
            "optimizer. Look for code or settings that depend on the rank, such as a learning rate that one rank has "
            "changed, and resume from a checkpoint."
        )


def ignored(numbers: Sequence[int]) -> None:
    """Nothing is to be done when these have arrived."""


class Alone:
    """One process, which has no others to communicate with."""

    rank, size = 0, 1
    # A context manager of the standard library, which costs a step almost nothing.
    together: Callable[[str], AbstractContextManager[Any]] = staticmethod(nullcontext)  # type: ignore[assignment]

    def shared(self, value: T) -> T:
        return value

    def gathered(self, value: T) -> list[T]:
        return [value]

    def same(self, what: str, value: str) -> None:
        pass

    def add_up(self, tensors: Sequence[Tensor], arrived: Arrived = ignored) -> None:
        arrived(range(len(tensors)))

    def any(self, wish: bool) -> bool:
        return wish

    def scatter(self, parts: Tensor) -> Tensor:
        return parts[0]

    def refuse_differences(self, facts: Callable[[], Mapping[str, str]]) -> None:
        pass

    def apart(self) -> "Alone":
        return self

    @contextmanager
    def reaching(self, what: str) -> Iterator[None]:
        yield None


class Ranks:
    """The processes of a torch.distributed group. All of them call the same methods in the same order.

    A method raises `RankFailed` if the others cannot be reached within the group's time-out, and then so does every later
    one. The group is not kept alive: its threads end with `destroy_process_group()`, and not while the interpreter exits,
    where one that needs Python takes the process down.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._alive, self._lost = ref(group), False
        by_nccl = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if by_nccl else torch.device("cpu")

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._alive()
        if group is None:
            raise RankFailed(
                "the ranks' process group was destroyed: call destroy_process_group() after the last step."
            )
        return group

    @contextmanager
    def together(self, what: str) -> Iterator["Told"]:
        """The block succeeds on every rank, or raises on every rank: its own exception where it failed, and
        `RankFailed` elsewhere. `what` names it, and ranks that are not all doing the same are refused. Each rank may tell
        the others a short text on this occasion."""
        told = Told()
        try:
            yield told
        except RankFailed:
            raise  # from an agreement inside, on every rank
        except Exception as failure:
            # What an error that is not ours says may quote a record.
            message = f": {failure}" if isinstance(failure, (CliplessError, OSError)) else ""
            self._exchanged(what, f"{type(failure).__name__}{message}")
            raise
        told.by_all = self._exchanged(what, value=told.own)

    def shared(self, value: T) -> T:
        """The first rank's value."""
        values = [value]
        with self._reaching("the others"):
            dist.broadcast_object_list(values, group=self._group, group_src=0, device=self._device)
        return values[0]

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, in order."""
        values: list[Any] = [None] * self.size
        with self._reaching("the others"):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def same(self, what: str, value: str) -> None:
        """Raises unless all ranks have the same value, a short text."""
        refuse_different(what, self._exchanged(what, value=value))

    def add_up(self, tensors: Sequence[Tensor], arrived: Arrived = ignored) -> None:
        """Replace each tensor by its sum over the ranks, the same bits on each. `arrived` is called with the numbers of
        those that are complete while others are on their way. At the end none is, unless the other ranks are lost."""
        where = "the sum over the ranks"
        with self._reaching(where):
            sent = deque(
                (numbers, flat, dist.all_reduce(flat, group=self._group, async_op=True))
                for numbers, flat in _flat(tensors)
            )
        try:
            while sent:
                numbers, flat, work = sent.popleft()
                with self._reaching(where):
                    work.wait()
                if flat is not tensors[numbers[0]]:
                    members = [tensors[number] for number in numbers]
                    for member, part in zip(members, flat.split([m.numel() for m in members]), strict=True):
                        member.copy_(part.view_as(member))
                arrived(numbers)
        finally:
            while sent and not self._lost:
                with self._reaching(where):
                    sent.popleft()[2].wait()

    def any(self, wish: bool) -> bool:
        """Whether it is true on any rank."""
        wishes = torch.tensor(int(wish), dtype=torch.int32, device=self._device)
        with self._reaching("a forward pass"):
            dist.all_reduce(wishes, dist.ReduceOp.MAX, group=self._group)
        return bool(wishes)

    def scatter(self, parts: Tensor) -> Tensor:
        """This rank's row of the sum over the ranks, from one row for each rank."""
        own = torch.empty_like(parts[0])
        with self._reaching("the sum over the ranks"):
            dist.reduce_scatter_single(own, parts.view(-1), group=self._group)
        return own

    def apart(self) -> "Ranks":
        """The same ranks in a group of their own, in which nobody else sends anything: what ranks say to each other is never
        taken for what FSDP2 or a user's own call sends, even if ranks do not make the same calls. Torch makes one of all
        ranks of the world only, and does not tell a new one from one that was destroyed, so it is made once; a sub-group
        stays as it is."""
        world = self._group
        members = dist.get_process_group_ranks(world)
        if len(members) < dist.get_world_size():
            return self
        made = _APART.get(world)
        group = made() if made is not None else None
        if group is None:
            with self._reaching("make_private"):
                group = dist.new_group(members, world._get_backend(self._device).options._timeout)
            assert isinstance(group, dist.ProcessGroup)
            _APART[world] = ref(group)
        return Ranks(group)

    def refuse_differences(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Raises on every rank, with the name of the first of these facts that is not the same on all of them."""
        with self.together("make_private"):
            own = dict(facts())
        first, *others = self.gathered(own)
        for rank, found in enumerate(others, 1):
            for name in [*first, *found]:
                one, other = first.get(name, "missing"), found.get(name, "missing")
                if one != other:
                    values = "" if name.startswith(UNSHOWN) else f" ({one}, {other})"
                    raise InvalidArgument(
                        f"the ranks do not train the same run: {name} differs between rank 0 and rank {rank}{values}. Give "
                        "make_private the same on every rank; weights are made the same by "
                        "clipless.broadcast_weights(model), or by DistributedDataParallel around the model."
                    )

    def _exchanged(self, what: str, failure: str = "", value: str = "") -> list[str]:
        """Tell the others what this rank does and whether that failed, and hear the same from them. Returns every rank's
        value, if all are doing the same and none has failed; nothing to one that has."""
        plain = " ".join(failure.encode("ascii", "replace").decode().split())[:MOST_TOLD]
        own = json.dumps([what, plain, value]).encode().ljust(MESSAGE)
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self._device)
        messages = torch.empty(self.size, MESSAGE, dtype=torch.uint8, device=self._device)
        with self._reaching(what):
            dist.all_gather(list(messages.unbind()), mine, group=self._group)
        if failure:
            return []
        if not bool((messages != mine).any()):
            return [value] * self.size
        said = [json.loads(bytes(message.tolist())) for message in messages]
        failed = [f"rank {rank}: {theirs}" for rank, (_, theirs, _) in enumerate(said) if theirs]
        if failed:
            raise RankFailed(f"another rank could not go on at {said[0][0]}, so none does ({'; '.join(failed)}).")
        if len({theirs for theirs, _, _ in said}) > 1:
            doing = ", ".join(f"rank {rank} is at {theirs}" for rank, (theirs, _, _) in enumerate(said))
            raise RankFailed(
                f"the ranks do not do the same: {doing}. Run the same loop and make the same calls on every rank."
            )
        return [theirs for _, _, theirs in said]

    @contextmanager
    def reaching(self, what: str) -> Iterator[dist.ProcessGroup]:
        """The group, for calls of torch that use it themselves."""
        with self._reaching(what):
            yield self._group

    @contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        """If the others do not answer, torch's exception becomes `RankFailed`, and so does every later call."""
        if self._lost:
            raise RankFailed("the other ranks were lost: start all of them anew, and resume from the last checkpoint.")
        try:
            yield
        except RankFailed:
            raise
        except (RuntimeError, ValueError) as error:
            self._lost = True
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise RankFailed(
                f"the other ranks could not be reached at {what}: one has ended, raised an error or hangs ({reason}). No "
                "rank goes on, and what may have been released stays counted. Look for the first error among the ranks, "
                "then start all of them anew and resume from the last checkpoint."
            ) from error


def _flat(tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """The numbers of the tensors in buckets, and each bucket: a tensor that fills one alone as it is, the others as copies
    in one flat tensor per type."""
    waiting: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.nbytes >= BUCKET and tensor.is_contiguous():
            yield [number], tensor
            continue
        bucket = waiting.setdefault((tensor.dtype, tensor.device), [])
        bucket.append(number)
        if sum(tensors[member].nbytes for member in bucket) >= BUCKET:
            yield list(bucket), torch.cat([tensors[member].reshape(-1) for member in bucket])
            bucket.clear()
    for bucket in filter(None, waiting.values()):
        yield bucket, torch.cat([tensors[member].reshape(-1) for member in bucket])

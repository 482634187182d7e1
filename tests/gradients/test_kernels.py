"""The kernels: every method gives the same share, the cap holds, timing is remembered, the model needs no clock."""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless import oracle
from clipless.errors import InvalidArgument, InvalidType
from clipless.gradients import Kernels, kernels
from clipless.gradients.capture.micro_batch import MicroBatch
from clipless.gradients.forms import Cost, Form, OuterProducts, Scattered, Tied, weighted_sum
from clipless.gradients.layers.conv import Correlation
from clipless.gradients.sums import ClippedSums
from problems import PROBLEMS, losses


def outer(b: int = 6, t: int = 5, i: int = 7, o: int = 4) -> tuple[Form, Tensor]:
    torch.manual_seed(0)
    return OuterProducts(torch.randn(b, t, i), torch.randn(b, t, o)), torch.empty(o, i)


def tied() -> tuple[Form, Tensor]:
    torch.manual_seed(0)
    table = Scattered(torch.randint(9, (6, 5)), torch.randn(6, 5, 4), 9)
    return Tied(table, OuterProducts(torch.randn(6, 3, 4), torch.randn(6, 3, 9))), torch.empty(9, 4)


def correlation(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, size: int) -> tuple[Form, Tensor]:
    torch.manual_seed(0)
    rank = len(module.kernel_size)
    acts = torch.randn(6, module.in_channels, *[size] * rank)
    grads = torch.randn_like(module(acts))
    return Correlation(module, acts, grads, [int(p) for p in module.padding]), module.weight


PIECES = {
    "outer products": lambda: outer(),
    "one position": lambda: outer(t=1),
    "tied": tied,
    "conv1d": lambda: correlation(nn.Conv1d(3, 4, 3, stride=2, padding=1), 9),
    "conv2d": lambda: correlation(nn.Conv2d(3, 4, 3, padding=1), 5),
    "conv2d stride dilation": lambda: correlation(nn.Conv2d(3, 4, (2, 3), stride=(2, 1), padding=1, dilation=2), 8),
    "conv2d uneven padding": lambda: correlation(nn.Conv2d(3, 4, (3, 2), padding=(2, 0)), 5),
    "conv3d uneven padding": lambda: correlation(nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=(0, 1, 2)), 3),
    "conv2d rest": lambda: correlation(nn.Conv2d(2, 3, 2, stride=3), 7),
    "conv2d one output": lambda: correlation(nn.Conv2d(2, 3, 4), 4),
    "conv2d groups": lambda: correlation(nn.Conv2d(4, 4, 3, padding=1, groups=2), 5),
    "conv3d": lambda: correlation(nn.Conv3d(2, 3, 2, padding=1), 3),
}


@pytest.mark.parametrize("make", PIECES.values(), ids=PIECES)
def test_every_way_gives_the_same_norms_and_sum(make: object) -> None:
    form, parameter = make()  # type: ignore[operator]
    grads = form.per_record().double()
    factors = torch.rand(len(form))
    for method in form.methods():
        formed = form.by(method)
        torch.testing.assert_close(formed.sq_norms.double(), grads.flatten(1).square().sum(1), rtol=1e-4, atol=1e-6)
        expected = torch.tensordot(factors.double(), grads, 1)
        torch.testing.assert_close(weighted_sum(formed, factors, parameter).double(), expected, rtol=1e-4, atol=1e-4)
        total = torch.ones_like(parameter)
        formed.add_to(total, factors, beta=1)
        torch.testing.assert_close(total.double(), expected + 1, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(formed.per_record().double(), grads, rtol=1e-4, atol=1e-5)
        some = slice(2, 5)
        torch.testing.assert_close(form.rows(some).by(method).sq_norms, formed.sq_norms[some], rtol=1e-4, atol=1e-6)
        mask = torch.tensor([True, False, True, True, False, True])
        kept = formed.keep(mask)
        assert (kept.sq_norms[~mask] == 0).all()
        torch.testing.assert_close(kept.sq_norms[mask], formed.sq_norms[mask], rtol=1e-4, atol=1e-6)


def test_without_memory_the_thriftiest_method_is_taken() -> None:
    form, _ = outer(b=3, t=64, i=300, o=300)
    assert Kernels(memory_cap=0).budget().choose(form.methods(), len(form), last=False, expected=0).method == "ghost"


def taken(some: Kernels, form: Form, count: int = 4) -> list[str]:
    budget = some.budget()
    return [budget.choose(form.methods(), len(form), last=False, expected=0).method for _ in range(count)]


def test_faster_ways_get_a_third_of_the_cap_for_all_pieces_of_a_part_and_anew_for_the_next() -> None:
    form, _ = outer(b=3, t=100, i=200, o=200)
    methods = form.methods()
    extra = methods["written"].held - methods["ghost"].held
    some = Kernels(memory_cap=int(3 * 2.5 * extra))
    for _ in range(2):
        assert taken(some, form) == ["written", "written", "ghost", "ghost"]


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_what_norms_need_at_least_is_left_out_of_the_cap(room: int) -> None:
    """Scratch memory and what will be kept of the layers that are still to come; the rest is for faster methods."""
    form, _ = outer(b=30, t=100, i=200, o=200)
    methods = form.methods()
    extra = methods["written"].held - methods["ghost"].held
    expected = 100 * extra
    some = Kernels(memory_cap=int(kernels.FRAGMENTS * (kernels.TEMPORARY + expected) + (room + 0.5) * extra))
    budget = some.budget()
    found = [budget.choose(form.methods(), len(form), last=False, expected=expected).method for _ in range(4)]
    assert found == ["written"] * room + ["ghost"] * (4 - room)


@pytest.mark.parametrize("cap", [None, 0, 1])
def test_a_cap_that_cannot_be_kept_gets_the_thriftiest_ways_and_no_word(
    cap: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning, an error here, would tell something of the size of the batch."""
    monkeypatch.setattr(kernels, "MEMORY_CAP", 1)
    form, _ = outer(b=3, t=60, i=100, o=100)
    assert taken(Kernels(memory_cap=cap), form) == ["ghost"] * 4


@pytest.mark.parametrize(("threads", "largest"), [(1, 5), (2, 4), (3, 3), (4, 4), (8, 5)])
def test_chunks_cover_every_record_once_and_stay_small(
    threads: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread computes whole records, so they are taken in multiples of the threads if there is room."""
    form, _ = outer(b=13, t=60, i=100, o=100)
    monkeypatch.setattr(kernels, "CHUNK_BYTES", 5 * 4 * 100 * 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    method, _, chunks = Kernels().budget().choose(form.methods(), len(form), last=True, expected=0)
    assert method == "written"
    assert [r for chunk in chunks for r in range(13)[chunk]] == list(range(13))
    assert max(len(range(13)[chunk]) for chunk in chunks) == largest


METHODS = ("ghost", "written", "grouped", "compiled")


class Forced(NamedTuple):
    """A method, and the forms that had it since this was last looked at."""

    method: str
    taken: list[str]


@pytest.fixture
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Forced:
    """Every form takes this method if it can, and is clipped one record at a time or all at once."""
    method, chunk = request.param
    taken: list[str] = []

    def fastest(costs: tuple[tuple[str, Cost], ...], threads: int) -> str:
        if method not in dict(costs):
            return min(dict(costs))
        taken.append(method)
        return method

    monkeypatch.setattr(kernels, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(kernels, "_fastest", fastest)
    return Forced(method, taken)


def concerned(method: str) -> list[str]:
    """The problems in which a form can have this method: all, or those with convolutions."""
    if method in ("ghost", "written"):
        return list(PROBLEMS)
    return [
        name
        for name, problem in PROBLEMS.items()
        if any(isinstance(module, nn.modules.conv._ConvNd) for module in problem.model().modules())
    ]


def total(result: clipless.ClippedSum) -> Tensor:
    return torch.cat([grad.double().flatten() for grad in result.grads.values()])


@cache
def truth(name: str, groups: str) -> Tensor:
    """What the oracle says, whatever the kernels."""
    return total(
        oracle.clipped_sum(PROBLEMS[name].model(), losses, PROBLEMS[name].batch(4), clipless.auto_v(groups=groups))
    )


# One record at a time in one group, all at once in several; the other way round is tested below and in test_engine.py.
FORCED = [
    ((method, *how), groups) for method in METHODS for *how, groups in ((1, "flat"), (kernels.CHUNK_BYTES, "per-layer"))
]


@pytest.mark.parametrize(
    ("forced", "groups"), FORCED, ids=[f"{forced}-{groups}" for forced, groups in FORCED], indirect=["forced"]
)
def test_by_every_way_the_sum_is_the_oracles_and_one_record_moves_it_no_further_than_promised(
    forced: Forced, groups: str
) -> None:
    """For kernels that the cost model would not choose for problems so small; with an outlier, and one that overflows.
    Problems in which no form can have the method are in test_engine.py."""
    seen = 0
    for name in concerned(forced.method):
        problem = PROBLEMS[name]
        model, how = problem.model(), clipless.auto_v(groups=groups)
        x, y = problem.batch(4)
        forced.taken.clear()
        fast = total(clipless.clipped_sum(model, losses, (x, y), how))
        if not forced.taken:
            continue
        seen += 1
        slow = truth(name, groups)
        assert float((fast - slow).norm()) <= 1e-4 * float(slow.norm()), name
        rest = total(clipless.clipped_sum(model, losses, (x[1:], y[1:]), how))
        assert float((fast - rest).norm()) <= 1 + 1e-4, name
        for size in (1e3, 1e30) if x.is_floating_point() else ():
            large = x.clone()
            large[0] = (large[0] * size).to(x.dtype)
            change = total(clipless.clipped_sum(model, losses, (large, y), how)) - rest
            assert float(change.norm()) <= 1 + 1e-4, (name, size)
    assert seen > 5


class Layers(nn.Module):
    """Two layers with several positions each, so that both can be written out a few records at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 6, bias=False), nn.Linear(6, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).mean(1)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("broken", [None, 0, 3])
@pytest.mark.parametrize("rule", [clipless.abadi, clipless.auto_s])
def test_in_chunks_every_group_has_its_threshold_and_every_record_its_own_mask(
    rule: object, broken: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record with an infinite number adds nothing to any group, though its gradient in the last layer is finite."""
    clipped: list[tuple[int, int]] = []
    clip_chunks = ClippedSums._clip_chunks

    def noted(
        self: ClippedSums, micro: MicroBatch, group: int, name: str, form: Form, method: str, chunks: list[slice]
    ) -> None:
        clipped.append((group, len(chunks)))
        clip_chunks(self, micro, group, name, form, method, chunks)

    monkeypatch.setattr(ClippedSums, "_clip_chunks", noted)
    monkeypatch.setattr(kernels, "CHUNK_BYTES", size * 4 * 8 * 6)
    monkeypatch.setattr(kernels, "_fastest", lambda methods, threads: "written")
    model, how = Layers(), rule(threshold=[0.1, 3.0], groups="per-layer")  # type: ignore[operator]
    x, y = torch.randn(7, 4, 8, generator=torch.Generator().manual_seed(1)), torch.arange(7) % 3
    if broken is not None:
        x[broken, 2, 1] = torch.inf
    fast, slow = (which.clipped_sum(model, losses, (x, y), how) for which in (clipless, oracle))
    assert sorted(clipped) == [(0, -(-7 // size)), (1, -(-7 // size))]
    torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-4, atol=0)
    assert fast.norms.isinf().any(0).tolist() == [record == broken for record in range(7)]
    for name, grad in fast.grads.items():
        torch.testing.assert_close(grad, slow.grads[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
def test_a_run_by_any_kernels_is_the_same_up_to_rounding(groups: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 1, 12, 12), torch.randint(4, (8,))
    weights = []
    for choice in (None, Kernels(memory_cap=0), Kernels(memory_cap=2**30)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(512, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = clipless.make_private(
            model, optimizer, TensorDataset(x, y), noise_multiplier=1.0, delta=1e-3, batch_size=4, steps=3, seed=2,
            clipping=clipless.auto_s(groups=groups), kernels=choice, loss_reduction="mean"
        )  # fmt: skip
        for images, classes in private.loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), classes).backward()
            optimizer.step()
        private.detach()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_kernels_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.zeros(4, 2))
    with pytest.raises(InvalidType, match=r"clipless\.Kernels\(memory_cap"):
        clipless.make_private(
            model, optimizer, data, noise_multiplier=1.0, batch_size=2, steps=1, kernels="time", loss_reduction="mean"
        )  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="negative"):
        Kernels(memory_cap=-1)
    with pytest.raises(InvalidType, match="whole number"):
        Kernels(memory_cap=1.5)  # type: ignore[arg-type]

"""gram.c: squared norms of sums of outer products, from one half of their Gram matrices."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from clipless.native.by_torch import widest
from clipless.native.library import COUNT, POINTER, checked, function, threads, wave
from clipless.native.tiles import LANES, whole

# As in the source: how many features and rows are taken at a time.
RUN, STRIP = 256, 128
# With fewer positions a batched product of torch is faster.
FEWEST = 8

# Several inputs [b,t,i] and their common gradients [b,t,o], float32 in main memory. For each input [b,4], float64: the
# squared norm of Σ_t g_tᵀ a_t, the sum over t of ‖a_t‖·‖g_t‖, and the largest ‖a_t‖² and ‖g_t‖².
GhostNorms = Callable[[Sequence[Tensor], Tensor], Tensor]


def build(library: Path) -> GhostNorms | None:
    run = function(library, "clipless_ghost_norms", POINTER, *[COUNT] * 3, POINTER, POINTER, COUNT, COUNT)
    if run is None:
        return None

    def norms(inputs: Sequence[Tensor], grads: Tensor) -> Tensor:
        given = [_side_by_side(rows) for rows in (*inputs, grads)]
        records, positions, _ = grads.shape
        if any(rows.shape[:2] != grads.shape[:2] for rows in given):
            raise ValueError("inputs and gradients do not fit together.")
        words = [word for rows in given for word in (rows.data_ptr(), *rows.stride()[:2], rows.shape[2])]
        share = whole(positions, LANES) * (2 * STRIP + RUN)
        workers = max(1, min(records, threads(positions * sum(rows.nbytes for rows in given))))
        found = torch.empty(len(inputs), records, 4, dtype=torch.float64, device="cpu")
        memory = grads.new_empty(workers * share)
        matrices = (COUNT * len(words))(*words)
        run(matrices, len(inputs), records, positions, found.data_ptr(), memory.data_ptr(), share, workers)
        return found

    return norms


def fit(inputs: Sequence[Tensor], grads: Tensor) -> bool:
    """Whether the compiled form takes these tensors, and is worth it."""
    return grads.shape[1] >= FEWEST and all(rows.dtype is torch.float32 and rows.is_cpu for rows in (*inputs, grads))


def _side_by_side(rows: Tensor) -> Tensor:
    """The numbers of a row side by side."""
    return rows if rows.stride(2) == 1 else rows.contiguous()


def by_torch(inputs: Sequence[Tensor], grads: Tensor) -> Tensor:
    """The same for any tensors, from whole Gram matrices, in float64 where the device has it."""
    wide, gram_g = widest(grads.device), grads @ grads.mT
    own_g, found = _lengths(gram_g), []
    for acts in inputs:
        gram_a = acts @ acts.mT
        squares = torch.linalg.vecdot(gram_a.flatten(1), gram_g.flatten(1)).to(wide)
        own_a = _lengths(gram_a)
        found.append(torch.stack([squares, (own_a * own_g).sqrt().sum(1), own_a.amax(1), own_g.amax(1)], 1))
    return torch.stack(found)


def _lengths(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=1, dim2=2).to(widest(gram.device)).clamp(min=0)


def _pairs(ours: GhostNorms) -> Iterator[tuple[Tensor, Tensor]]:
    """For sizes that fill no tile, more features and rows than are taken at a time; records or positions first in memory;
    one input and several."""
    for records, positions, inside, outside in ((3, 37, 5, 300), (1, 64, 17, 1), (5, 16, 40, 33), (1, 270, 20, 3)):
        acts = wave(records, positions, inside).add_(1)
        grads = torch.linspace(-2, 2, records * positions * outside).cos_().view(positions, records, outside)
        yield ours([acts], grads.transpose(0, 1)), by_torch([acts], grads.transpose(0, 1))
    turned = torch.linspace(-2, 2, 2 * 40 * 9).cos_().view(2, 9, 40).mT
    inputs = [turned, wave(2, 40, 300), wave(2, 40, 3).add_(1)]
    yield ours(inputs, turned), by_torch(inputs, turned)


compiled = checked(build, _pairs, rtol=1e-4, atol=1e-4)

"""gram.c: squared norms of sums of outer products, from one half of their Gram matrices."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from clipless.native.library import COUNT, POINTER, checked, function, threads
from clipless.native.rows import widest

# As in the source: how many positions, features and rows are taken at a time.
LANES, RUN, STRIP = 16, 256, 128
# With fewer positions a batched product of torch is faster.
FEWEST = 32

# Inputs [b,t,i] and gradients [b,t,o], float32 in main memory. To [b,4], float64: the squared norm
# of Σ_t g_tᵀ a_t, the sum over t of ‖a_t‖·‖g_t‖, and the largest ‖a_t‖² and ‖g_t‖².
GhostNorms = Callable[[Tensor, Tensor], Tensor]


def build(library: Path) -> GhostNorms | None:
    run = function(library, "clipless_ghost_norms", *[POINTER] * 5, *[COUNT] * 2)
    if run is None:
        return None

    def norms(acts: Tensor, grads: Tensor) -> Tensor:
        records, positions, inside = acts.shape
        acts, grads = _side_by_side(acts), _side_by_side(grads)
        if grads.shape[:2] != (records, positions):
            raise ValueError(f"inputs {tuple(acts.shape)} and gradients {tuple(grads.shape)} have other positions.")
        places = (*acts.stride()[:2], inside, *grads.stride()[:2], grads.shape[2])
        share = -(-positions // LANES) * LANES * (2 * STRIP + RUN)
        workers = max(1, min(records, threads(positions * (acts.nbytes + grads.nbytes))))
        found, memory = torch.empty(records, 4, dtype=torch.float64), torch.empty(workers * share)
        sizes = (COUNT * 8)(records, positions, *places)
        run(acts.data_ptr(), grads.data_ptr(), sizes, found.data_ptr(), memory.data_ptr(), share, workers)
        return found

    return norms


def fit(acts: Tensor, grads: Tensor) -> bool:
    """Whether the compiled form takes these tensors, and is worth it."""
    return acts.shape[1] >= FEWEST and all(tensor.dtype is torch.float32 and tensor.is_cpu for tensor in (acts, grads))


def _side_by_side(rows: Tensor) -> Tensor:
    """The numbers of a row side by side."""
    return rows if rows.stride(2) == 1 else rows.contiguous()


def by_torch(acts: Tensor, grads: Tensor, gram_of_grads: Tensor | None = None) -> Tensor:
    """The same for any tensors, from whole Gram matrices, in float64 where the device has it."""
    gram_a, gram_g = acts @ acts.mT, grads @ grads.mT if gram_of_grads is None else gram_of_grads
    wide = widest(acts.device)
    squares = torch.linalg.vecdot(gram_a.flatten(1), gram_g.flatten(1)).to(wide)
    own_a, own_g = (gram.diagonal(dim1=1, dim2=2).to(wide).clamp(min=0) for gram in (gram_a, gram_g))
    return torch.stack([squares, (own_a * own_g).sqrt().sum(1), own_a.amax(1), own_g.amax(1)], 1)


def _pairs(ours: GhostNorms) -> Iterator[tuple[Tensor, Tensor]]:
    """For sizes that fill no tile, more features and rows than are taken at a time; records or positions first in memory."""
    for records, positions, inside, outside in ((3, 37, 5, 300), (1, 64, 17, 1), (5, 16, 40, 33), (1, 270, 20, 3)):
        acts = (
            torch.linspace(-3, 3, records * positions * inside).mul_(17).sin_().add_(1).view(records, positions, inside)
        )
        grads = torch.linspace(-2, 2, records * positions * outside).cos_().view(positions, records, outside)
        yield ours(acts, grads.transpose(0, 1)), by_torch(acts, grads.transpose(0, 1))
    turned = torch.linspace(-2, 2, 2 * 40 * 9).cos_().view(2, 9, 40).mT
    yield ours(turned, turned), by_torch(turned, turned)


compiled = checked(build, _pairs, rtol=1e-4, atol=1e-4)

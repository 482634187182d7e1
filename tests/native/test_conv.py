"""Gradients per record of a convolution's weight: the compiled form against torch, one record at a time, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from clipless.gradients.layers import conv_rows
from clipless.gradients.layers.conv import Correlation
from compiling import loaded


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ours(module: nn.Conv1d | nn.Conv2d, acts: Tensor, grads: Tensor) -> Tensor:
    """The gradients, whose norms come along."""
    rows = loaded(conv_rows)
    geometry = Correlation(module, acts, grads, list(module.padding))._geometry
    made, squares = rows(acts, grads, module.weight.shape, geometry)  # type: ignore[arg-type]
    expected = made.double().flatten(1).square().sum(1)
    torch.testing.assert_close(squares, expected, rtol=1e-6, atol=0, equal_nan=True)
    return made


def exact(module: nn.Conv1d | nn.Conv2d, acts: Tensor, grads: Tensor) -> Tensor:
    """By autograd, record by record."""
    module, found = module.double(), []
    for one, grad in zip(acts.double(), grads.double(), strict=True):
        (gradient,) = torch.autograd.grad(module(one[None]), module.weight, grad[None])
        found.append(gradient)
    module.float()
    return torch.stack(found) if found else torch.empty(0, *module.weight.shape, dtype=torch.float64)


@given(
    rank=st.integers(1, 2),
    groups=st.integers(1, 3),
    channels=st.sampled_from([1, 2, 5, 17]),
    outputs=st.sampled_from([1, 7, 9]),
    kernel=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    extra=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    records=st.integers(0, 3),
)
def test_every_geometry(
    rank: int,
    groups: int,
    channels: int,
    outputs: int,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    extra: tuple[int, ...],
    records: int,
) -> None:
    kinds = (nn.Conv1d, nn.Conv2d)
    moves = {"stride": stride[:rank], "padding": padding[:rank], "dilation": dilation[:rank]}
    module = kinds[rank - 1](groups * channels, groups * outputs, kernel[:rank], groups=groups, **moves)  # type: ignore[arg-type]
    sizes = [(k - 1) * d + 1 + e for k, d, e in zip(kernel, dilation, extra, strict=True)][:rank]
    acts = numbers(records, groups * channels, *sizes)
    grads = numbers(*module(acts).shape, seed=1)
    torch.testing.assert_close(ours(module, acts, grads).double(), exact(module, acts, grads), rtol=1e-4, atol=1e-4)


def test_more_positions_than_are_laid_out_at_a_time() -> None:
    """16 channels of a 3x3 kernel are laid out for 170 positions at a time; there are 1,600, and 40 channels."""
    module = nn.Conv2d(40, 10, 3, padding=1)
    acts = numbers(3, 40, 40, 40)
    grads = numbers(3, 10, 40, 40, seed=1)
    torch.testing.assert_close(ours(module, acts, grads).double(), exact(module, acts, grads), rtol=1e-4, atol=1e-3)


def test_no_record_sees_another_and_no_number_of_threads_changes_anything() -> None:
    module = nn.Conv2d(3, 9, 5, stride=2, padding=2)
    acts, grads = numbers(7, 3, 21, 21), numbers(7, 9, 11, 11, seed=1)
    alone = torch.cat([ours(module, acts[k : k + 1], grads[k : k + 1]) for k in range(7)])
    broken = acts.clone()
    broken[3] = torch.nan
    found = ours(module, broken, grads)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(ours(module, acts, grads), alone)
    finally:
        torch.set_num_threads(threads)
    assert found[3].isnan().all()
    assert torch.equal(found[[0, 1, 2, 4, 5, 6]], alone[[0, 1, 2, 4, 5, 6]])


def test_tensors_with_gaps_are_copied() -> None:
    module = nn.Conv2d(4, 6, 3)
    acts = numbers(2, 4, 9, 9).to(memory_format=torch.channels_last)
    grads = numbers(2, 6, 7, 1, seed=1).expand(2, 6, 7, 7)
    torch.testing.assert_close(ours(module, acts, grads).double(), exact(module, acts, grads), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 6, 8, 7), (2, 5, 7, 7), (3, 6, 7, 7)])
def test_sizes_that_do_not_fit_together_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not those of a convolution"):
        ours(nn.Conv2d(4, 6, 3), numbers(2, 4, 9, 9), numbers(*shape))

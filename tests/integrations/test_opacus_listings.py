"""The code changes that the AUTO paper lists for three code bases, each the same clipped sum as clipless' own.

K.1, Opacus: the factor of DPOptimizer.clip_and_accumulate becomes 1 / (norm + 0.01).
K.2, ObjAX: per-sample gradients of a vectorised function are divided by norm + 0.01 and added up.
K.3, private-transformers: norms first, then a second backward pass of losses that are weighted by 1 / (norm + 0.01).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _mark_as_processed
from test_opacus import BATCH, backward, data_of, losses, model_of, opacus_run, sums
from torch import Tensor
from torch.func import functional_call, grad, vmap

import clipless

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

GAMMA, R = 0.01, 0.7
FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "auto-s": lambda norms: R / (norms + GAMMA),
    "auto-v": lambda norms: R / norms,
    "abadi": lambda norms: (R / norms).clamp(max=1.0),
}
OURS = {
    "auto-s": clipless.auto_s(threshold=R),
    "auto-v": clipless.auto_v(threshold=R),
    "abadi": clipless.abadi(threshold=R),
}


class ListedOptimizer(DPOptimizer):
    """Listing K.1: Opacus' own method with another factor."""

    factor: Callable[[Tensor], Tensor]

    def clip_and_accumulate(self) -> None:
        per_param_norms = [g.view(len(g), -1).norm(2, dim=-1) for g in self.grad_samples]
        per_sample_norms = torch.stack(per_param_norms, dim=1).norm(2, dim=1)
        per_sample_clip_factor = type(self).factor(per_sample_norms)
        for p in self.params:
            p.summed_grad = torch.einsum("i,i...", per_sample_clip_factor, self._get_flat_grad_sample(p))
            _mark_as_processed(p.grad_sample)


def opacus_listing(rule: str) -> list[Tensor]:
    module = GradSampleModule(model_of())

    class Listed(ListedOptimizer):
        factor = staticmethod(FACTORS[rule])

    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = Listed(inner, noise_multiplier=0.0, max_grad_norm=R, expected_batch_size=BATCH)
    backward(module, optimizer, *data_of(BATCH))
    return sums(optimizer)


def objax_listing(rule: str) -> list[Tensor]:
    model = model_of()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(model, values, (x.unsqueeze(0),))
        return torch.nn.functional.cross_entropy(logits, y.unsqueeze(0))

    samples = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, *data_of(BATCH))
    total_norms = torch.stack([g.flatten(1).norm(dim=1) ** 2 for g in samples.values()]).sum(0).sqrt()
    factors = FACTORS[rule](total_norms)
    return [torch.tensordot(factors, g, dims=1) for g in samples.values()]


def transformers_listing(rule: str) -> list[Tensor]:
    model, (x, y) = model_of(), data_of(BATCH)
    norms = []
    for index in range(BATCH):
        model.zero_grad()
        losses(model, (x[index : index + 1], y[index : index + 1])).sum().backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())
    model.zero_grad()
    (FACTORS[rule](torch.stack(norms)).detach() * losses(model, (x, y))).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def inside_opacus(rule: str) -> list[Tensor]:
    module, optimizer, _, _ = opacus_run(OURS[rule])
    backward(module, optimizer, *data_of(BATCH))
    return sums(optimizer)


@pytest.mark.parametrize("listing", [opacus_listing, objax_listing, transformers_listing, inside_opacus])
@pytest.mark.parametrize("rule", OURS)
def test_listing_is_the_clipped_sum_of_clipless(rule: str, listing: Callable[[str], Any]) -> None:
    expected = clipless.clipped_sum(model_of(), losses, data_of(BATCH), clipping=OURS[rule]).grads
    for found, wanted in zip(listing(rule), expected.values(), strict=True):
        assert torch.allclose(found, wanted, atol=1e-6, rtol=1e-5)
        assert float(wanted.abs().max()) > 1e-3

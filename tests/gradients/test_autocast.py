"""Every problem and every model of parameters outside a layer under bfloat16 autocast, against the oracle under the same.

The whole gradient is to agree within 2e-2, or within what bfloat16 does to the oracle itself where that is more.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipless
from clipless import oracle
from gradients.capture.test_traced import MODELS, D, T
from problems import PROBLEMS, losses

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    **{name: (problem.model, lambda problem=problem: problem.batch(6)) for name, problem in PROBLEMS.items()},
    **{name: (make, lambda: (torch.randn(6, T, D), torch.arange(6) % 3)) for name, make in MODELS.items()},
}


def under_autocast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none").float()


def whole(found: clipless.ClippedSum) -> Tensor:
    return torch.cat([grad.flatten() for grad in found.grads.values()])


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_agrees_with_the_oracle(name: str) -> None:
    make, batch_of = CASES[name]
    torch.manual_seed(0)
    model, batch, how = make(), batch_of(), clipless.auto_s(groups="per-layer")
    fast, slow = (whole(which.clipped_sum(model, under_autocast, batch, how)) for which in (clipless, oracle))
    precise = whole(oracle.clipped_sum(model, losses, batch, how))
    allowed = max(2e-2 * float(slow.norm()), float((slow - precise).norm()))
    assert fast.dtype == torch.float32
    assert float((fast - slow).norm()) <= allowed


def centred(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch[0])
        return F.cross_entropy(out - out.mean(0), batch[1], reduction="none").float()


@pytest.mark.parametrize("mixes", [False, True])
def test_an_autocast_within_the_function_is_seen(mixes: bool) -> None:
    """Rounding to three digits is no mixture of records, and hides none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp", "batch_size": 64, "steps": 4, "seed": 1}
    private = clipless.make_private(model, optimizer, data, **plan)  # type: ignore[arg-type]
    if mixes:
        with pytest.raises(clipless.Misuse, match="mixes"):
            private.step(centred, next(iter(private.loader)))
        return
    for batch in private.loader:
        private.step(under_autocast, batch)
    assert private.ledger.steps == 4

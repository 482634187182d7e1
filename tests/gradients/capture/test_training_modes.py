"""Tied tables, activation checkpointing and mixed precision, against the oracle."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clipless
from clipless import oracle
from clipless.gradients.forms import OuterProducts, Scattered
from clipless.gradients.forms import Tied as TiedPiece
from clipless.preflight import relative_error
from problems import losses

V, D, T = 11, 6, 5


class Tied(nn.Module):
    """A language model whose table is also its head; `uses` times each way."""

    def __init__(self, uses: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(V, D), nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=bias)
        self.head.weight = self.table.weight
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(sum(self.table((x + k) % V) for k in range(self.uses))).tanh()
        return sum(self.head(h / (k + 1)) for k in range(self.uses)).mean(1)


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("clipping", [clipless.auto_s, clipless.abadi, clipless.global_], ids=lambda f: f.__name__)
@pytest.mark.parametrize("groups", ["flat", "per-layer", "per-parameter"])
def test_tied_tables_agree_with_the_oracle(uses: int, bias: bool, clipping, groups: str) -> None:
    torch.manual_seed(0)
    model = Tied(uses, bias)
    for records in (1, 2, T, 7):
        batch = torch.randint(V, (records, T)), torch.arange(records) % V
        fast, slow = (which.clipped_sum(model, losses, batch, clipping(groups=groups)) for which in (clipless, oracle))
        torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-4, atol=1e-6)
        assert relative_error(fast, slow) <= 1e-4


def test_tied_norms_are_right_where_both_uses_cancel() -> None:
    torch.manual_seed(0)
    acts = torch.randn(3, 1, D)
    deltas = F.one_hot(torch.tensor([[1], [2], [3]]), V).float()
    rows = Scattered(torch.tensor([[1], [2], [4]]), -acts * (1 + 1e-4), V)
    form = TiedPiece(rows, OuterProducts(acts, deltas))
    truth = (deltas.double().mT @ acts.double() + Scattered(rows.indices, rows.grads.double(), V).per_record()).flatten(
        1
    )
    norms, truth = form.sq_norms.double().sqrt(), truth.norm(dim=1)
    assert (norms >= truth * (1 - 1e-6)).all()
    assert (norms <= truth * (1 + 1e-4) + 1e-5 * acts.norm(dim=2)[:, 0]).all()


MEMORY = """
import resource, sys, torch, torch.nn.functional as F
from torch import nn
import clipless
torch.set_num_threads(1)
V, D, T, B = 30_522, 384, 128, 8
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V, bias=False)
        self.head.weight = self.table.weight
    def forward(self, x):
        return self.head(self.inner(self.table(x)).tanh())
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randint(V, (B, T))
if sys.argv[1] == "private":
    data = torch.utils.data.TensorDataset(x)
    private = clipless.make_private(model, optimizer, data, noise_multiplier=1.0, delta=1e-5, batch_size=B, steps=2)
    batches = [x for (x,) in [next(iter(private.loader))]]
else:
    batches = [x]
for x in batches:
    logits = model(x)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    optimizer.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def peak_megabytes(mode: str, tmp_path: Path) -> float:
    script = tmp_path / "memory.py"
    script.write_text(MEMORY)
    done = subprocess.run([sys.executable, str(script), mode], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def test_a_tied_language_model_never_holds_a_table_per_record(tmp_path: Path) -> None:
    """B×V×d in float32 would be 375 MB; the gradient of the logits, which plain training has too, is 125 MB."""
    extra = peak_megabytes("private", tmp_path) - peak_megabytes("plain", tmp_path)
    assert extra < 300


class Gate(nn.Module):
    """Parameters outside any layer, used directly and through a function of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.attention = nn.Parameter(torch.rand(D)), nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        h = h * F.softplus(self.scale)
        return h + self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0]


class Stack(nn.Module):
    def __init__(self, reentrant: bool | None, gated: bool = True) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, D), nn.Linear(D, 3)
        layers = [nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D)) for _ in range(2)]
        self.blocks = nn.ModuleList([*layers, Gate()] if gated else layers)
        self.shift = nn.Parameter(torch.randn(D))
        self.reentrant = reentrant

    def body(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + (block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant))
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.first(x) + self.shift))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("clipping", [clipless.auto_s, clipless.abadi], ids=lambda f: f.__name__)
def test_activation_checkpointing_changes_nothing(reentrant: bool, clipping) -> None:
    torch.manual_seed(0)
    plain, saving = Stack(None, gated=not reentrant), Stack(reentrant, gated=not reentrant)
    saving.load_state_dict(plain.state_dict())
    batch = torch.randn(5, 4), torch.arange(5) % 3
    one, other = (clipless.clipped_sum(model, losses, batch, clipping()) for model in (plain, saving))
    torch.testing.assert_close(one.norms, other.norms)
    assert relative_error(other, one) <= 1e-5
    assert relative_error(other, oracle.clipped_sum(plain, losses, batch, clipping())) <= 1e-4


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_parameters_outside_any_layer_under_a_reentrant_checkpoint_are_refused() -> None:
    with pytest.raises(clipless.UnsupportedModule, match="'blocks.2'.*checkpoint with use_reentrant=False"):
        clipless.clipped_sum(Stack(True), losses, (torch.randn(5, 4), torch.arange(5) % 3))


def test_everything_under_a_reentrant_checkpoint_is_right_or_refused() -> None:
    class All(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)

    torch.manual_seed(0)
    model, plain = All(None), Stack(None)
    plain.load_state_dict(model.state_dict())
    batch = torch.randn(5, 4), torch.arange(5) % 3
    truth = oracle.clipped_sum(plain, losses, batch)
    try:
        found = clipless.clipped_sum(model, losses, batch)
    except clipless.CliplessError:
        return
    assert relative_error(found, truth) <= 1e-4


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)
        self.scale, self.attention = nn.Parameter(torch.rand(4)), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).flatten(2).mT * self.scale
        return self.head(self.attention(h, h, h)[0].mean(1))


@pytest.mark.parametrize("clipping", [clipless.auto_s, clipless.abadi, clipless.global_], ids=lambda f: f.__name__)
@pytest.mark.parametrize("groups", ["flat", "per-layer"])
def test_bfloat16_autocast_agrees_with_the_oracle(clipping, groups: str) -> None:
    """The whole gradient within 2e-2; a parameter within 2e-2 or within what bfloat16 does to the oracle itself."""
    torch.manual_seed(0)
    model = Mixed()

    def under_autocast(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(module(batch[0]), batch[1], reduction="none")

    batch = torch.randn(6, 2, 6, 6), torch.arange(6) % 3
    fast, slow = (
        which.clipped_sum(model, under_autocast, batch, clipping(groups=groups)) for which in (clipless, oracle)
    )
    assert all(grad.dtype == torch.float32 for grad in fast.grads.values())
    one, other = (torch.cat([grad.flatten() for grad in found.grads.values()]) for found in (fast, slow))
    assert float((one - other).norm()) <= 2e-2 * float(other.norm())
    precise = oracle.clipped_sum(model, losses, batch, clipping(groups=groups))
    for name, grad in slow.grads.items():
        rounding = float((grad - precise.grads[name]).norm())
        assert float((fast.grads[name] - grad).norm()) <= max(2e-2 * float(grad.norm()), rounding)

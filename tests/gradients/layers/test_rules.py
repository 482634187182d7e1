"""Layer rules: which module is handled by which, and what a rule refuses."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clipless
from clipless.gradients import layers as rules
from clipless.gradients.clipped_sum import engine_sum
from clipless.gradients.layers import rule_of
from clipless.preflight import relative_error
from problems import Bagged, Conv1D, Pairing, losses

HANDLED = {
    rules.linear: [nn.Linear(2, 2)],
    rules.linear_transposed: [Conv1D(2, 2)],
    rules.conv: [nn.Conv1d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv3d(2, 2, 1)],
    rules.conv_transpose: [nn.ConvTranspose1d(2, 2, 1), nn.ConvTranspose2d(2, 2, 1), nn.ConvTranspose3d(2, 2, 1)],
    rules.embedding: [nn.Embedding(2, 2)],
    rules.embedding_bag: [nn.EmbeddingBag(2, 2)],
    rules.layer_norm: [nn.LayerNorm(2)],
    rules.group_norm: [nn.GroupNorm(1, 2)],
    rules.rms_norm: [nn.RMSNorm(2)],
    rules.instance_norm: [nn.InstanceNorm1d(2, affine=True), nn.InstanceNorm2d(2), nn.InstanceNorm3d(2)],
    rules.bilinear: [nn.Bilinear(2, 2, 2)],
    rules.prelu: [nn.PReLU(2)],
}
CASES = [(module, rule) for rule, modules in HANDLED.items() for module in modules]


def as_subclass(module: nn.Module, **changes: object) -> nn.Module:
    """The same module, as an object of a subclass that changes these attributes."""
    copy = type(module).__new__(type("Changed", (type(module),), changes))
    copy.__dict__.update(module.__dict__)
    return copy


@pytest.mark.parametrize(("module", "rule"), CASES, ids=[type(module).__name__ for module, _ in CASES])
class TestEveryKind:
    def test_has_its_own_rule_also_in_a_subclass_that_computes_the_same(
        self, module: nn.Module, rule: rules.LayerRule
    ) -> None:
        assert rule_of(module) is rule
        assert rule_of(as_subclass(module, extra=1)) is rule

    def test_loses_it_where_forward_is_changed(self, module: nn.Module, rule: rules.LayerRule) -> None:
        assert rule_of(as_subclass(module, forward=lambda self, x: 2 * x)) is None

    def test_loses_it_where_forward_is_replaced_on_the_object(self, module: nn.Module, rule: rules.LayerRule) -> None:
        patched = as_subclass(module)
        patched.forward = types.MethodType(lambda self, x: 2 * x, patched)
        assert rule_of(patched) is None


def test_loses_its_rule_where_a_part_of_forward_is_changed() -> None:
    assert rule_of(as_subclass(nn.Conv2d(1, 1, 1), _conv_forward=lambda *args: None)) is None
    assert rule_of(as_subclass(nn.InstanceNorm2d(1), _apply_instance_norm=lambda *args: None)) is None


def test_a_class_of_the_same_short_name_is_another() -> None:
    class Conv1D(nn.Module):
        pass

    assert rule_of(Conv1D()) is None


def bag_of_offsets(**how: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(5, 3, **how)

        def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
            return self.bag(tokens, offsets)

    torch.manual_seed(0)
    return Bags(), (torch.arange(12) % 5, torch.tensor([0, 3, 4, 9]))


@pytest.mark.parametrize("padding", [None, 2, 4])
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_bags_by_offsets_are_told_apart(mode: str, padding: int | None) -> None:
    """All records share one line of indices there: each has those of its own bag, without what fills it up. A bag ends
    where the next one begins, so without a record another's is longer, and a checked sum is refused."""
    model, inputs = bag_of_offsets(mode=mode, padding_idx=padding)

    def bag_losses(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return net(inputs[0], batch[0]).square().sum(1)

    with pytest.raises(clipless.Misuse, match="mixes records"):
        clipless.clipped_sum(model, bag_losses, (inputs[1], torch.zeros(4)), "abadi")
    found = engine_sum(model, bag_losses, (inputs[1], torch.zeros(4)), "abadi", checked=False)
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for record, loss in enumerate(bag_losses(model, (inputs[1], torch.zeros(4)))):
        grads = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        torch.testing.assert_close(found.norms[0, record], norm, rtol=1e-5, atol=0)
        for name, grad in zip(parameters, grads, strict=True):
            total[name] += grad * (1 / norm).clamp(max=1)
    for name, value in total.items():
        torch.testing.assert_close(found.grads[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(3, 3, 3, padding=1),
        nn.ConvTranspose1d(3, 3, 3, padding=1),
        nn.InstanceNorm1d(3, affine=True),
        nn.GroupNorm(3, 3),
        nn.PReLU(3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_that_takes_another_dimension_for_the_batch_is_refused(layer: nn.Module) -> None:
    """[T, C, B]: a convolution along the records mixes them, and its rows look like records all the same."""

    class Sideways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = layer, nn.Linear(9, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x.permute(1, 2, 0)).permute(2, 0, 1).flatten(1))

    for records in (3, 4):
        batch = torch.randn(records, 3, 3), torch.zeros(records, dtype=torch.long)
        with pytest.raises(clipless.UnsupportedModule, match="records in the first dimension"):
            clipless.clipped_sum(Sideways(), losses, batch)


@pytest.mark.parametrize("layer", [Pairing(2, 2, 3), nn.PReLU(), nn.RMSNorm(4), Conv1D(3, 4)], ids=repr)
def test_time_major_inputs_agree_with_the_oracle(layer: nn.Module) -> None:
    class TimeMajor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).tanh().sum(0)[:, :3]

    for records in (1, 2, 5):
        batch = torch.randn(records, 5, 4), torch.arange(records) % 3
        fast, slow = (which.clipped_sum(TimeMajor(), losses, batch) for which in (clipless, clipless.oracle))
        assert relative_error(fast, slow) <= 1e-4


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_indices_may_be_of_either_type(kind: torch.dtype) -> None:
    tables = [Bagged(), nn.EmbeddingBag(7, 4, mode="max"), nn.Sequential(nn.Embedding(7, 4), nn.Flatten())]
    for model in tables:
        batch = torch.randint(7, (4, 3)).to(kind), torch.arange(4) % 3
        fast, slow = (which.clipped_sum(model, losses, batch) for which in (clipless, clipless.oracle))
        assert relative_error(fast, slow) <= 1e-4


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_of_nothing_but_padding_gives_no_gradient(mode: str) -> None:
    bag = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=0)
    clipped = clipless.clipped_sum(bag, losses, (torch.tensor([[0, 0], [0, 3]]), torch.tensor([0, 1])), "abadi")
    assert clipped.norms[0, 0] == 0
    assert clipped.norms[0, 1] > 0
    assert clipped.grads["weight"][[0, 1, 2, 4]].count_nonzero() == 0


@pytest.mark.parametrize("layer", [nn.RMSNorm(4, eps=1e-6), Pairing(2, 2, 3), nn.PReLU(4), Conv1D(3, 4)], ids=repr)
def test_half_precision_is_summed_in_single_precision(layer: nn.Module) -> None:
    """The gradient in bfloat16 is that of the same module in float32, up to the rounding of what it was given."""
    low = layer.to(torch.bfloat16)
    x = (1e-2 * torch.randn(6, 4)).to(torch.bfloat16)
    y = torch.arange(6) % 3
    rounded = clipless.clipped_sum(low, lambda m, b: losses(lambda x: m(x).float(), b), (x, y))
    exact = clipless.oracle.clipped_sum(low.float(), losses, (x.float(), y))
    for name, grad in rounded.grads.items():
        torch.testing.assert_close(grad.float(), exact.grads[name], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_rms_norm_without_an_eps_has_that_of_torch(dtype: torch.dtype) -> None:
    """Which depends on the version of torch for 16 bits, by a factor of 60,000 for bfloat16."""
    layer = nn.RMSNorm(4).to(dtype)
    x, y = (1e-3 * torch.randn(6, 4)).to(dtype), torch.arange(6) % 3

    def of_model(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return losses(lambda x: model(x).to(torch.promote_types(dtype, torch.float32)), batch)

    (expected,) = torch.autograd.grad(of_model(layer, (x, y)).sum(), layer.parameters())
    found = clipless.clipped_sum(layer, of_model, (x, y), clipless.abadi(threshold=1e6)).grads["weight"]
    torch.testing.assert_close(found.to(dtype), expected, rtol=3e-2, atol=3e-2 * float(expected.abs().max()))


class Rearranged(nn.Module):
    """A GroupNorm whose input lies in memory in another order than torch's own."""

    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.inner, self.norm, self.head = nn.Linear(5, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).permute(0, 3, 1, 2)  # [b,c,h,w]
        h = h.to(memory_format=torch.channels_last) if self.channels_last else h.flatten(2)
        return self.head(self.norm(h).tanh().flatten(2).mean(2))


@pytest.mark.parametrize("channels_last", [False, True])
def test_group_norm_takes_its_input_in_any_order_in_memory(channels_last: bool) -> None:
    torch.manual_seed(0)
    model, batch = Rearranged(channels_last), (torch.randn(6, 2, 3, 5), torch.arange(6) % 3)
    fast, slow = (which.clipped_sum(model, losses, batch) for which in (clipless, clipless.oracle))
    assert relative_error(fast, slow) <= 1e-4


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_an_embedding_of_no_positions_learns_nothing(padding_idx: int | None) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4, padding_idx=padding_idx), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x).sum(1))

    model, batch = Bare(), (torch.zeros(5, 0, dtype=torch.long), torch.arange(5) % 3)
    for groups in ("flat", "per-layer"):
        fast, slow = (
            which.clipped_sum(model, losses, batch, clipless.abadi(groups=groups))
            for which in (clipless, clipless.oracle)
        )
        assert relative_error(fast, slow) <= 1e-4
        assert not fast.grads["table.weight"].any()

"""replace_batchnorm: what is replaced, what is kept, and that the result can be trained privately."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clipless
from clipless.replacing import groups_for
from problems import losses


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.blocks = nn.ModuleDict({"deep": nn.Sequential(nn.Conv2d(32, 48, 1), nn.BatchNorm2d(48), nn.ReLU())})
        self.head = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks["deep"](self.norm(self.conv(x))).mean((2, 3)))


def test_every_batchnorm_is_replaced_and_named() -> None:
    model = Bottleneck()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    replaced, changes = clipless.replace_batchnorm(model)
    assert [str(change) for change in changes] == [
        "norm: BatchNorm2d(32) -> GroupNorm(2, 32)",
        "blocks.deep.1: BatchNorm2d(48) -> GroupNorm(3, 48)",
    ]
    assert isinstance(replaced, Bottleneck)
    assert isinstance(replaced.norm, nn.GroupNorm)
    assert isinstance(replaced.blocks["deep"][1], nn.GroupNorm)
    assert isinstance(model.norm, nn.BatchNorm2d)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert dict(replaced.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in replaced.parameters()}


def test_the_result_is_sound_where_the_model_was_refused() -> None:
    torch.manual_seed(0)
    model, batch = Bottleneck(), (torch.randn(5, 2, 4, 4), torch.randint(3, (5,)))
    with pytest.raises(clipless.Unsound, match=r"clipless\.replace_batchnorm\(model\)"):
        clipless.check(model, losses, batch).raise_if_unsound()
    clipless.check(clipless.replace_batchnorm(model).model, losses, batch).raise_if_unsound()


KINDS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (4, 32)),
    "1d with positions": (nn.BatchNorm1d, (4, 32, 5)),
    "2d": (nn.BatchNorm2d, (4, 32, 3, 3)),
    "3d": (nn.BatchNorm3d, (4, 32, 2, 2, 2)),
    "synchronised": (nn.SyncBatchNorm, (4, 32, 3, 3)),
}


@pytest.mark.parametrize(("kind", "shape"), KINDS.values(), ids=KINDS)
def test_parameters_flags_and_shapes_are_kept(kind: Callable[..., nn.Module], shape: tuple[int, ...]) -> None:
    old: Any = kind(32, eps=1e-3, dtype=torch.float64).eval()
    with torch.no_grad():
        old.weight.uniform_(1, 2)
        old.bias.uniform_(1, 2)
    old.bias.requires_grad_(False)
    new, (change,) = clipless.replace_batchnorm(old)
    assert change.name == "(model)"
    assert isinstance(new, nn.GroupNorm)
    assert (new.num_groups, new.num_channels, new.eps, new.affine, new.training) == (2, 32, 1e-3, True, False)
    assert torch.equal(new.weight, old.weight)
    assert torch.equal(new.bias, old.bias)
    assert (new.weight.requires_grad, new.bias.requires_grad, new.weight.dtype) == (True, False, torch.float64)
    out = new(torch.randn(shape, dtype=torch.float64))
    assert out.shape == shape
    assert out.var(0).min() > 0


def test_without_affine_there_are_no_parameters() -> None:
    new, _ = clipless.replace_batchnorm(nn.BatchNorm2d(8, affine=False))
    assert not list(new.parameters())
    assert new(torch.randn(2, 8, 3, 3)).shape == (2, 8, 3, 3)


def test_a_shared_module_stays_one_module() -> None:
    norm = nn.BatchNorm1d(4)
    new, changes = clipless.replace_batchnorm(nn.Sequential(nn.Linear(4, 4), norm, nn.Sequential(norm)))
    assert isinstance(new, nn.Sequential)
    assert new[1] is new[2][0]
    assert [change.name for change in changes] == ["1", "2.0"]


def test_a_tied_weight_stays_tied() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    new, _ = clipless.replace_batchnorm(model)
    assert isinstance(new, nn.Sequential)
    assert new[0].weight is new[1].weight
    assert new[0] is not new[1]


def test_without_batchnorm_the_copy_is_the_same_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    replaced = clipless.replace_batchnorm(model)
    assert replaced.changes == ()
    assert replaced.model is not model
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in replaced.model.state_dict().items())
    assert str(replaced) == "nothing to replace: the model has no BatchNorm."
    assert "1: BatchNorm1d(3) -> GroupNorm(1, 3)" in str(
        clipless.replace_batchnorm(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)))
    )


def test_groups_divide_the_channels() -> None:
    for channels in range(1, 2100):
        groups = groups_for(channels)
        assert channels % groups == 0
        assert 1 <= groups <= 32
        assert groups == 1 or channels // groups >= 16


class Activated(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_what_would_be_lost_is_refused() -> None:
    with pytest.raises(clipless.UnsupportedModule, match="Activated '0' is a BatchNorm with a forward of its own"):
        clipless.replace_batchnorm(nn.Sequential(Activated(4)))
    for lazy in (nn.LazyBatchNorm2d(), nn.LazyBatchNorm2d(affine=False)):
        with pytest.raises(clipless.InvalidArgument, match="'0' has no shape yet: run the model on one example first"):
            clipless.replace_batchnorm(nn.Sequential(lazy))
    with pytest.raises(clipless.InvalidType, match="must be a torch.nn.Module, got list"):
        clipless.replace_batchnorm([nn.BatchNorm1d(3)])


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm builds it: the activation is a part of the normalization."""

    __module__ = "timm.layers.norm_act"
    __qualname__ = "BatchNormAct2d"

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


def test_the_activation_in_timms_batchnorm_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), BatchNormAct2d(32))
    replaced, changes = clipless.replace_batchnorm(model)
    assert list(map(str, changes)) == ["1: BatchNormAct2d(32) -> GroupNorm(2, 32) and SiLU"]
    x = torch.randn(4, 3, 6, 6)
    norm = nn.GroupNorm(2, 32)
    torch.testing.assert_close(replaced(x), nn.functional.silu(norm(replaced[0](x))))
    report = clipless.check(replaced, lambda m, x: m(x).flatten(1).square().sum(1), x)
    assert report.sound
    assert {row.how for row in report.handling} == {"conv", "group norm"}

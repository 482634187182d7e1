"""Weights that are computed from parameters: standardised, normalised, repeated, changed in place."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import clipless
from clipless import oracle
from clipless.gradients.capture import roots
from clipless.preflight import relative_error
from problems import losses
from self_checking import self_checked


class StandardisedConv(nn.Conv2d):
    """As in timm: rows with mean 0 and variance 1, times a learned gain."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.linspace(0, 1, len(self.weight)).view(-1, 1, 1, 1))

    def standardised(self) -> Tensor:
        rows, scale = self.weight.reshape(1, len(self.weight), -1), (self.gain * 0.5).view(-1)
        return F.batch_norm(rows, None, None, weight=scale, training=True, momentum=0.0).reshape_as(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.standardised(), self.bias, self.stride, self.padding, self.dilation, self.groups)


class OneParameter(StandardisedConv):
    """The gain is computed from the weight itself: not in closed form."""

    def standardised(self) -> Tensor:
        rows = self.weight.reshape(1, len(self.weight), -1)
        scale = self.weight.flatten(1).norm(dim=1) * self.gain.view(-1)
        return F.batch_norm(rows, None, None, weight=scale, training=True).reshape_as(self.weight)


class Computed(nn.Module):
    """A convolution whose weight is computed in any other way, with the arguments of the function as given."""

    def __init__(self, kernel: tuple[int, int] = (3, 3), **how: Any) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(4, 4 // how.get("groups", 1), *kernel)),
            nn.Parameter(torch.randn(4)),
        )
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, weight=self.weight.tanh(), bias=self.bias, **self.how)


def stacked(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), middle, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


CLOSED: dict[str, Callable[[], nn.Module]] = {
    "standardised": lambda: stacked(StandardisedConv(4, 6, 3, padding=1)),
    "standardised, grouped": lambda: stacked(StandardisedConv(4, 6, 3, groups=2, stride=2, bias=False)),
    "weight norm, convolution": lambda: stacked(weight_norm(nn.Conv2d(4, 6, 3, padding="same"))),
    "weight norm, linear": lambda: stacked(weight_norm(nn.Linear(6, 5))),
}
WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "gain from the weight": lambda: stacked(OneParameter(4, 6, 3)),
    "weight norm along the inputs": lambda: stacked(weight_norm(nn.Conv2d(4, 6, 3), dim=1)),
    "any": lambda: stacked(Computed()),
    "same padding": lambda: stacked(Computed(padding="same", dilation=2)),
    "same padding, even kernel": lambda: stacked(Computed((2, 4), padding="same", dilation=(2, 1))),
    "strides, groups": lambda: stacked(Computed(stride=2, padding=(1, 0), groups=2)),
    "valid padding": lambda: stacked(Computed(padding="valid")),
}


def built(make: Callable[[], nn.Module], records: int = 5) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    batch = torch.randn(records, 2, 6, 6, dtype=torch.float64), torch.arange(records) % 3
    model = make().double()
    with torch.no_grad():
        model(batch[0])
    return model, batch


@pytest.mark.parametrize("make", (CLOSED | WRITTEN).values(), ids=CLOSED | WRITTEN)
def test_agrees_with_single_records(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = built(make)
    found = []

    def noted(*args: Any) -> Any:
        found.append(standardised(*args))
        return found[-1]

    standardised = roots._standardised
    monkeypatch.setattr(roots, "_standardised", noted)
    for groups in ("flat", "per-parameter"):
        how = clipless.abadi(threshold=0.5, groups=groups)
        fast, slow = (which.clipped_sum(model, losses, batch, how) for which in (clipless, oracle))
        assert relative_error(fast, slow) < 1e-10
        torch.testing.assert_close(fast.norms, slow.norms)
    assert {forms is not None for forms in found} == {make in CLOSED.values()}
    assert self_checked(model, losses, batch, len(batch[1]), per_record=True)


@pytest.mark.parametrize("make", CLOSED.values(), ids=CLOSED)
def test_a_record_that_is_not_finite_adds_nothing(make: Callable[[], nn.Module]) -> None:
    model, (x, y) = built(make)
    clean = clipless.clipped_sum(model, losses, (x[1:], y[1:]))
    x[0] = torch.nan
    assert relative_error(clipless.clipped_sum(model, losses, (x, y)), clean) < 1e-10


class Repeated(nn.Module):
    """A table that is repeated for every record, in rows of all records together, as relative positions are."""

    def __init__(self, how: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.table, self.head, self.how = nn.Parameter(torch.randn(2, 5, 3)), nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        table = self.how(self.table, len(x))
        rows = torch.cat([x, 2 * x], 1).view(len(x) * 2, 1, -1)[:, :, :3] * table
        return self.head(rows.view(len(x), 2, 5, 3).sum((1, 2)))


REPEATS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "repeat": lambda table, records: table.repeat(records, 1, 1),
    "repeat a tuple": lambda table, records: table.repeat((records, 1, 1)),
    "tile": lambda table, records: torch.tile(table, (records, 1, 1)),
    "tile with few counts": lambda table, records: torch.tile(table.movedim(0, -1), (records,)).movedim(-1, 0),
    "tile by numbers": lambda table, records: table.movedim(0, 1).tile(records, 1).movedim(1, 0),
    "one row": lambda table, records: table.flatten().unsqueeze(0).repeat(records, 1).view(records * 2, 5, 3),
    "more dimensions": lambda table, records: table.repeat(records, 1, 1, 1).flatten(0, 1),
    "in another dimension": lambda table, records: table.transpose(0, 1).repeat(1, records, 1).transpose(0, 1),
}


@pytest.mark.parametrize("how", REPEATS.values(), ids=REPEATS)
def test_a_table_repeated_for_every_record(how: Callable[[Tensor, int], Tensor]) -> None:
    torch.manual_seed(0)
    model = Repeated(how).double()
    assert torch.equal(how(model.table, 3), model.table.detach().repeat(3, 1, 1))
    for records in (4, 1):
        batch = torch.randn(records, 3, dtype=torch.float64), torch.arange(records) % 3
        fast, slow = (which.clipped_sum(model, losses, batch) for which in (clipless, oracle))
        assert relative_error(fast, slow) < 1e-10
        assert self_checked(model, losses, batch, records, per_record=True)
    batch = torch.randn(4, 3, dtype=torch.float64), torch.arange(4) % 3
    assert {row.how for row in clipless.check(model, losses, batch).handling} == {"by operation", "linear"}


class Changed(nn.Module):
    """A weight that is computed from a parameter and changed in place, perhaps after it was used."""

    def __init__(self, late: bool, by: object) -> None:
        super().__init__()
        self.own, self.late, self.by = nn.Parameter(torch.randn(3, 3)), late, by

    def forward(self, x: Tensor) -> Tensor:
        weight = self.own * 2
        turned = weight.t()
        before = x @ weight if self.late else 0.0
        weight /= self.by
        weight += self.own
        return before + x @ weight + x @ turned


@pytest.mark.parametrize("by", [3.0, torch.tensor(3.0)], ids=["number", "tensor"])
def test_a_computed_weight_may_be_changed_in_place_before_it_is_used(by: object) -> None:
    torch.manual_seed(0)
    model, batch = Changed(late=False, by=by).double(), (torch.randn(4, 3, dtype=torch.float64), torch.arange(4) % 3)
    fast, slow = (which.clipped_sum(model, losses, batch) for which in (clipless, oracle))
    assert relative_error(fast, slow) < 1e-10
    assert {row.how for row in clipless.check(model, losses, batch).handling} == {"by operation"}
    with pytest.raises(clipless.UnsupportedModule, match="in-place operation"):
        clipless.clipped_sum(Changed(late=True, by=by).double(), losses, batch)


class Mapped(nn.Module):
    """An ensemble by torch.vmap over the parameters, or over the records; or a layer inside a transform."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.own, self.inner = how, nn.Parameter(torch.randn(2, 3, 3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "parameters":
            return self.inner(torch.vmap(lambda weight: (x @ weight).tanh())(self.own).mean(0))
        if self.how == "records":
            return self.inner(torch.vmap(lambda row: (row @ self.own[0]).tanh())(x))
        if self.how == "layer":
            return torch.vmap(self.inner)(x) @ self.own[0]
        if self.how == "layer's parameters":
            stacked = torch.stack([self.inner.weight, 2 * self.inner.weight])
            return torch.vmap(lambda weight: x @ weight)(stacked).sum(0) @ self.own[0]
        if self.how == "gradient":
            return torch.func.grad(lambda y: self.inner(y).tanh().sum())(x) @ self.own[0]
        assert self.how == "twice"
        with torch.enable_grad():
            y = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(self.inner(y).tanh().sum(), y, create_graph=True)
        return grad @ self.own[0]


@pytest.mark.parametrize("how", ["parameters", "records"])
def test_a_module_that_maps_its_own_parameters_is_exact(how: str) -> None:
    torch.manual_seed(0)
    model, batch = Mapped(how).double(), (torch.randn(4, 3, dtype=torch.float64), torch.arange(4) % 3)
    fast, slow = (which.clipped_sum(model, losses, batch) for which in (clipless, oracle))
    assert relative_error(fast, slow) < 1e-10
    assert math.isfinite(float(fast.norms.sum()))
    assert self_checked(model, losses, batch, 4, per_record=True)


@pytest.mark.parametrize(
    ("how", "why"),
    {
        "layer": "'inner' or its parameters are used inside torch.vmap",
        "layer's parameters": "'inner' or its parameters are used inside torch.vmap",
        "gradient": "or its parameters are used inside torch.vmap or another transform",
        "twice": "gradients of gradients, also inside the model",
    }.items(),
)
def test_layers_in_transforms_and_second_derivatives_are_refused_in_one_sentence(how: str, why: str) -> None:
    batch = torch.randn(4, 3), torch.arange(4) % 3
    for run in (clipless.clipped_sum, lambda *args: self_checked(*args, 4, per_record=True)):
        with pytest.raises(clipless.errors.CliplessError, match=why):
            run(Mapped(how), losses, batch)

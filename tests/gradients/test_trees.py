"""What modules hold and return in pattern of their own: parameters in plain lists, tensors in dataclasses."""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipless
from clipless import oracle
from clipless.gradients.trees import closed, opened
from clipless.preflight import relative_error
from problems import losses

T, D = 4, 6


class Headed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return self.head(getattr(out, "hidden", out).tanh().mean(1))


class Alias(nn.Module):
    """Also holds its parameter in a list, which is no part of the module. The loop makes it be taken as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D))
        self.plain, self.closure = [self.scale], lambda: self.scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * self.plain[0] + self.scale * self.closure() for row in x])


@dataclass(frozen=True)
class Output:
    hidden: Tensor
    rest: Any = None


class Returning(nn.Module):
    def __init__(self, kind: Callable[..., Any], as_a_whole: bool) -> None:
        super().__init__()
        self.kind, self.as_a_whole, self.scale = kind, as_a_whole, nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Any:
        rows = torch.stack([row * self.scale for row in x]) if self.as_a_whole else x * self.scale
        return self.kind(hidden=rows)


BATCH = torch.randn(5, T, D, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3


@pytest.mark.parametrize("as_a_whole", [False, True])
def test_outputs_in_a_dataclass_agree_with_the_oracle(as_a_whole: bool) -> None:
    torch.manual_seed(0)
    model = Headed(Returning(Output, as_a_whole))
    fast, slow = (which.clipped_sum(model, losses, BATCH) for which in (clipless, oracle))
    assert float(slow.grads["body.scale"].norm()) > 0.1
    assert relative_error(fast, slow) <= 1e-4


def test_outputs_in_an_object_agree_with_the_oracle() -> None:
    torch.manual_seed(0)
    model = Headed(Returning(types.SimpleNamespace, as_a_whole=True))
    fast, slow = (which.clipped_sum(model, losses, BATCH) for which in (clipless, oracle))
    assert float(slow.grads["body.scale"].norm()) > 0.1
    assert relative_error(fast, slow) <= 1e-4


def test_a_parameter_that_a_module_also_holds_in_a_list_is_refused_by_name() -> None:
    with pytest.raises(clipless.UnsupportedModule, match="'body.scale' was used outside its module's forward"):
        clipless.clipped_sum(Headed(Alias()), losses, BATCH)


def test_an_empty_batch_comes_back_empty_in_a_dataclass() -> None:
    class Whole(Headed):
        def forward(self, x: Tensor) -> Output:
            return Output(super().forward(x), {"sizes": (1, None)})

    torch.manual_seed(0)
    model = Whole(nn.Linear(D, D))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(20, T, D), torch.arange(20) % 3)
    private = clipless.make_private(
        model, optimizer, data, noise_multiplier=1.0, batch_size=1, steps=8, seed=2, loss_reduction="mean"
    )
    sizes = []
    for x, y in private.loader:
        output = model(x)
        assert output.hidden.shape == (len(x), 3)
        assert output.rest == {"sizes": (1, None)}
        F.cross_entropy(output.hidden, y).backward()
        optimizer.step()
        sizes.append(len(x))
    assert 0 in sizes
    private.detach()


def test_what_holds_no_dataclass_is_handed_on_as_it_is() -> None:
    values = {"a": [torch.ones(2), None], "b": (1, "x")}
    assert opened(values) is values
    assert closed(values) is values
    inner = Output(torch.ones(2), Output(torch.zeros(1)))
    assert closed(opened([inner]))[0].rest.hidden is inner.rest.hidden

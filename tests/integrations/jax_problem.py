"""One small problem in torch and in JAX: the same records, the same weights in the same order, the same loss."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless.integrations.jax import PrivateGradients, make_private, per_example

SIZE, BATCH, STEPS = 60, 12, 3
PLAN: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "delta": 1e-5,
    "batch_size": BATCH,
    "steps": STEPS,
    "accountant": "rdp",
}


def records(size: int = SIZE) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 5, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def torch_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def weights(model: nn.Sequential) -> Any:
    """The model's weights as a pytree whose leaves have the names and the order of torch's."""
    return [
        {}
        if isinstance(layer, nn.Tanh)
        else Layer(*(jnp.asarray(p.detach().numpy().copy()) for p in layer.parameters()))
        for layer in model
    ]


class Layer(tuple[Any, ...]):
    """weight and bias, named as torch names them."""

    def __new__(cls, weight: Any, bias: Any) -> "Layer":
        return super().__new__(cls, (weight, bias))


def _named(layer: Layer) -> tuple[Any, None]:
    return [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in zip(("weight", "bias"), layer, strict=True)], None


jax.tree_util.register_pytree_with_keys(Layer, _named, lambda _, leaves: Layer(*leaves))


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    (w1, b1), _, (w2, b2) = params
    return -jax.nn.log_softmax(w2 @ jnp.tanh(w1 @ x + b1) + b2)[y]


gradients = per_example(loss)


def run_of(data: Any = None, **options: Any) -> tuple[PrivateGradients, Any, Any, Any]:
    """A run before its first step: run, optimizer, its state, parameters."""
    params = weights(torch_model())
    arrays = tuple(column.numpy() for column in records()) if data is None else data
    run = make_private(params, arrays, **{"seed": 5, **PLAN, **options})
    optimizer = optax.chain(run.transformation(), optax.sgd(0.5))
    return run, optimizer, optimizer.init(params), params


def train(run: PrivateGradients, optimizer: Any, state: Any, params: Any, steps: int = STEPS) -> tuple[Any, Any]:
    """The parameters and the optimizer's state after at most so many steps."""
    for _, batch in zip(range(steps), run.loader, strict=False):
        updates, state = optimizer.update(gradients(params, *batch), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def trained_by_torch(**options: Any) -> tuple[list[Tensor], clipless.Private]:
    """The same run by `clipless.make_private`."""
    model = torch_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = clipless.make_private(model, optimizer, TensorDataset(*records()), **{"seed": 5, **PLAN, **options})
    for x, y in private.loader:
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
    return [p.detach() for p in model.parameters()], private


def furthest(params: Any, others: list[Tensor]) -> float:
    """The largest difference of any weight."""
    leaves = jax.tree_util.tree_leaves(params)
    return max(float(np.abs(np.asarray(a) - b.numpy()).max()) for a, b in zip(leaves, others, strict=True))

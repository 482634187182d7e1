"""Bilinear layers, for inputs of any rank."""

from torch import Tensor, nn

from clipless.grads.pieces import Instantiated, OuterProducts, Piece
from clipless.grads.rules.linear import positions
from clipless.grads.rules.use import Use, at_least_float32, register


@register(nn.Bilinear)
def bilinear(use: Use, grads: tuple[Tensor, ...]) -> dict[str, Piece]:
    left, right = (positions(use.arguments[name]) for name in ("input1", "input2"))  # [b,t,i] [b,t,j]
    grad = positions(at_least_float32(grads[0])).to(left.dtype)  # [b,t,o]
    pieces: dict[str, Piece] = {}
    if "weight" in use.wanted:
        pairs = (left.unsqueeze(3) * right.unsqueeze(2)).flatten(2)  # [b,t,ij]
        pieces["weight"] = PairProducts(OuterProducts(pairs, grad), left.shape[2], right.shape[2])
    if "bias" in use.wanted:
        pieces["bias"] = Instantiated(grad.sum(1))
    return pieces


class PairProducts:
    """g_b = Σ_t grads[b,t] ⊗ left[b,t] ⊗ right[b,t]: a linear layer's gradient whose inputs are all pairs (i,j)."""

    def __init__(self, flat: OuterProducts, i: int, j: int) -> None:
        self.flat, self.pair = flat, (i, j)

    @property
    def sq_norms(self) -> Tensor:
        return self.flat.sq_norms

    def weighted_sum(self, factors: Tensor) -> Tensor:
        return self.flat.weighted_sum(factors).unflatten(1, self.pair)  # [o,i,j]

    def per_record(self) -> Tensor:
        return self.flat.per_record().unflatten(2, self.pair)  # [b,o,i,j]

    def keep(self, mask: Tensor) -> "PairProducts":
        return PairProducts(self.flat.keep(mask), *self.pair)

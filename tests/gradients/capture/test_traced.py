"""Parameters outside any known layer, against the oracle: tokens, positions, scales, attention, parametrisations."""

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import clipless
from clipless import oracle
from clipless.clipping import CLIPPINGS
from clipless.gradients.capture.known_operations import reduced
from clipless.preflight import relative_error
from operators import dropped_product, several_rows
from problems import losses
from self_checking import MODES, self_checked

T, D = 4, 6


class Head(nn.Module):
    """Mean over the positions of what `body` makes of x [b,t,d], then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, 3)

    def body(self, x: Tensor) -> Tensor:
        raise AssertionError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh().mean(1))


class Token(Head):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, T + 1, D))
        self.inner = nn.Linear(D, D)

    def body(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.inner(x + self.place)


class RepeatedToken(Token):
    def body(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.repeat(len(x), 1, 1), x], 1)
        return self.inner(x + self.place[:, : x.shape[1]])


class DroppedToken(Token):
    def body(self, x: Tensor) -> Tensor:
        return F.dropout(super().body(x), 0.0)


class Positions(Head):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(9, D), nn.LayerNorm(D)

    def body(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]))


class NormedPositions(Positions):
    def body(self, x: Tensor) -> Tensor:
        return x * self.norm(self.table(torch.arange(x.shape[1]).unsqueeze(0)))


class BothWays(Positions):
    """One table for positions, without records, and for tokens, with them."""

    def body(self, x: Tensor) -> Tensor:
        tokens = (x.sum(2) * 3).long() % 9
        return x * self.table(tokens) + self.table(torch.arange(x.shape[1]))


class PaddedBothWays(BothWays):
    """As before, with row 0 for padding, which learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, D, padding_idx=0)


class Bias(Head):
    """A bias on attention scores by distance, added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Embedding(2 * T, 2)

    def body(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        bias = self.distances(steps[:, None] - steps + T).permute(2, 0, 1).unsqueeze(0)
        q = x.unflatten(2, (2, -1)).transpose(1, 2)
        scores = q @ q.mT
        scores += bias
        return (scores.softmax(-1) @ q).transpose(1, 2).flatten(2)


class Raw(Head):
    """Matrices, scales and shifts of its own, used in several pattern."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))
        self.scale, self.temperature = nn.Parameter(torch.rand(D)), nn.Parameter(torch.zeros(()))

    def body(self, x: Tensor) -> Tensor:
        y = x @ self.matrix * F.softplus(self.scale) + self.shift
        y = F.linear(y, self.matrix, self.shift) / self.temperature.exp()
        return torch.einsum("btd,de->bte", F.layer_norm(y, (D,), self.scale), self.matrix.t())


class Cast(Raw):
    """Parameters cast to the type of what they meet."""

    def body(self, x: Tensor) -> Tensor:
        y = x @ self.matrix.type_as(x) * self.scale.to(x) + self.shift.to(x, copy=True)
        return (y.double() * self.temperature.type_as(y.double())).to(self.shift)


class LowRank(Head):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(D, 2))

    def body(self, x: Tensor) -> Tensor:
        return F.linear(x, self.up @ self.down) + F.linear(F.linear(x, self.down), self.up)


class Listed(Head):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(torch.randn(D, D)) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.rand(D))})

    def body(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = (x @ matrix).tanh()
        return x * self.named["scale"]


class Pair(nn.Module):
    """Returns a tensor computed from its parameter alone, beside the records."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.scale * 2


class Handed(Head):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def body(self, x: Tensor) -> Tensor:
        x, scale = self.pair(x)
        return x * scale


class Wrapped(Head):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.inner = wrap(nn.Linear(D, D))

    def body(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Attention(Head):
    def __init__(self, batch_first: bool = True, masked: bool = False, **settings: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=batch_first, **settings)
        self.batch_first, self.masked = batch_first, masked

    def body(self, x: Tensor) -> Tensor:
        sizes = {name: getattr(self.attention, name) for name in ("kdim", "vdim")}
        q = x if self.batch_first else x.transpose(0, 1)
        k, v = q[..., : sizes["kdim"]], q[..., : sizes["vdim"]]
        mask = torch.ones(T, T).triu(1).bool() if self.masked else None
        padding = torch.arange(T).expand(len(x), -1) >= 3 if self.masked else None
        out, weights = self.attention(q, k, v, attn_mask=mask, key_padding_mask=padding)
        out = out if self.batch_first else out.transpose(0, 1)
        return out + weights.mean((1, 2))[:, None, None]


class Encoder(Head):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True, **settings)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def body(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Decoder(Head):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(D, 2, 8, dropout=0.0)

    def body(self, x: Tensor) -> Tensor:
        return self.decoder(x.transpose(0, 1), x.tanh().transpose(0, 1)).transpose(0, 1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "token": Token,
    "token-repeated": RepeatedToken,
    "token-dropout": DroppedToken,
    "positions": Positions,
    "positions-normed": NormedPositions,
    "positions-and-tokens": BothWays,
    "positions-and-padded-tokens": PaddedBothWays,
    "bias": Bias,
    "raw": Raw,
    "cast": Cast,
    "low-rank": LowRank,
    "listed": Listed,
    "handed": Handed,
    "weight-norm": lambda: Wrapped(weight_norm),
    "spectral-norm": lambda: Wrapped(spectral_norm).eval(),
    "orthogonal": lambda: Wrapped(orthogonal),
    "attention": Attention,
    "attention-time-major": lambda: Attention(batch_first=False),
    "attention-masked": lambda: Attention(masked=True),
    "attention-own-sizes": lambda: Attention(kdim=4, vdim=5),
    "attention-bias-kv": lambda: Attention(add_bias_kv=True, add_zero_attn=True, masked=True),
    "attention-no-bias": lambda: Attention(bias=False),
    "encoder": Encoder,
    "encoder-norm-first": lambda: Encoder(norm_first=True, activation="gelu"),
    "decoder": Decoder,
}


@pytest.mark.parametrize(("clipping", "groups"), [("auto-s", "flat"), ("abadi", "per-layer")])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_agrees_with_the_oracle(make: Callable[[], nn.Module], clipping: str, groups: str) -> None:
    """Also for as many records as positions, T = 4, and as features, D = 6. A rule sees norms alone: two will do."""
    torch.manual_seed(0)
    model = make()
    for records in (0, 1, 2, T, D):
        batch = torch.randn(records, T, D), torch.arange(records) % 3
        how = CLIPPINGS[clipping](groups=groups)
        fast, slow = (which.clipped_sum(model, losses, batch, how) for which in (clipless, oracle))
        torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-3, atol=1e-6)
        assert relative_error(fast, slow) <= 1e-3
        assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("per_record", MODES.values(), ids=MODES)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_run_finds_no_fault_with_it(make: Callable[[], nn.Module], per_record: bool) -> None:
    torch.manual_seed(0)
    model = make()
    for records in (1, 2, T, D):
        batch = torch.randn(records, T, D), torch.arange(records) % 3
        assert self_checked(model, losses, batch, records, per_record)


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_non_finite_record_contributes_nothing(make: Callable[[], nn.Module], groups: str) -> None:
    torch.manual_seed(0)
    model, how = make(), clipless.auto_s(groups=groups)
    x, y = torch.randn(5, T, D), torch.arange(5) % 3
    clean = clipless.clipped_sum(model, losses, (x[1:], y[1:]), how)
    x[0] = torch.nan
    dirty = clipless.clipped_sum(model, losses, (x, y), how)
    for name, grad in dirty.grads.items():
        torch.testing.assert_close(grad, clean.grads[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_removing_a_record_moves_the_sum_by_at_most_the_sensitivity(make: Callable[[], nn.Module]) -> None:
    """In every group of one parameter, which bounds any larger one."""
    torch.manual_seed(0)
    x = torch.randn(5, T, D)
    x[0] *= 1e3
    report = clipless.check(make(), losses, (x, torch.arange(5) % 3), clipless.auto_v(groups="per-parameter"))
    report.raise_if_unsound()
    assert report.largest_change <= report.sensitivity * (1 + 1e-3)


@pytest.mark.parametrize("shape", [(3, 4), (3, 1), (1, 4), (1, 1), (4,), (1,), ()])
def test_the_gradient_of_what_was_broadcast_is_summed_record_by_record(shape: tuple[int, ...]) -> None:
    parameter, x, g = torch.randn(shape, requires_grad=True), torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    expected = [torch.autograd.grad((parameter + x[k] * 0), parameter, g[k])[0] for k in range(5)]
    torch.testing.assert_close(reduced(g, torch.Size(shape)), torch.stack(expected))


def test_dropout_beside_a_parameter_uses_the_mask_of_the_forward_pass() -> None:
    torch.manual_seed(0)
    model = DroppedToken()
    model.body = lambda x: F.dropout(Token.body(model, x), 0.5)
    batch = torch.randn(5, T, D), torch.arange(5) % 3
    torch.manual_seed(7)
    plain = torch.autograd.grad(losses(model, batch).sum(), list(model.parameters()))
    torch.manual_seed(7)
    ours = clipless.clipped_sum(model, losses, batch, clipless.abadi(threshold=1e9))
    for grad, reference in zip(ours.grads.values(), plain, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-5)


def test_an_in_place_operation_is_tapped_too() -> None:
    class InPlace(Raw):
        def body(self, x: Tensor) -> Tensor:
            y = x * 1
            y.mul_(self.scale)
            y -= self.shift
            return y

    model = InPlace()
    batch = torch.randn(5, T, D), torch.arange(5) % 3
    fast, slow = (which.clipped_sum(model, losses, batch) for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-4


def test_what_cannot_be_taken_by_operation_is_taken_as_a_whole() -> None:
    class InPlace(Raw):
        def body(self, x: Tensor) -> Tensor:
            return (x * 1).clamp_(self.shift - 1, self.shift + 1)

    model = InPlace()
    batch = torch.randn(5, T, D), torch.arange(5) % 3
    fast, slow = (which.clipped_sum(model, losses, batch) for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-4


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_empty_batches_are_steps_of_noise(make: Callable[[], nn.Module]) -> None:
    """Also with dropout in the model, which draws no matter for nobody."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.1), make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(30, T, D), torch.arange(30) % 3)
    private = clipless.make_private(
        model, optimizer, data, noise_multiplier=1.0, batch_size=1, steps=8, seed=2, loss_reduction="mean"
    )
    sizes = []
    for x, y in private.loader:
        sizes.append(len(x))
        F.cross_entropy(model(x), y).backward()
        assert all(type(p) is nn.Parameter and p.grad is None and p.requires_grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert 0 in sizes
    assert max(sizes) > 0
    private.detach()


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), lambda: random.random(), lambda: np.random.rand()])
def test_a_module_taken_as_a_whole_must_not_draw_random_numbers(draw: Callable[[], object]) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(D))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([torch.stack([v * self.scale * float(draw()) for v in row]) for row in x])

    model = Head()
    model.add_module("loop", Loop())
    model.body = lambda x: model.loop(x)
    with pytest.raises(clipless.UnsupportedModule, match="'loop' has parameters of its own and draws random numbers"):
        clipless.clipped_sum(model, losses, (torch.randn(5, T, D), torch.arange(5) % 3))


def test_spectral_norm_trains() -> None:
    """Its buffers follow the weights, not the records, so their change in training mode is no leak."""
    model = Wrapped(spectral_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(20, T, D), torch.arange(20) % 3)
    private = clipless.make_private(
        model, optimizer, data, noise_multiplier=1.0, batch_size=5, steps=4, loss_reduction="mean"
    )
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert private.ledger.steps == 4
    private.detach()


def test_a_layer_used_at_several_lengths_agrees_with_the_oracle() -> None:
    class Pyramid(Head):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(D, D), nn.Parameter(torch.rand(D))

        def body(self, x: Tensor) -> Tensor:
            while x.shape[1] > 1:
                x = self.inner(x[:, ::2]).tanh() * self.scale
            return x

    model = Pyramid()
    for records in (1, 2, T):
        batch = torch.randn(records, T, D), torch.arange(records) % 3
        fast, slow = (which.clipped_sum(model, losses, batch) for which in (clipless, oracle))
        assert relative_error(fast, slow) <= 1e-4


def test_inputs_that_come_and_go_are_learned_each_way() -> None:
    """A mask that is given or not, with as many positions as records: another structure is another layout."""

    class Optional(Head):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.table = nn.Linear(D, D), nn.Embedding(2, D)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if mask is not None:
                x = x + self.table(mask)
            return self.head(self.inner(x).tanh().mean(1))

    model = Optional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = torch.utils.data.TensorDataset(torch.randn(T, T, D), torch.arange(T) % 3)
    private = clipless.make_private(
        model,
        optimizer,
        data,
        noise_multiplier=1e-9,
        delta=1e-5,
        batch_size=T,
        steps=4,
        clipping=clipless.auto_v(),
        loss_reduction="mean",
    )
    mask = torch.tensor([0, 1, 0, 1])
    for number, (x, y) in enumerate(private.loader):
        given = mask if number % 2 else None
        F.cross_entropy(model(x, given), y).backward()
        optimizer.step()
        found = {name: p.grad * T for name, p in model.named_parameters()}
        plain = copy.deepcopy(model)
        truth = oracle.clipped_sum(
            plain, lambda m, b, given=given: F.cross_entropy(m(b[0], given), b[1], reduction="none"), (x, y), "auto-v"
        )
        assert relative_error(clipless.ClippedSum(found, truth.norms), truth) <= 1e-3
    private.detach()


def test_a_model_for_one_size_of_batch_is_refused() -> None:
    class Fixed(Head):
        def body(self, x: Tensor) -> Tensor:
            return x.view(5, T, D)

    with pytest.raises(clipless.UnsupportedModule, match="could not be run on another number of records"):
        clipless.clipped_sum(Fixed(), losses, (torch.randn(5, T, D), torch.arange(5) % 3))


def test_inputs_that_are_time_major_from_the_start_agree_with_the_oracle() -> None:
    def transposed(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(module(batch[0].transpose(0, 1)), batch[1], reduction="none")

    class TimeMajor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(D, 2), nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0].mean(0))

    model = TimeMajor()
    for records in (2, 5):
        batch = torch.randn(records, T, D), torch.arange(records) % 3
        fast, slow = (which.clipped_sum(model, transposed, batch) for which in (clipless, oracle))
        assert relative_error(fast, slow) <= 1e-4


def test_records_that_meet_in_an_operation_are_refused_by_name() -> None:
    """Also where nothing before the operation has a gradient of its own, so that autograd would not notice."""

    class Meeting(Raw):
        def body(self, x: Tensor) -> Tensor:
            return x * torch.einsum("btd,d->td", x, self.scale)

    with pytest.raises(clipless.UnsupportedModule, match=r"'\(model\)' mixes the records.*Keep one row"):
        clipless.clipped_sum(Meeting(), losses, (torch.randn(5, T, D), torch.arange(5) % 3))


def test_a_shared_tensor_that_leaves_the_model_is_refused_by_name() -> None:
    model = Pair()

    def outside(module: nn.Module, batch: Tensor) -> Tensor:
        x, scale = module(batch)
        return (x * scale).sum((1, 2))

    with pytest.raises(clipless.UnsupportedModule, match=r"'\(model\)' returned a tensor computed from its parameters"):
        clipless.clipped_sum(model, outside, torch.randn(5, T, D))


class Operating(nn.Module):
    def __init__(self, operation: Callable[[Tensor, Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.operation, self.weight = operation, nn.Parameter(torch.randn(D, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x, self.weight)[0]


@pytest.mark.parametrize(
    ("operation", "told"),
    [(dropped_product, "draws random numbers"), (several_rows, "several_rows.*cannot compute record by record")],
)
def test_an_operator_whose_gradient_cannot_be_repeated_record_by_record_is_refused(
    operation: Callable[[Tensor, Tensor], list[Tensor]], told: str
) -> None:
    """At every use, not only where a run checks itself: other random numbers would give other norms."""
    with pytest.raises(clipless.UnsupportedModule, match=told):
        clipless.clipped_sum(Operating(operation), losses, (torch.randn(5, D), torch.arange(5) % 3))

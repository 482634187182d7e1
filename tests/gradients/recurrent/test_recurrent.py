"""Recurrent layers against the oracle: every variant × clipping × partition × batch size, and what is refused."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import clipless
from clipless import oracle
from clipless.clipping import CLIPPINGS
from clipless.gradients.layers import Use, generic, rule_of
from clipless.gradients.recurrent import recurrent, recurrent_cell
from clipless.preflight import relative_error
from problems import CLASSES, Problem, losses, normal, tokens
from self_checking import MODES, self_checked

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

KINDS = {"rnn": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k), "lstm": nn.LSTM, "gru": nn.GRU}
CELLS = {
    "rnn-cell": nn.RNNCell,
    "relu-cell": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
    "lstm-cell": nn.LSTMCell,
    "gru-cell": nn.GRUCell,
}


class Reader(nn.Module):
    """A linear layer, a recurrent one, and a loss that looks at all of its outputs; the input is [b,t,3]."""

    def __init__(self, layer: nn.RNNBase, states: bool = False, calls: int = 1) -> None:
        super().__init__()
        self.first, self.layer, self.states, self.calls = nn.Linear(3, layer.input_size), layer, states, calls
        width = layer.proj_size or layer.hidden_size
        pattern = 2 if layer.bidirectional else 1
        self.widths = [width, layer.hidden_size][: 2 if isinstance(layer, nn.LSTM) else 1]
        self.head = nn.Linear(width * pattern + sum(self.widths) * pattern * layer.num_layers, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not self.layer.batch_first:
            x = x.transpose(0, 1)
        state = self.initial(x) if self.states else None
        for _ in range(self.calls):
            output, state = self.layer(x, state)
        ends = [state] if isinstance(state, Tensor) else list(state)
        mean = output.tanh().mean(1 if self.layer.batch_first else 0)
        return self.head(torch.cat([mean, *(end.transpose(0, 1).flatten(1) for end in ends)], 1))

    def initial(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Initial states that depend on the record, and so carry gradients to the layer below."""
        own = x.mean(1 if self.layer.batch_first else 0).sum(1)
        rows = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        states = tuple((torch.arange(rows * w).view(rows, 1, w) / 5 + own[:, None]).sin() for w in self.widths)
        return states if len(states) > 1 else states[0]


class Transposed(nn.Module):
    """Looks at the final states through a transposed copy, so that their gradients come transposed; the input is [b,t,3]."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        ends = self.layer(x)[1]
        states = (ends,) if isinstance(ends, Tensor) else ends
        return self.head(sum(state.transpose(1, 2).contiguous()[0].t() for state in states))


class Stepper(nn.Module):
    """A cell that is called once for each position; the input is [b,t,3]."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(cell.hidden_size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for row in x.unbind(1):
            state = self.cell(row, state)
        return self.head(state if isinstance(state, Tensor) else state[0] + state[1])


class CharModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(11, 4), nn.LSTM(4, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x))[0][:, -1])


def reader(kind: str, *, states: bool = False, calls: int = 1, **settings: object) -> Callable[[], nn.Module]:
    return lambda: Reader(KINDS[kind](5, 4, **settings), states, calls)


def half_frozen() -> nn.Module:
    model = Reader(nn.GRU(5, 4, num_layers=2))
    model.layer.weight_ih_l0.requires_grad_(False)
    model.layer.bias_hh_l1.requires_grad_(False)
    return model


VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "batch-first": {"batch_first": True},
    "no-bias": {"bias": False, "batch_first": True},
    "states": {"states": True, "batch_first": True},
    "two-way": {"bidirectional": True, "states": True},
    "deep": {"num_layers": 3},
    "deep-two-way": {"num_layers": 2, "bidirectional": True, "batch_first": True, "states": True, "bias": False},
    "reused": {"calls": 2, "batch_first": True},
}
PROBLEMS = {
    f"{kind}-{name}": Problem(reader(kind, **variant), normal(6, 3))
    for kind in KINDS
    for name, variant in VARIANTS.items()
} | {
    "lstm-projected": Problem(reader("lstm", proj_size=2, batch_first=True), normal(6, 3)),
    "lstm-projected-deep-two-way": Problem(
        reader("lstm", proj_size=2, num_layers=2, bidirectional=True, states=True), normal(6, 3)
    ),
    "lstm-ghost": Problem(lambda: Reader(nn.LSTM(9, 8, batch_first=True)), normal(3, 3)),
    "lstm-one-position": Problem(reader("lstm", batch_first=True), normal(1, 3)),
    "lstm-square": Problem(reader("lstm"), normal(7, 3)),
    "gru-half-frozen": Problem(half_frozen, normal(4, 3)),
    **{
        f"{name}-transposed": Problem(lambda kind=kind: Transposed(kind(3, 4, batch_first=True)), normal(5, 3))
        for name, kind in KINDS.items()
    },
    "char-lstm": Problem(CharModel, tokens(11, 8)),
}
PROBLEMS |= {
    f"{name}{'' if bias else '-no-bias'}": Problem(
        lambda kind=kind, bias=bias: Stepper(kind(3, 4, bias=bias)), normal(5, 3)
    )
    for name, kind in CELLS.items()
    for bias in (True, False)
}


@pytest.mark.parametrize(("clipping", "groups"), [("auto-s", "flat"), ("abadi", "per-layer")])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_engine_agrees_with_oracle(problem: Problem, clipping: str, groups: str) -> None:
    """A rule sees norms alone, whatever the layer; tests/gradients/test_engine.py has the others."""
    model, how = problem.model(), CLIPPINGS[clipping](groups=groups)
    for records in (0, 1, 2, 7) if groups == "flat" else (2, 7):
        batch = problem.batch(records)
        fast, slow = (which.clipped_sum(model, losses, batch, how) for which in (clipless, oracle))
        torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-4, atol=1e-7)
        assert relative_error(fast, slow) <= 1e-4


@pytest.mark.parametrize("per_record", MODES.values(), ids=MODES)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_run_finds_no_fault_with_it(problem: Problem, per_record: bool) -> None:
    for records in (2, 7):
        assert self_checked(problem.model(), losses, problem.batch(records), records, per_record)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_the_generic_rule_is_not_needed(kind: type[nn.Module]) -> None:
    assert rule_of(kind(2, 2)) not in (None, generic)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "char-lstm"])
def test_a_non_finite_record_contributes_nothing_and_changes_nothing(name: str, bad: float) -> None:
    model = PROBLEMS[name].model()
    x, y = PROBLEMS[name].batch(4)
    clean = clipless.clipped_sum(model, losses, (x[1:], y[1:]), "auto-s")
    x[0, 0] = bad
    dirty = clipless.clipped_sum(model, losses, (x, y), "auto-s")
    torch.testing.assert_close(dirty.norms[:, 1:], clean.norms)
    for key, grad in dirty.grads.items():
        torch.testing.assert_close(grad, clean.grads[key], rtol=1e-5, atol=1e-6)


def test_a_double_precision_model_is_summed_in_double_precision() -> None:
    model = PROBLEMS["gru-deep-two-way"].model().double()
    x, y = PROBLEMS["gru-deep-two-way"].batch(5)
    fast, slow = (which.clipped_sum(model, losses, (x.double(), y), "auto-s") for which in (clipless, oracle))
    assert fast.grads["layer.weight_hh_l0"].dtype == torch.float64
    assert relative_error(fast, slow) < 1e-6


def test_keywords_in_any_order() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(3, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            start = x.new_ones(1, len(x), CLASSES)
            return self.layer(hx=start, input=x.transpose(0, 1))[1][0]

    model, batch = Keywords(), (torch.randn(5, 4, 3), torch.arange(5) % CLASSES)
    fast, slow = (which.clipped_sum(model, losses, batch, "abadi") for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-4


class Misread(nn.Module):
    """Hands its input to the layer as it is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)[0]
        return output if output.dim() == 2 else output.mean(1)


@pytest.mark.parametrize("shape", [(5, 4, 3), (5, 3)], ids=["positions-second", "no-positions"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_records_read_as_positions_are_refused(kind: type[nn.RNNBase], shape: tuple[int, ...]) -> None:
    """A layer that is not batch_first, given the batch first, carries state from one record to the next."""
    with pytest.raises(clipless.UnsupportedModule, match="'layer' .*its rows are not the records"):
        clipless.clipped_sum(Misread(kind(3, CLASSES)), losses, (torch.randn(shape), torch.arange(5) % CLASSES))


@pytest.mark.parametrize(
    ("shape", "dims", "out_dims", "message"),
    [
        ((5, 4, 3), (0,), (0, 0), "would mix them. .*batch_first=True"),
        ((5, 4, 3), (1,), (1, None), "would mix them. .*batch_first=True"),
        ((5, 3), (0,), (0, 0), "2-D input as one sequence.*batch_first=True"),
    ],
)
def test_the_rule_itself_refuses_them_too(
    shape: tuple[int, ...], dims: tuple[int, ...], out_dims: tuple[int, ...], message: str
) -> None:
    x = torch.randn(shape)
    use = Use(nn.GRU(3, 2), x, (x,), {}, dims, out_dims, ("weight_ih_l0",), records=5)
    with pytest.raises(clipless.UnsupportedModule, match=message):
        recurrent(use, (torch.zeros(5, 4, 2), torch.zeros(5, 1, 2)))


def test_a_cell_that_takes_its_input_for_one_record_is_refused() -> None:
    x = torch.randn(3)
    use = Use(nn.GRUCell(3, 2), x, (x,), {}, (0,), (0,), ("weight_ih",), records=3)
    with pytest.raises(clipless.UnsupportedModule, match="one row per record"):
        recurrent_cell(use, (torch.zeros(2),))


@pytest.mark.parametrize("two_way", [False, True], ids=["one way", "two ways"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_dropout_between_layers_draws_as_torch_does(kind: type[nn.RNNBase], two_way: bool) -> None:
    """The same output and the same gradients per record as torch's own kernel from the same random state."""
    torch.manual_seed(0)
    layer = kind(3, 4, num_layers=3, dropout=0.5, bidirectional=two_way, batch_first=True)
    model, x = nn.Sequential(layer), torch.randn(5, 6, 3)

    def drawn(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return model(x)[0].square().flatten(1).sum(1)

    fast = clipless.clipped_sum(model, drawn, x, clipless.abadi(groups="per-parameter", threshold=1e9))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        each = torch.stack([torch.autograd.grad(drawn(model, x)[b], parameter)[0] for b in range(5)])
        torch.testing.assert_close(fast.norms[number], each.flatten(1).norm(dim=1), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(fast.grads[name], each.sum(0), rtol=1e-4, atol=1e-5)
    assert self_checked(model, drawn, x, 5, per_record=True)


def test_dropout_between_layers_in_16_bits_is_refused() -> None:
    layer = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True).bfloat16()
    with pytest.raises(clipless.UnsupportedModule, match="put nn.Dropout between"):
        clipless.clipped_sum(layer, lambda m, x: m(x)[0].float().flatten(1).sum(1), torch.randn(5, 6, 3).bfloat16())

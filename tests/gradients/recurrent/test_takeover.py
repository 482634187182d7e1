"""Recurrent layers that are taken over while the hooks watches: same values, same gradients, computed once, nothing left."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import clipless
from clipless import oracle
from clipless.gradients.clipped_sum import engine_sum
from clipless.gradients.recurrent import compiled_lstm
from clipless.gradients.recurrent.takeover import Intercept, take_over
from clipless.preflight import relative_error
from compiling import loaded
from gradients.recurrent.test_recurrent import KINDS, PROBLEMS, Reader
from gradients.test_autocast import whole
from problems import CLASSES, losses

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

LAYERS = [name for name in PROBLEMS if "-cell" not in name]
SMOOTH = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class Inside(nn.Module):
    """A layer between linear ones, and what is done with its outputs."""

    def __init__(self, layer: nn.RNNBase, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.use = nn.Linear(3, layer.input_size), layer, use
        self.head = nn.Linear(layer.hidden_size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self.layer, self.first(x)))


def batch_of(records: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(records)
    return torch.randn(records, 6, 3), torch.arange(records) % CLASSES


def agree(model: nn.Module, batch: Any) -> bool:
    fast, slow = (which.clipped_sum(model, losses, batch) for which in (clipless, oracle))
    return relative_error(fast, slow) <= 1e-4


def private_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = len(batch[0])
    private = clipless.make_private(
        model,
        optimizer,
        TensorDataset(*batch),
        noise_multiplier=1.0,
        delta=1e-5,
        batch_size=records,
        steps=9,
        seed=0,
        loss_reduction="mean",
    )
    return private, optimizer


@pytest.mark.parametrize("name", LAYERS)
def test_values_are_those_of_the_kernel(name: str) -> None:
    """In double precision, where nothing hides: outputs, and with them the losses, within rounding."""
    model, (x, y) = PROBLEMS[name].model().double(), PROBLEMS[name].batch(5)
    x = x.double() if x.is_floating_point() else x
    plain, seen = model(x), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(model(batch[0]))
        return F.cross_entropy(seen[-1], batch[1], reduction="none")

    engine_sum(model, loss, (x, y), "auto-s", checked=False)
    torch.testing.assert_close(seen[-1].detach(), plain.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_in_double_precision(name: str) -> None:
    """Where nobody is clipped, so that no factor is rounded."""
    model, (x, y) = PROBLEMS[name].model().double(), PROBLEMS[name].batch(5)
    batch, how = (x.double() if x.is_floating_point() else x, y), clipless.abadi(1e6)
    fast, slow = (which.clipped_sum(model, losses, batch, how) for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-9


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_it_is_the_kernel_bit_for_bit(kind: str, training: bool) -> None:
    torch.manual_seed(0)
    model, batch = Reader(KINDS[kind](5, 4, num_layers=2, batch_first=True)).train(training), batch_of()
    with torch.no_grad():
        before = model(batch[0])
    private_of(model, batch)
    with torch.no_grad():
        assert torch.equal(model(batch[0]), before)


class Counting(TorchDispatchMode):
    """Counts the operations that torch runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_library", [True, False])
def test_the_kernel_is_not_run_and_every_position_is_computed_once(
    with_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers and six positions, with a trainable layer below: each position's gates get the state's share once, and are
    squashed once; on the way back no share goes beyond the first position. With the library none of it is torch's."""
    if not with_library:
        monkeypatch.setattr(compiled_lstm, "compiled", lambda: None)
    else:
        loaded(compiled_lstm)
    model, batch = Reader(nn.LSTM(5, 4, num_layers=2, batch_first=True)), batch_of()
    private, optimizer = private_of(model, batch)
    batches = iter(private.loader)
    for _ in range(3):  # the first learns the layout, and two check themselves
        x, y = next(batches)
        with Counting() as operations:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not any("rnn" in name or "lstm" in name for name in operations.counts)
    by_steps = 0 if with_library else 1
    assert operations.counts.get("addmm_", 0) == by_steps * (2 * 6 + 2 * 5)
    assert operations.counts.get("sigmoid_", 0) == operations.counts.get("sigmoid_backward", 0) == by_steps * 2 * 6


def in_place(layer: nn.Module, x: Tensor) -> Tensor:
    output, state = layer(x)
    output.mul_(2).relu_()
    h = state[0] if isinstance(state, tuple) else state
    h.tanh_()
    return output.mean(1) + h[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_may_be_changed_in_place(kind: str) -> None:
    """As the model's own layers do it; torch's own kernels allow it only without gradients, so the oracle gets copies, and
    a check, which runs these kernels, could not be passed."""

    def copied(layer: nn.Module, x: Tensor) -> Tensor:
        output, state = layer(x)
        h = state[0] if isinstance(state, tuple) else state
        return (output * 2).relu().mean(1) + h.tanh()[-1]

    torch.manual_seed(0)
    layer = KINDS[kind](5, 4, num_layers=2, batch_first=True)
    model, batch = Inside(layer, in_place), batch_of()
    fast = engine_sum(model, losses, batch, "auto-s", checked=False)
    model.use = copied
    assert relative_error(fast, oracle.clipped_sum(model, losses, batch)) <= 1e-4


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed(kind: str, reentrant: bool) -> None:
    """The oracle, which cannot go through reentrant checkpoints, is given the same model without any."""

    def plain(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)[0].mean(1)

    def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()  # reentrant checkpoints warn otherwise, even under no_grad
        result: Tensor = checkpoint(plain, layer, x, use_reentrant=reentrant)
        return result

    torch.manual_seed(0)
    model, batch = Inside(KINDS[kind](5, 4, num_layers=2, batch_first=True), checkpointed), batch_of()
    fast = clipless.clipped_sum(model, losses, batch)
    model.use = plain
    assert relative_error(fast, oracle.clipped_sum(model, losses, batch)) <= 1e-4


@pytest.mark.parametrize("learned", [(True, False), (False, True), (False, False)])
def test_states_of_which_some_have_gradients(learned: tuple[bool, bool]) -> None:
    def use(layer: nn.Module, x: Tensor) -> Tensor:
        states = [x.mean(1)[:, :4].unsqueeze(0).tanh() for _ in learned]
        h, c = (state if wants else state.detach() for state, wants in zip(states, learned, strict=True))
        return layer(x, (h.contiguous(), c.contiguous()))[0].mean(1)

    torch.manual_seed(0)
    assert agree(Inside(nn.LSTM(5, 4, batch_first=True), use), batch_of())


def test_only_a_state_has_a_gradient() -> None:
    def use(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.detach(), x.mean(1)[:, :4].unsqueeze(0).contiguous())[0].mean(1)

    torch.manual_seed(0)
    assert agree(Inside(nn.GRU(5, 4, batch_first=True), use), batch_of())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["autocast", "bfloat16"])
@pytest.mark.parametrize("kind", SMOOTH)
def test_lower_precision_is_left_to_the_kernel(kind: str, dtype: torch.dtype | None) -> None:
    """Not with ReLU, whose kink makes a jump of what was rounded."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            return F.cross_entropy(model(batch[0].to(dtype)), batch[1], reduction="none").float()

    torch.manual_seed(0)
    model, batch = Reader(SMOOTH[kind](5, 4, num_layers=2, batch_first=True)), batch_of()
    precise = whole(oracle.clipped_sum(model, losses, batch))
    fast, slow = (whole(which.clipped_sum(model.to(dtype), loss, batch)) for which in (clipless, oracle))
    assert float((fast - slow).norm()) <= max(2e-2 * float(slow.norm()), float((slow - precise).norm()))


@pytest.mark.parametrize("kind", SMOOTH)
def test_a_second_backward_is_refused(kind: str) -> None:
    model, batch = Reader(SMOOTH[kind](5, 4, batch_first=True)), batch_of()
    private, _ = private_of(model, batch)
    x, y = next(iter(private.loader))
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(clipless.Misuse, match="a second backward"):
        loss.backward()


def test_an_output_taken_by_an_earlier_hook_has_its_gradient() -> None:
    """A penalty on activations, collected by a hook that was there before make_private."""
    seen: list[Tensor] = []
    model, batch = Reader(nn.GRU(5, 4, batch_first=True)), batch_of()
    model.layer.register_forward_hook(lambda module, args, output: seen.append(output[0]))

    def losses(model: nn.Module, batch: Any) -> Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses + seen[-1].square().flatten(1).sum(1)

    ours = clipless.clipped_sum(model, losses, batch, clipping="abadi")
    theirs = clipless.oracle.clipped_sum(model, losses, batch, clipping="abadi")
    for name, grad in ours.grads.items():
        torch.testing.assert_close(grad, theirs.grads[name])


def intact(layer: nn.RNNBase) -> bool:
    names = layer._flat_weights_names
    return all(weight is getattr(layer, name) for weight, name in zip(layer._flat_weights, names, strict=True))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_weights_are_put_back_after_an_interruption(error: type[BaseException]) -> None:
    trouble: list[type[BaseException]] = []

    def permuted(hx: Any, permutation: Any) -> Any:
        for kind in trouble:
            raise kind
        return hx

    model, batch = Reader(nn.LSTM(5, 4, batch_first=True)), batch_of()
    private, optimizer = private_of(model, batch)
    model.layer.permute_hidden = permuted  # called inside the layer's forward
    x, y = next(iter(private.loader))
    F.cross_entropy(model(x), y).backward()
    assert intact(model.layer)
    optimizer.step()
    x, y = next(iter(private.loader))
    trouble.append(error)
    with pytest.raises(error):
        model(x)
    twin = copy.deepcopy(model.layer)  # torch calls no hooks after a KeyboardInterrupt
    assert not any(isinstance(weight, Intercept) for weight in twin._flat_weights)
    trouble.clear()
    F.cross_entropy(model(x), y).backward()
    assert intact(model.layer)


def test_a_takeover_within_a_takeover_puts_the_weight_back() -> None:
    layer = nn.GRU(3, 2)
    outer = take_over(layer)
    inner = take_over(layer)
    for takeover in (inner, outer, inner):
        assert takeover is not None
        takeover.end()
        assert intact(layer)
    assert take_over(nn.Linear(2, 2)) is None


def test_errors_are_those_of_torch() -> None:
    def use(layer: nn.Module, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
        return layer(packed, x.new_zeros(1, 1, 4))[1][0]

    model, batch = Inside(nn.GRU(5, 4), use), batch_of()
    private, _ = private_of(model, batch)
    with torch.no_grad(), pytest.raises(RuntimeError) as plain:
        model(batch[0])
    with pytest.raises(RuntimeError) as ours:
        model(next(iter(private.loader))[0])
    assert type(plain.value) is type(ours.value)


class TwiceOver(nn.LSTM):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(super().forward(x)[0])[0].mean(1)


def test_a_subclass_that_computes_otherwise_is_not_taken_over() -> None:
    torch.manual_seed(0)
    assert agree(Inside(TwiceOver(4, 4, batch_first=True), lambda layer, x: layer(x)), batch_of())


def test_nothing_is_kept_when_the_step_is_over() -> None:
    """Without the garbage collector: what the layer kept goes away with the graph."""
    width = 37
    model, batch = Reader(nn.LSTM(5, width, batch_first=True)), batch_of()
    private, _ = private_of(model, batch)

    def gates() -> list[Tensor]:
        tensors = [value for value in gc.get_objects() if type(value) in (Tensor, nn.Parameter)]
        return [tensor for tensor in tensors if tensor.dim() == 3 and 4 * width in tensor.shape]

    gc.collect()
    gc.disable()
    try:
        others = gates()  # what failed or cached tests of this process still hold
        x, y = next(iter(private.loader))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        del loss
        left = [tensor.shape for tensor in gates() if not any(tensor is other for other in others)]
    finally:
        gc.enable()
    assert left == []

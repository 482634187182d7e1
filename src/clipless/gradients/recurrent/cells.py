"""The maths of recurrent cells: one time step forward, in place in buffers for all steps, and backward.

Index legend: b record, i in, h hidden (after the projection, if there is one), o hidden before it, g gates times hidden.
If only the first n records have a time step, all tensors here are the first n rows of the buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clipless.gradients.recurrent.matrix_products import add_product

Recurrent = nn.RNNBase | nn.RNNCellBase


class Weights(NamedTuple):
    """The parameters of one layer in one direction."""

    ih: Tensor  # [g,i]
    hh: Tensor  # [g,h]
    bias_ih: Tensor | None  # [g]
    bias_hh: Tensor | None  # [g]
    hr: Tensor | None  # [h,o]


class TimeStep(NamedTuple):
    """One time step: the states before and after it, its gates, and what else the cell saves."""

    gates: Tensor  # [b,g]
    extra: Tensor | None  # [b,o]
    h: Tensor  # [b,h]
    c: Tensor | None  # [b,o]
    new_h: Tensor  # [b,o]
    new_c: Tensor | None  # [b,o]


class StepGradients(NamedTuple):
    """Gradients at one time step. On entry `h` and `c` are the gradients of the states after it. On return `c` is the
    gradient of the state before it, and `h` the part of that which bypasses the gates, if the cell has one."""

    hidden_gates: Tensor  # [b,g], written by a cell in which the hidden state's part of the gates has its own gradient
    h: Tensor  # [b,o]
    c: Tensor | None  # [b,o]


@dataclass(frozen=True)
class Cell:
    """`step` computes the new state from the input's part of the gates, W_ih x + biases; `back` turns the gates into their
    gradients. Both work in place.

    `extra` and `cell_state`: whether the cell has these. `own_hidden_part`: whether the gradients of the hidden state's part
    of the gates differ from those of the input's part. `carries`: whether the state also reaches the next one without
    passing the gates. `doubled`: the number of the gate whose input `step` takes times two, if there is one.
    """

    step: Callable[[Weights, TimeStep], None]
    back: Callable[[TimeStep, StepGradients], None]
    extra: bool = False
    cell_state: bool = False
    own_hidden_part: bool = False
    carries: bool = False
    doubled: int | None = None

    def prepared(self, weights: Weights) -> Weights:
        """The weights for `step`, and for computing the input's part of the gates."""
        if self.doubled is None:
            return weights
        width = weights.hh.shape[0] // 4
        factors = torch.ones_like(weights.hh[:, :1])
        factors[self.doubled * width : (self.doubled + 1) * width] = 2
        bias_ih, bias_hh = (b if b is None else b * factors[:, 0] for b in (weights.bias_ih, weights.bias_hh))
        return Weights(weights.ih * factors, weights.hh * factors, bias_ih, bias_hh, weights.hr)

    def input_bias(self, weights: Weights) -> Tensor | None:
        """The bias of the input's part of the gates, for all time steps."""
        if weights.bias_ih is None or weights.bias_hh is None:
            return None
        if not self.own_hidden_part:
            return weights.bias_ih + weights.bias_hh
        split = 2 * weights.hh.shape[1]
        return torch.cat([weights.bias_ih[:split] + weights.bias_hh[:split], weights.bias_ih[split:]])


def _tanh_step(weights: Weights, at: TimeStep) -> None:
    """h' = tanh(W_ih x + b_ih + W_hh h + b_hh); on entry `gates` has all but W_hh h."""
    torch.tanh(add_product(at.gates, at.h, weights.hh.t()), out=at.new_h)


def _tanh_back(at: TimeStep, grads_at: StepGradients) -> None:
    _tanh_backward(grads_at.h, at.new_h, grad_input=at.gates)


def _relu_step(weights: Weights, at: TimeStep) -> None:
    """h' = max(0, W_ih x + b_ih + W_hh h + b_hh)."""
    torch.clamp(add_product(at.gates, at.h, weights.hh.t()), min=0, out=at.new_h)


def _relu_back(at: TimeStep, grads_at: StepGradients) -> None:
    _threshold_backward(grads_at.h, at.new_h, 0, grad_input=at.gates)


def _lstm_step(weights: Weights, at: TimeStep) -> None:
    """i, f, o = σ(·), g = tanh(·) of W_ih x + b_ih + W_hh h + b_hh; c' = f∘c + i∘g; h' = o∘tanh(c').

    `extra` is tanh c'. For g the gate holds (g + 1)/2, since tanh x = 2σ(2x) - 1: one call serves all four gates.
    """
    assert at.c is not None
    assert at.new_c is not None
    assert at.extra is not None
    add_product(at.gates, at.h, weights.hh.t()).sigmoid_()
    write, forget, half, show = at.gates.chunk(4, 1)
    torch.mul(forget, at.c, out=at.new_c).addcmul_(write, half, value=2).sub_(write)
    torch.tanh(at.new_c, out=at.extra)
    torch.mul(show, at.extra, out=at.new_h)


def _lstm_back(at: TimeStep, grads_at: StepGradients) -> None:
    assert at.c is not None
    assert at.extra is not None
    assert grads_at.c is not None
    write, forget, half, show = at.gates.chunk(4, 1)
    of_shown = grads_at.h * show
    grads_at.c.add_(_tanh_backward(of_shown, at.extra, grad_input=of_shown))
    of_gates = torch.empty_like(at.gates)
    of_write, of_forget, of_value, of_show = of_gates.chunk(4, 1)
    torch.addcmul(grads_at.c, grads_at.c, half, value=-2, out=of_write).neg_()
    torch.mul(grads_at.c, at.c, out=of_forget)
    torch.mul(grads_at.c, write, out=of_value).mul_(4)
    torch.mul(grads_at.h, at.extra, out=of_show)
    grads_at.c.mul_(forget)
    _sigmoid_backward(of_gates, at.gates, grad_input=at.gates)


def _gru_step(weights: Weights, at: TimeStep) -> None:
    """r, z = σ(W_ih x + b_ih + W_hh h + b_hh); n = tanh(W_in x + b_in + r∘(W_hn h + b_hn)); h' = (1 - z)∘n + z∘h.

    `extra` is W_hn h + b_hn, which the reset gate multiplies.
    """
    assert at.extra is not None
    reset, update, value = at.gates.chunk(3, 1)
    split = 2 * reset.shape[1]
    add_product(at.gates[:, :split], at.h, weights.hh[:split].t()).sigmoid_()
    if weights.bias_hh is None:
        torch.mm(at.h, weights.hh[split:].t(), out=at.extra)
    else:
        torch.addmm(weights.bias_hh[split:], at.h, weights.hh[split:].t(), out=at.extra)
    value.addcmul_(reset, at.extra)
    _tanh_of_block(value)
    torch.lerp(value, at.h, update, out=at.new_h)


def _gru_back(at: TimeStep, grads_at: StepGradients) -> None:
    assert at.extra is not None
    reset, update, value = at.gates.chunk(3, 1)
    split = 2 * reset.shape[1]
    of_update = (at.h - value).mul_(grads_at.h)
    of_new = torch.addcmul(grads_at.h, grads_at.h, update, value=-1)
    grads_at.h.mul_(update)
    _tanh_backward(of_new, value, grad_input=value)
    torch.mul(value, reset, out=grads_at.hidden_gates[:, split:])
    reset_and_update = at.gates[:, :split]
    _sigmoid_backward(torch.cat([value * at.extra, of_update], 1), reset_and_update, grad_input=reset_and_update)
    grads_at.hidden_gates[:, :split] = reset_and_update


def _tanh_of_block(block: Tensor) -> None:
    """tanh in place, through a copy: torch uses several threads only on contiguous memory."""
    block.copy_(block.contiguous().tanh_())


_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_threshold_backward = torch.ops.aten.threshold_backward.grad_input

CELLS = {
    "rnn_tanh": Cell(_tanh_step, _tanh_back),
    "rnn_relu": Cell(_relu_step, _relu_back),
    "lstm": Cell(_lstm_step, _lstm_back, extra=True, cell_state=True, doubled=2),
    "gru": Cell(_gru_step, _gru_back, extra=True, own_hidden_part=True, carries=True),
}


def cell_of(module: Recurrent) -> Cell:
    """The cell of a recurrent layer, or of a module that is one cell."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return CELLS["lstm"]
    if isinstance(module, nn.GRU | nn.GRUCell):
        return CELLS["gru"]
    assert isinstance(module, nn.RNN | nn.RNNCell)
    return CELLS[f"rnn_{module.nonlinearity}"]

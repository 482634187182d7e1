"""Layer rules, one file per kind of layer: from a module's input and the gradient of its output to pieces.

A rule is a pure function `(use, grad_output) -> {parameter's own name: Piece}`. A module without a rule of its own is
handled by the generic one, which works for any module.
"""

from clipless.grads.rules.bilinear import bilinear
from clipless.grads.rules.conv import conv
from clipless.grads.rules.conv_transpose import conv_transpose
from clipless.grads.rules.embedding import embedding, embedding_bag
from clipless.grads.rules.generic import generic
from clipless.grads.rules.linear import linear, linear_transposed
from clipless.grads.rules.norm import group_norm, instance_norm, layer_norm, rms_norm
from clipless.grads.rules.prelu import prelu
from clipless.grads.rules.recurrent import recurrent, recurrent_cell
from clipless.grads.rules.use import LayerRule, Use, rule_of

__all__ = [
    "LayerRule",
    "Use",
    "bilinear",
    "conv",
    "conv_transpose",
    "embedding",
    "embedding_bag",
    "generic",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "linear_transposed",
    "prelu",
    "recurrent",
    "recurrent_cell",
    "rms_norm",
    "rule_of",
]

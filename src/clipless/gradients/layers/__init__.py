"""Layer rules, one file per kind of layer: from a module's input and the gradient of its output to forms.

A rule is a pure function `(use, grad_output) -> {parameter's own name: Form}`. A module without a rule of its own is
handled by the generic one, which works for any module.
"""

from clipless.gradients.layers.bilinear import bilinear
from clipless.gradients.layers.conv import conv
from clipless.gradients.layers.conv_transpose import conv_transpose
from clipless.gradients.layers.embedding import embedding, embedding_bag
from clipless.gradients.layers.generic import generic
from clipless.gradients.layers.linear import linear, linear_transposed
from clipless.gradients.layers.norm import group_norm, instance_norm, layer_norm, rms_norm
from clipless.gradients.layers.prelu import prelu
from clipless.gradients.layers.rule import LayerRule, Use, rule_of

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
    "rms_norm",
    "rule_of",
]

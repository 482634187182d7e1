"""Layer rules, one file per kind of layer: from a module's input and the gradient of its output to pieces.

A rule is a pure function `(use, grad_output) -> {parameter's own name: Piece}`. A module without a rule of its own is
handled by the generic one, which works for any module.
"""

from clipless.grads.rules.conv import conv
from clipless.grads.rules.embedding import embedding
from clipless.grads.rules.generic import generic
from clipless.grads.rules.linear import linear
from clipless.grads.rules.norm import group_norm, layer_norm
from clipless.grads.rules.use import LayerRule, Use, rule_of

__all__ = ["LayerRule", "Use", "conv", "embedding", "generic", "group_norm", "layer_norm", "linear", "rule_of"]

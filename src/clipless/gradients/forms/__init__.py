"""Forms: the per-sample gradients of one parameter, in the form that is cheapest to hold."""

from clipless.gradients.forms.combine import combine
from clipless.gradients.forms.dense import (
    Addend,
    Instantiated,
    OuterProducts,
    add_all,
    can_wait,
    kept,
    product_methods,
    scaled,
    sq_norm,
    squares_of,
    weighted_sum,
)
from clipless.gradients.forms.form import Cost, Form, NoChoice
from clipless.gradients.forms.rearranged import Rearranged
from clipless.gradients.forms.routed import Routed, by_record
from clipless.gradients.forms.scattered import Scattered
from clipless.gradients.forms.stacked import Stacked, transposed
from clipless.gradients.forms.standardised import Products, Scales, Standardisation, Standardised, can_be_scaled
from clipless.gradients.forms.tied import Tied
from clipless.native.by_torch import widest

__all__ = [
    "Addend",
    "Cost",
    "Form",
    "Instantiated",
    "NoChoice",
    "OuterProducts",
    "Products",
    "Rearranged",
    "Routed",
    "Scales",
    "Scattered",
    "Stacked",
    "Standardisation",
    "Standardised",
    "Tied",
    "add_all",
    "by_record",
    "can_be_scaled",
    "can_wait",
    "combine",
    "kept",
    "product_methods",
    "scaled",
    "sq_norm",
    "squares_of",
    "transposed",
    "weighted_sum",
    "widest",
]

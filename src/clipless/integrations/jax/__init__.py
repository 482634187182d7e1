"""Private training in JAX: per-example gradients in, noised gradients out, as an optax transformation.

Needs the extra `jax`. Plan, ledger, sampling and noise are those of `clipless.make_private`, and so are the numbers.
"""

from clipless.errors import MissingLibrary

try:
    import jax
    import optax
except ImportError as error:
    raise MissingLibrary(
        f"{error.name} is missing, and clipless.integrations.jax needs it: pip install 'clipless[jax]'."
    ) from error

from clipless.integrations.jax.host import noised, observed
from clipless.integrations.jax.private import PrivateGradients, PrivateState, make_private
from clipless.integrations.jax.rules import FACTORS, factors, register_rule
from clipless.integrations.jax.sums import ClippedPytree, clipped_sum, per_example

__all__ = [
    "FACTORS",
    "ClippedPytree",
    "PrivateGradients",
    "PrivateState",
    "clipped_sum",
    "factors",
    "make_private",
    "noised",
    "observed",
    "per_example",
    "register_rule",
]

del jax, optax

"""The clipping rules as JAX functions: norms [G,B] and thresholds [G,1] to factors [G,B], traceable by jit.

Each has the promise of the rule that it is registered for: `factor * norm <= threshold`, and a norm that is not finite gets
factor 0. Norms are in at least float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipless.clipping import LOWERED, OURS, Abadi, AutoS, AutoV, ByGroup, Global, Rule
from clipless.errors import InvalidType

JaxRule = Callable[[Any, jax.Array, jax.Array], jax.Array]

FACTORS: dict[type, JaxRule] = {}


def register_rule(rule: type) -> Callable[[JaxRule], JaxRule]:
    """Register the JAX form of a rule's class: a function of the rule, norms and thresholds."""

    def register(function: JaxRule) -> JaxRule:
        FACTORS[rule] = function
        return function

    return register


def factors(rule: Rule, norms: jax.Array, thresholds: jax.Array) -> jax.Array:
    """How much of each record enters the sums, [G,B]: at most threshold / norm, whatever rule is registered.

    >>> factors(AutoS(0.01), jnp.array([[0.0, 0.99]]), jnp.array([[1.0]])).round(4).tolist()
    [[100.0, 1.0]]
    """
    found = form_of(rule)(rule, norms, thresholds)
    if type(rule) in OURS or type(rule) is ByGroup:
        return found
    most = jnp.where(_usable(norms), _lowered(thresholds / norms), 0.0)
    return jnp.where(found > 0, jnp.minimum(found, most), 0.0)  # 0 for NaN


def form_of(rule: Rule) -> JaxRule:
    """The JAX form of a rule; raises if none is registered for its class."""
    found = FACTORS.get(type(rule))
    if found is None:
        raise InvalidType(
            f"the clipping rule {rule!r} has no JAX form: register a function of (rule, norms, thresholds) for its class "
            "with clipless.integrations.jax.register_rule, or take one of "
            f"{', '.join(sorted(kind.__name__ for kind in FACTORS))}."
        )
    return found


@register_rule(Abadi)
def _abadi(rule: Abadi, norms: jax.Array, thresholds: jax.Array) -> jax.Array:
    return jnp.where(_usable(norms), jnp.where(norms <= thresholds, 1.0, _lowered(thresholds / norms)), 0.0)


@register_rule(AutoV)
def _auto_v(rule: AutoV, norms: jax.Array, thresholds: jax.Array) -> jax.Array:
    found = _lowered(thresholds / norms)
    return jnp.where(_usable(norms) & jnp.isfinite(found), found, 0.0)


@register_rule(AutoS)
def _auto_s(rule: AutoS, norms: jax.Array, thresholds: jax.Array) -> jax.Array:
    found = _lowered(thresholds / (norms + rule.gamma))  # 0 for an infinite norm
    return jnp.where(jnp.isfinite(found), found, 0.0)


@register_rule(Global)
def _global(rule: Global, norms: jax.Array, thresholds: jax.Array) -> jax.Array:
    kept = _lowered(jnp.full_like(norms, 1.0 / rule.ratio))
    return jnp.where((norms <= rule.ratio * thresholds) & jnp.isfinite(kept), kept, 0.0)


@register_rule(ByGroup)
def _by_group(rule: ByGroup, norms: jax.Array, thresholds: jax.Array) -> jax.Array:
    rows = [factors(own, norms[g : g + 1], thresholds[g : g + 1]) for g, own in enumerate(rule.rules)]
    return jnp.concatenate(rows)


def _lowered(found: jax.Array) -> jax.Array:
    """As in `clipless.clipping`."""
    lowered = found * LOWERED
    return jnp.where(lowered <= jnp.finfo(found.dtype).tiny, 0.0, lowered)


def _usable(norms: jax.Array) -> jax.Array:
    return jnp.isfinite(norms) & (norms > 0)

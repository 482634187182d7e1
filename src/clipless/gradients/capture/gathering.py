"""Sharded models in the forward pass: all processes gather the model where any of them has to run it on its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from clipless.gradients.capture.hooks import Hooks
from clipless.gradients.capture.model_map import ModelMap
from clipless.gradients.shards import Shards


@contextmanager
def gathered(shards: Shards, hooks: Hooks, model: ModelMap, wanted: bool) -> Iterator[None]:
    """Inside, the model is gathered on every process if it is `wanted` on any, and stays so. What is done inside then
    succeeds on all processes or raises on all. Gradients must not bypass the taps at the gathered parameters either."""
    if not shards.gather_if(wanted):
        yield
        return
    hooks.watch(model.live)
    with shards.together("a forward pass"):
        yield

"""The type of the callbacks to which long work reports its progress."""

from collections.abc import Callable

# What is being done, how much is done, and of how much.
OnProgress = Callable[[str, float, float], None]

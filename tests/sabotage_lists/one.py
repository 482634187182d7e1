"""What a sabotage is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sabotage:
    """A change of the source that breaks a promise: in `file`, below src/clipless, the text `old`, which occurs there once,
    becomes `new`. At least one of `tests`, as pytest names them, must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

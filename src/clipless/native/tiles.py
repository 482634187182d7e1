"""How many numbers the compiled products take at a time, as in tile.h."""

LANES, ROWS = 16, 8
PANEL = 2 * LANES


def whole(count: int, step: int) -> int:
    """The next multiple of `step`.

    >>> whole(33, 16)
    48
    """
    return -(-count // step) * step

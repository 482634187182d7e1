"""Line charts as SVG text: no scripts, no fonts, no colours of their own, so that the page's style decides them."""

import math
from collections.abc import Callable, Sequence
from html import escape

from clipless.app.charts.drawing import Chart, number

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 38
SERIES = 7
Scale = Callable[[float], float]


def svg(chart: Chart, series: Sequence[int]) -> str:
    """The chart; each curve has the class s0, s1, and so on of its series. One without a point to show has axes only."""
    shown = chart.finite()
    x_values = [x for line in shown.lines for x in line.x]
    y_values = [y for line in shown.lines for y in line.y]
    x, x_ticks = _scale(x_values, LEFT, WIDTH - RIGHT, logarithmic=False)
    y, y_ticks = _scale(y_values, HEIGHT - BOTTOM, TOP, logarithmic=chart.log_y)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        f"<title>{escape(chart.title)}</title>",
        *(_tick(x(at), HEIGHT - BOTTOM, x(at), TOP, number(at), "middle", 0, 14) for at in x_ticks),
        *(_tick(LEFT, y(at), WIDTH - RIGHT, y(at), number(at), "end", -5, 4) for at in y_ticks),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x_label)}</text>',
        f'<text transform="translate(11 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>",
    ]
    for place, line in zip(series, shown.lines, strict=True):
        parts += _curve(place, [(x(a), y(b)) for a, b in zip(line.x, line.y, strict=True)])
    return "".join([*parts, "</svg>"])


def series_class(place: int) -> str:
    """The class of a curve, by which the style gives it a colour and dashes."""
    return f"s{place % SERIES}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two bounds, at most this many.

    >>> ticks(0.0, 36.0), ticks(0.2, 0.93)
    ([0.0, 10.0, 20.0, 30.0], [0.2, 0.4, 0.6, 0.8])
    """
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{step * place:.12g}") for place in range(first, last + 1)]


def _scale(values: Sequence[float], start: float, end: float, *, logarithmic: bool) -> tuple[Scale, list[float]]:
    """From a value to a place, and the ticks. A single value is in the middle."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if logarithmic:
        exponents, places = _scale([math.log10(value) for value in values], start, end, logarithmic=False)
        whole = [at for at in places if at == int(at)] or [round(at, 1) for at in places]
        return (lambda value: exponents(math.log10(value))), [float(f"{10**at:.2g}") for at in whole]
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) / 2 or 0.5
        low, high = low - margin, high + margin
    return (lambda value: start + (value - low) / (high - low) * (end - start)), ticks(low, high)


def _tick(x1: float, y1: float, x2: float, y2: float, text: str, anchor: str, dx: float, dy: float) -> str:
    line = f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
    return f'{line}<text x="{x1 + dx:.1f}" y="{y1 + dy:.1f}" text-anchor="{anchor}">{text}</text>'


def _curve(place: int, points: Sequence[tuple[float, float]]) -> list[str]:
    """The line, and a dot at each point while they are few."""
    name = series_class(place)
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dots = (
        [f'<circle class="{name}" cx="{a:.1f}" cy="{b:.1f}" r="2.2"/>' for a, b in points] if len(points) <= 40 else []
    )
    return [f'<polyline class="{name}" points="{path}"/>', *dots]

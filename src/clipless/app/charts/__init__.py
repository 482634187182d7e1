"""Charts, and the curves of a privacy budget."""

from clipless.app.charts.drawing import Chart, Line, bars, figure, lines, save

__all__ = ["Chart", "Line", "bars", "figure", "lines", "save"]

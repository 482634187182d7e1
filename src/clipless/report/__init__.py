"""What is drawn: the data of curves, and charts of them."""

from clipless.report.charts import Chart, Line, bars, figure, lines, save

__all__ = ["Chart", "Line", "bars", "figure", "lines", "save"]

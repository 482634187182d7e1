"""Charts as drawn: what matplotlib was told, and the files."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from clipless.accounting import ACCOUNTANTS, epsilon, noise_multiplier
from clipless.accounting.selection import METHODS, total
from clipless.app.charts import Chart, Line, bars, figure, lines, save
from clipless.app.charts.budget import Budget, cost_of_tuning, curves, epsilon_by_steps, noise_by_epsilon
from clipless.app.charts.drawing import COLOURS, MARKERS, SUFFIXES
from clipless.errors import CliplessError, InvalidArgument

RUN = Budget(noise_multiplier=1.2, sample_rate=0.02, steps=400, delta=1e-5)
SIMPLE = Chart(
    "A title",
    "steps",
    "ε",
    (Line("one", (1.0, 2.0), (3.0, 4.0)), Line("other", (1.0, 2.0), (1.0, math.inf), approximate=True)),
    point=(2.0, 4.0, "here"),
    level=(0.5, "least"),
)


def drawn(chart):
    picture, (axes,) = figure()
    lines(axes, chart)
    return picture, axes


def test_a_chart_says_what_it_shows():
    _, axes = drawn(SIMPLE)
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("A title", "steps", "ε")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "other", "least", "here"]
    one, other = axes.get_lines()[:2]
    assert list(one.get_xdata()) == [1.0, 2.0]
    assert list(one.get_ydata()) == [3.0, 4.0]
    assert list(other.get_ydata()) == [1.0], "what is infinite has no place on an axis"
    assert (one.get_linestyle(), other.get_linestyle()) == ("-", "--")


def test_curves_differ_in_colour_and_in_print():
    many = Chart("", "", "", tuple(Line(str(k), (0.0, 1.0), (0.0, float(k))) for k in range(len(COLOURS))))
    _, axes = drawn(many)
    assert len({line.get_color() for line in axes.get_lines()}) == len(COLOURS)
    assert len({line.get_marker() for line in axes.get_lines()}) == len(COLOURS) == len(MARKERS)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_of_every_kind(suffix, tmp_path):
    written = save(drawn(SIMPLE)[0], tmp_path / "new" / f"chart{suffix}")
    start = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix]
    assert written.read_bytes().startswith(start)


def test_the_same_chart_is_the_same_file(tmp_path):
    first, second = (save(drawn(SIMPLE)[0], tmp_path / f"{name}.svg").read_bytes() for name in "ab")
    assert first == second


def test_a_file_that_is_no_picture_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"end its name in \.svg"):
        save(drawn(SIMPLE)[0], tmp_path / "chart.jpg")
    assert not list(tmp_path.iterdir())


def test_bars_stand_side_by_side_and_carry_their_number(tmp_path):
    picture, (axes,) = figure()
    bars(axes, "Time", "ratio", ["mlp", "cnn"], {"plain": [1.0, 1.0], "ghost": [1.25, None]})
    found = [(round(bar.get_x() + bar.get_width() / 2, 3), bar.get_height()) for bar in axes.patches]
    assert found == [(-0.2, 1.0), (0.8, 1.0), (0.2, 1.25)]
    assert [text.get_text() for text in axes.texts] == ["1", "1", "1.25"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["mlp", "cnn"]
    save(picture, tmp_path / "bars.png")


def test_matplotlib_is_loaded_only_to_draw_and_the_extra_is_named_without_it():
    script = (
        "import sys, clipless.app.charts.budget\n"
        "assert 'matplotlib' not in sys.modules\n"
        "sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None\n"
        "clipless.app.charts.figure()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'clipless[figures]'" in done.stderr


def test_epsilon_by_steps():
    chart = epsilon_by_steps(RUN)
    assert [line.label.split()[0] for line in chart.lines] == list(ACCOUNTANTS)
    for line, name in zip(chart.lines, ACCOUNTANTS, strict=True):
        assert len(line.x) == 16
        assert line.x[-1] == RUN.steps
        assert line.y[-1] == epsilon(1.2, 0.02, 400, 1e-5, name)
        assert list(line.y) == sorted(line.y)
    assert chart.point == (400.0, RUN.epsilon, "this run, by pld")


def test_noise_by_epsilon():
    chart = noise_by_epsilon(RUN)
    for line, name in zip(chart.lines, ACCOUNTANTS, strict=True):
        assert line.y[5] == noise_multiplier(line.x[5], 1e-5, 0.02, 400, name)
        assert list(line.y) == sorted(line.y, reverse=True)


def test_the_approximation_is_marked():
    for chart in (epsilon_by_steps(RUN), noise_by_epsilon(RUN)):
        for line in chart.lines:
            assert line.approximate == ("gdp" in line.label) == ("approximation" in line.label)


@pytest.mark.parametrize("accountant", ["pld", "gdp"])
def test_cost_of_tuning(accountant):
    """Choosing is priced by a guarantee, whatever was asked for."""
    chart = cost_of_tuning(Budget(1.2, 0.02, 400, 1e-5, accountant))
    assert [line.label.split()[0] for line in chart.lines] == list(METHODS)
    for line, method in zip(chart.lines, METHODS, strict=True):
        assert line.y[3] == total(method, 1.2, 1e-5, 8, 0.02, 400, "pld")
        assert list(line.y) == sorted(line.y)
        assert line.y[0] >= chart.level[0]
    assert chart.level[0] == epsilon(1.2, 0.02, 400, 1e-5, "pld")


def test_progress_counts_every_number():
    calls = []
    curves(Budget(2.0, 0.1, 7, 1e-5), lambda: calls.append(1))
    assert len(calls) == sum(Budget(2.0, 0.1, 7, 1e-5).points().values())


def test_what_cannot_be_drawn_is_refused_by_clipless():
    with pytest.raises(CliplessError):
        save(drawn(SIMPLE)[0], Path("nothing"))

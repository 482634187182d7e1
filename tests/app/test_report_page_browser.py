"""The page of `clipless report --html` in a real browser: no error, no scrolling sideways on a phone, figures to be seen,
links that lead somewhere, light and dark."""

import html
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clipless.app.cli import app

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "screenshots.py"))
pytestmark = pytest.mark.skipif(SCRIPT["browser"]() is None, reason="there is no browser: apt-get install chromium")

# Run in the page around the frame, once everything is loaded: what a reader would see of the report.
LOOK = """<script>addEventListener("load", () => {
  const view = document.querySelector("iframe").contentWindow, page = view.document;
  const seen = element => { const box = element.getBoundingClientRect(); return box.width > 20 && box.height > 5; };
  const links = [...page.querySelectorAll("a")].map(link => {
    link.click();
    const target = page.querySelector(view.location.hash || "none");
    return target !== null && Math.abs(target.getBoundingClientRect().top) < view.innerHeight;
  });
  const found = {
    width: view.innerWidth,
    sideways: page.documentElement.scrollWidth - view.innerWidth,
    wide: [...page.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > view.innerWidth + 1).length,
    figures: [...page.querySelectorAll("figure svg")].filter(seen).length,
    curves: [...page.querySelectorAll("figure > svg polyline")].map(each => view.getComputedStyle(each).stroke),
    background: view.getComputedStyle(page.body).backgroundColor,
    ink: view.getComputedStyle(page.body).color,
    links: links,
  };
  document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
})</script>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = {"auto": [], "a-run-with-quite-a-long-name-that-has-no-space": ["--clipping", "dc-p"]}
    runs["plain"] = ["--clipping", "none"]
    for name, extra in runs.items():
        arguments = ["train", "--model", "linear", "--epochs", "2", "--accountant", "rdp", "--out", str(folder / name)]
        assert CliRunner().invoke(app, [*arguments, *extra, "--json"], catch_exceptions=False).exit_code == 0
    command = ["report", *(str(folder / name) for name in runs), "--html", str(folder / "report.html"), "--json"]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    return folder / "report.html"


def look(page: Path, width: int, *, dark: bool = False) -> dict[str, Any]:
    """What the script sees in a frame of this width, and what the browser complains about."""
    done = SCRIPT["browse"](SCRIPT["framed"](page, width, 800, LOOK), "--dump-dom", dark=dark)
    (found,) = re.findall(r"<pre>(.*?)</pre>", done.stdout)
    return json.loads(html.unescape(found)) | {"errors": re.findall(r".*CONSOLE.*", done.stderr)}


@pytest.mark.parametrize("width", [380, 1200])
def test_the_report_can_be_read(report: Path, width: int) -> None:
    found = look(report, width)
    assert found["errors"] == []
    assert (found["width"], found["sideways"], found["wide"]) == (width, 0, 0)
    assert found["figures"] >= 4
    assert found["curves"]
    assert "none" not in found["curves"]
    assert len(found["links"]) >= 6
    assert all(found["links"])


def test_it_follows_the_choice_of_dark(report: Path) -> None:
    light, dark = look(report, 800), look(report, 800, dark=True)
    assert (light["background"], light["ink"]) == ("rgb(255, 255, 255)", "rgb(27, 31, 36)")
    assert (dark["background"], dark["ink"]) == ("rgb(13, 17, 23)", "rgb(230, 237, 243)")


def test_the_test_sees_a_page_that_is_broken(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    broken = report.with_name("broken.html")
    parts = '<script>undefined_function()</script><p style="width: 900px">wide</p><a href="#nowhere">x</a></main>'
    broken.write_text(text.replace("</main>", parts), encoding="utf-8")
    found = look(broken, 380)
    assert any("undefined_function" in line for line in found["errors"])
    assert found["sideways"] > 0
    assert not all(found["links"])

"""The page in a real browser: it fits a phone, its figures are visible, nothing is reported on the console."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from clipless.app.report import read_run
from clipless.app.report_page.page import page

CHROMIUM = shutil.which("chromium")
PROBE = """<script>
addEventListener("error", event => document.title += " error: " + event.message);
addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const figures = [...document.querySelectorAll("figure > svg")].map(one => one.getBoundingClientRect());
  const seen = figures.filter(box => box.width > 200 && box.height > 100).length;
  const dead = [...document.querySelectorAll("a")].filter(a => !document.querySelector(a.getAttribute("href"))).length;
  document.title = `width ${innerWidth} beyond ${wide} figures ${seen}/${figures.length} dead ${dead}` + document.title;
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [380, 1200])
def test_the_page_fits_a_phone_and_a_screen(tmp_path: Path, width: int) -> None:
    from typer.testing import CliRunner

    from clipless.app.cli import app

    runs = {}
    for name, clipping in {"a-run-with-quite-a-long-name": "dc-p", "plain": "none"}.items():
        arguments = [
            "train",
            "--model",
            "linear",
            "--epochs",
            "1",
            "--clipping",
            clipping,
            "--out",
            str(tmp_path / name),
        ]
        assert CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).exit_code == 0
        runs[name] = read_run(tmp_path / name)
    # A window has a least width, so the page stands in a frame of the width that is tested.
    made = page(runs).replace("</head>", f"{PROBE}</head>")
    (tmp_path / "page.html").write_text(made, encoding="utf-8")
    frame = f'<iframe id="f" src="page.html" width="{width}" height="900" style="border:0"></iframe>'
    told = "<script>onload = () => document.body.append(f.contentDocument.title)</script>"
    (tmp_path / "frame.html").write_text(f"<!DOCTYPE html><body>{frame}{told}</body>", encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,1000",
            "--enable-logging=stderr",
            "--dump-dom",
            (tmp_path / "frame.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"width (\d+) beyond (-?\d+) figures (\d+)/(\d+) dead (\d+)(.*?)<", done.stdout)
    assert found, done.stdout[-500:]
    inside, beyond, seen, figures, dead = map(int, found.groups()[:5])
    assert (inside, beyond, dead) == (width, 0, 0)
    assert seen == figures == 4
    assert "error:" not in found[6]
    assert "CONSOLE" not in done.stderr

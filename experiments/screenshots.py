"""Makes the pictures in docs/screenshots: `make screenshots`. Half a minute; pages need Debian's chromium.

Commands are run in a fresh folder, and what they print is drawn as SVG; the report of two runs is shown by a real browser.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

DOCS = Path(__file__).parents[1] / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COLUMNS = 90
# The picture of each command's output. What is asked of a picture is that the command ends with this code.
COMMANDS = {
    "train": ("clipless train --epochs 20 --out run", 0),
    "report": ("clipless report run", 0),
    "budget": ("clipless budget --epsilon 3 --dataset-size 60000 --batch-size 2048 --epochs 40", 0),
    "refused": ("clipless train --clipping auto", 2),
}
UNSEEN = (
    "clipless train --epochs 20 --clipping dc-p --out run-dc --json",
    "clipless report run run-dc --html report.html",
)
# Width, height, colour scheme and place of each picture of the report.
PAGES = {
    "report-wide": (1200, 1300, "light", ""),
    "report-figures": (1200, 860, "light", "#figures"),
    "report-dark": (1200, 860, "dark", "#figures"),
    "report-phone": (380, 1300, "light", ""),
}
# Without the fonts that rich would load from a network.
LOCAL = CONSOLE_SVG_FORMAT[: CONSOLE_SVG_FORMAT.index("@font-face")] + CONSOLE_SVG_FORMAT[
    CONSOLE_SVG_FORMAT.index(".{unique_id}-matrix") :
].replace("Fira Code", "ui-monospace, DejaVu Sans Mono")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw what the commands print and the report shows.")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the documentation")
    parser.add_argument("--quick", action="store_true", help="one command only: to try the script")
    options = parser.parse_args()
    folder = options.docs / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for name, (command, code) in (COMMANDS | ({"train": COMMANDS["budget"]} if options.quick else {})).items():
            draw(command, run(command, Path(work), code), folder / f"{name}.svg")
            if options.quick:
                return
        for command in UNSEEN:
            run(command, Path(work), 0)
        for name, (width, height, scheme, place) in PAGES.items():
            shown = framed(Path(work) / "report.html", width, height, place=place)
            picture(shown, folder / f"{name}.png", width, height, scheme)


def run(command: str, folder: Path, code: int) -> str:
    """What the command prints, with colours and without animation."""
    environment = os.environ | {
        "FORCE_COLOR": "1",
        "TTY_INTERACTIVE": "0",
        "COLUMNS": str(COLUMNS),
        "PYTHONWARNINGS": "error",
    }
    full = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(
        full, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    if done.returncode != code:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def draw(command: str, printed: str, path: Path) -> None:
    """The command and what it prints, as a terminal would show it."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.assemble(("$ ", "bold green"), command))
    console.print(Text.from_ansi(printed.rstrip()))
    path.write_text(
        console.export_svg(title="clipless", theme=MONOKAI, code_format=LOCAL, unique_id=path.stem), encoding="utf-8"
    )


def browser() -> str | None:
    """The headless browser, if there is one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def browse(
    page: Path, *options: str, dark: bool = False, size: tuple[int, int] = (1400, 1600)
) -> subprocess.CompletedProcess[str]:
    """Open a page in the headless browser, with these options, and let its scripts run."""
    found = browser()
    if found is None:
        sys.exit("there is no browser: apt-get install chromium")
    command = [
        found, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files",
        "--enable-logging=stderr", "--virtual-time-budget=3000", f"--window-size={size[0]},{size[1]}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", *options, page.resolve().as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def framed(page: Path, width: int, height: int, script: str = "", place: str = "") -> Path:
    """A page beside this one that shows it in a frame: a browser's own window is never as narrow as a phone."""
    size = f"border:0;display:block;width:{width}px;height:{height}px"
    frame = f'<iframe src="{page.name}{place}" style="{size}"></iframe>'
    wrapper = page.with_name(f"{page.stem}-framed.html")
    wrapper.write_text(
        f'<!DOCTYPE html><html style="color-scheme: light dark"><body style="margin:0">{frame}{script}</body></html>',
        encoding="utf-8",
    )
    return wrapper


def picture(page: Path, path: Path, width: int, height: int, scheme: str) -> None:
    """A page as a browser shows it."""
    browse(page, f"--screenshot={path.resolve()}", dark=scheme == "dark", size=(max(width, 500), height))
    if width < 500:
        _crop(path, width)


def _crop(path: Path, width: int) -> None:
    from matplotlib.image import imread, imsave

    imsave(path, imread(path)[:, :width])


if __name__ == "__main__":
    main()

"""A page of figures side by side, each with its sentence."""

import html
from collections.abc import Sequence
from pathlib import Path

from clipless.app.charts.drawing import figure, save
from clipless.app.progress import OnProgress
from clipless.app.reproduce.drawing import Drawing
from clipless.app.reproduce.result import ReproductionResult

STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1600px; padding: 0 1.5rem; color: #222; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(560px, 1fr)); gap: 1.5rem; }
figure { margin: 0; padding: 1rem; border: 1px solid #ddd; border-radius: 6px; }
figure.wide { grid-column: 1 / -1; }
img { width: 100%; height: auto; }
figcaption { margin-top: .5rem; }
"""
WIDE = 3.0  # width over height of a figure that gets a row of its own


def draw_page(
    title: str, drawings: Sequence[Drawing], folder: Path, kind: str, report: OnProgress
) -> ReproductionResult:
    """Draw every figure into the folder, and write index.html that shows them. Nothing is drawn without matplotlib."""
    figure()
    blocks, figures = [], {}
    for number, drawing in enumerate(drawings):
        report(drawing.source, number, len(drawings))
        picture = drawing.draw()
        width, height = picture.get_size_inches()
        written = save(picture, folder / f"{drawing.stem}.{kind}")
        figures[str(written)] = drawing.sentence
        blocks.append(_block(drawing, written.name, wide=width / height > WIDE))
    report("done", len(drawings), len(drawings))
    page = folder / "index.html"
    page.write_text(_page(title, blocks), encoding="utf-8")
    return ReproductionResult(page, figures)


def _block(drawing: Drawing, name: str, wide: bool) -> str:
    words = f"<b>{html.escape(drawing.source)}.</b> {html.escape(drawing.sentence)}"
    picture = f'<a href="{name}"><img src="{name}" alt="{html.escape(drawing.sentence)}"></a>'
    opening = '<figure class="wide">' if wide else "<figure>"
    return f"{opening}{picture}<figcaption>{words}</figcaption></figure>"


def _page(title: str, blocks: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(blocks)
    shown = f"<h1>{html.escape(title)}</h1>\n<main>\n{body}\n</main>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{shown}</body></html>\n'

"""Writes the figures and the tables of docs/budget.md: `make figures`. Nothing is trained; a minute of arithmetic."""

import argparse
import json
from pathlib import Path

from rich.progress import Progress

from clipless.accounting import ACCOUNTANTS, epsilon, noise_multiplier
from clipless.app.charts import figure, lines, save
from clipless.app.charts.budget import Budget, curves
from clipless.app.charts.drawing import plain

DOCS = Path(__file__).parents[1] / "docs"
EPSILON, DELTA, RECORDS, BATCH, EPOCHS = 3.0, 1e-5, 60_000, 2048, 40
# epsilon, delta, rate, steps: from everyday runs to the ends of the range
EXAMPLES = [
    (3.0, 1e-5, BATCH / RECORDS, EPOCHS * round(RECORDS / BATCH)),
    (0.1, 1e-6, 0.01, 1000),
    (8.0, 1e-9, 1e-4, 1_000_000),
    (1.0, 1e-12, 1e-6, 1_000_000),
    (200.0, 1e-5, 0.5, 10_000),
    (0.01, 1e-2, 1e-3, 100),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute and draw what docs/budget.md shows.")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder with budget.md, and figures in it")
    parser.add_argument("--quick", action="store_true", help="a short run: to try the script, not to quote")
    arguments = parser.parse_args()
    docs, examples = arguments.docs, [(EPSILON, DELTA, 1.0, 50)] if arguments.quick else EXAMPLES
    rate, steps = examples[0][2:]
    budget = Budget(noise_multiplier(EPSILON, DELTA, rate, steps), rate, steps, DELTA)
    with Progress() as bar:
        task = bar.add_task("computing curves", total=sum(budget.points().values()))
        found = curves(budget, lambda: bar.advance(task))
    for name, chart in found.items():
        picture, (axes,) = figure()
        lines(axes, chart)
        save(picture, docs / "figures" / f"budget-{name}.svg")
    data = {name: plain(chart.to_dict()) for name, chart in found.items()}
    rounded = json.loads(json.dumps(data), parse_float=lambda text: float(f"{float(text):.5g}"))
    (docs / "figures" / "budget.json").write_text(json.dumps(rounded, ensure_ascii=False) + "\n", encoding="utf-8")
    write_table(examples, docs / "budget.md")


def write_table(examples: list[tuple[float, float, float, int]], page: Path) -> None:
    """Put the table of calibrations between its markers in docs/budget.md."""
    rows = ["| target ε | δ | rate | steps | " + " | ".join(f"σ, {name}" for name in ACCOUNTANTS) + " |"]
    rows.append("| " + " | ".join(["---"] * (4 + len(ACCOUNTANTS))) + " |")
    for target, delta, rate, steps in examples:
        cells = []
        for name in ACCOUNTANTS:
            z = noise_multiplier(target, delta, rate, steps, name)
            cells.append(f"{z:.4g} (ε = {epsilon(z, rate, steps, delta, name):.4g})")
        rows.append(f"| {target:g} | {delta:g} | {rate:.4g} | {steps:,} | " + " | ".join(cells) + " |")
    before, _, rest = page.read_text(encoding="utf-8").partition("<!-- table -->")
    after = rest.partition("<!-- end of table -->")[2]
    table = "<!-- table -->\n" + "\n".join(rows) + "\n<!-- end of table -->"
    page.write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main()

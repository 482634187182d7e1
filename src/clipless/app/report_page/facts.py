"""The tables of a report: what a run spent and scored, how it was configured, and its ledger."""

import math
from collections.abc import Mapping
from typing import Any

from clipless.accounting import ACCOUNTANTS, Spent
from clipless.app.report import RunReport
from clipless.app.report_page.audit import UNCOUNTED, differences, read_audit
from clipless.app.report_page.values import (
    DURATION,
    PUBLIC,
    SIZE,
    TEST_RECORDS,
    UNPROTECTED,
    MarkedText,
    metric,
    not_private,
)
from clipless.errors import CliplessError
from clipless.rounding import rounded_up

GUARANTEES = ("pld", "rdp")
BUDGET = ("epsilon", "delta", "accountant", "noise", "noise_multiplier")  # without privacy they are not used
SECRET_SEED = "whoever knows the seed can subtract the noise"
FactRows = dict[str, MarkedText]


def stated(reading: RunReport, delta: float | None, accountant: str | None) -> Spent:
    """What the promise in words is about: by the run's accountant or the one asked for, by pld if that approximates."""
    name = accountant or reading.plan["accountant"]
    return reading.spent(delta, "pld" if ACCOUNTANTS[name].approximation else name)


def privacy(reading: RunReport, delta: float | None, accountant: str | None) -> FactRows:
    """Epsilon by both accountants that are guarantees, and by the one asked for."""
    if not reading.private:
        return {f"epsilon spent, by {name}": not_private("no guarantee", UNPROTECTED) for name in GUARANTEES}
    plan, rows = reading.plan, {}
    for name in dict.fromkeys((*GUARANTEES, plan["accountant"], *([accountant] if accountant else []))):
        note = " (an approximation, can under-report)" if ACCOUNTANTS[name].approximation else ""
        rows[f"epsilon spent, by {name}{note}"] = _marked(reading, _epsilon(reading, delta, name))
    rows["delta"] = MarkedText(rounded_up(plan["delta"] if delta is None else delta))
    rows["promised for all planned steps"] = MarkedText(
        f"({rounded_up(plan['epsilon'])}, {rounded_up(plan['delta'])}) by {plan['accountant']}"
    )
    rows["steps taken"] = MarkedText(
        f"{reading.ledger.steps:,}" if "tuning" not in plan else "those of the search, priced as one"
    )
    rows["state"] = MarkedText(reading.progress)
    return rows | _audit(reading)


def results(reading: RunReport) -> FactRows:
    """Scores and speed, none of which the guarantee covers."""
    metrics = reading.record.get("metrics", {})
    rows: FactRows = {}
    for key, value in metrics.items():
        if key.startswith("test_") and isinstance(value, (int, float)):
            rows[key.replace("_", " ")] = not_private(metric(key, value), TEST_RECORDS)
    if metrics.get("seconds"):
        rows["time"] = not_private(f"{metrics['seconds']:.1f} s", DURATION)
        rows["steps per second"] = not_private(f"{metrics['steps'] / metrics['seconds']:.3g}", DURATION)
    if "parameters" in metrics:
        rows["parameters of the model"] = MarkedText(f"{metrics['parameters']:,}")
    return rows


def configuration(reading: RunReport) -> FactRows:
    """The plan and the arguments. A seed is not shown: with it, readers of the page could subtract the noise."""
    arguments, rows = (
        reading.record.get("arguments", {}),
        {"data": MarkedText(str(reading.record.get("data", "not stored")))},
    )
    if reading.private:
        plan = reading.plan
        size = plan["dataset_size"]
        rows["training records"] = MarkedText("secret") if size is None else MarkedText(f"{size:,}", PUBLIC, SIZE)
        names = (
            "neighbours",
            "sampling",
            "expected_batch",
            "sample_rate",
            "noise_multiplier",
            "statistic_multiplier",
            "noise",
            "projections",
        )
        rows |= {name.replace("_", " "): MarkedText(_text(plan[name])) for name in names if plan.get(name) is not None}
        phases = plan.get("clipping", {}).get("phases", [plan["clipping"]] if "clipping" in plan else [])
        for place, phase in enumerate(phases, start=1):
            label = "clipping" if len(phases) == 1 else f"clipping, phase {place}"
            rows[label] = MarkedText(f"{phase['name']}: {phase['rule']}, {phase['policy']}")
    unused = () if reading.private else BUDGET
    for name, value in arguments.items():
        if name in unused:
            continue
        if name == "seed" and value is not None:
            rows["seed"] = not_private("fixed, and not shown here", SECRET_SEED)
        elif name not in ("clipping", "seed") and value is not None:
            rows.setdefault(name.replace("_", " "), MarkedText(_text(value)))
    return rows


def ledger(reading: RunReport) -> FactRows:
    """The state of the ledger, and the hash that vouches for all of it."""
    rows = {"ledger": MarkedText(reading.state if reading.private else "none")}
    if reading.file:
        rows |= {"run": MarkedText(reading.file.run), "events": MarkedText(f"{len(reading.file.entries):,}")}
        rows["digest (head of the hash chain)"] = MarkedText(reading.file.head)
    return rows


def versions(reading: RunReport) -> FactRows:
    return {name: MarkedText(str(number)) for name, number in reading.record.get("versions", {}).items()}


def warnings(reading: RunReport) -> list[str]:
    """What weakens the promise of this run."""
    if not reading.private:
        return ["Trained without privacy: nothing in this run is private."]
    found = list(reading.notes)
    if reading.torn:
        found.append(
            "The last line of the ledger is torn: the run was cut off while writing it. It counts as one more step."
        )
    if seeded(reading):
        found.append(
            "The noise comes from a fixed seed. Whoever knows the seed can subtract the noise, and the promise below holds "
            "only against those who do not. Such a run is for experiments."
        )
    if reading.plan.get("noise") == "device":
        found.append(
            "On a GPU the noise comes from torch's generator, which is not cryptographic. The promise below then holds only "
            "against those who cannot predict it."
        )
    if math.isinf(stated(reading, None, None).epsilon):
        found.append("The epsilon of what was released is infinite: nothing is promised.")
    return found


def seeded(reading: RunReport) -> bool:
    return reading.plan.get("noise") == "seeded" or reading.record.get("arguments", {}).get("seed") is not None


def overview(
    runs: Mapping[str, RunReport], delta: float | None, accountant: str | None
) -> dict[str, dict[str, MarkedText]]:
    """The rows in which runs are compared: for each label the value of every run that has it."""
    table: dict[str, dict[str, MarkedText]] = {}
    for name, run in runs.items():
        clipping = run.record.get("arguments", {}).get("clipping") or (
            run.plan.get("clipping", {}).get("name") if run.private else "none"
        )
        rows: dict[str, Any] = {"clipping": MarkedText(str(clipping or "chosen by a search"))}
        rows |= privacy(run, delta, accountant) | results(run)
        for label, value in rows.items():
            table.setdefault(label, {})[name] = value
    return table


def _marked(reading: RunReport, epsilon: str) -> MarkedText:
    """An epsilon, marked where the noise behind it can be subtracted."""
    return not_private(epsilon, SECRET_SEED) if seeded(reading) else MarkedText(epsilon)


def _epsilon(reading: RunReport, delta: float | None, accountant: str) -> str:
    try:
        return rounded_up(reading.spent(delta, accountant).epsilon)
    except CliplessError:
        return "not available: this accountant cannot price what was released"


def _audit(reading: RunReport) -> FactRows:
    audit = read_audit(reading)
    if audit is None:
        return {}
    other = differences(reading, audit)
    if other:
        return {"audit": MarkedText(f"audit.json is about another configuration (different: {', '.join(other)})")}
    verdict = "the claim is refuted" if audit["failed"] else "nothing speaks against the claim"
    text = f"epsilon is at least {audit['lower_bound']:.3g}, confidence {audit['confidence']:.3g}: {verdict}"
    return {"audit of this configuration": not_private(text, UNCOUNTED)}


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""The audit beside a run: `audit.json` in its folder, as `clipless audit --out` writes it."""

import json
from typing import Any

from clipless.app.report import RunReport
from clipless.errors import DamagedFile

FILE = "audit.json"
UNCOUNTED = "computed from further trainings, which this ledger does not count"
# Attacks are made with other randomness than the run, so these may differ.
FREE = {"seed", "noise", "test_every"}


def read_audit(reading: RunReport) -> dict[str, Any] | None:
    """The audit in the run's folder; None if there is none. Raises `DamagedFile` if it cannot be read."""
    path = reading.path / FILE
    if not reading.path.is_dir() or not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        bounds = {name: float(found[name]) for name in ("lower_bound", "claimed_epsilon", "confidence")}
        return {**found, **bounds, "arguments": dict(found["arguments"]), "failed": bool(found["failed"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFile(
            f"{path} is not what clipless audit writes ({error}): repeat the audit with --out, or move the file away."
        ) from error


def differences(reading: RunReport, audit: dict[str, Any]) -> list[str]:
    """The arguments in which the audited configuration differs from the run's, so that the bound is not about it."""
    own = {**reading.record.get("arguments", {}), "data": reading.record.get("data")}
    audited = {**audit["arguments"], "data": audit.get("data")}
    return sorted(name for name in (own.keys() | audited.keys()) - FREE if own.get(name) != audited.get(name))

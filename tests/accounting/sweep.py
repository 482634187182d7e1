"""Calibrate over the whole range and report the slowest, the largest and the loosest call.

    python tests/accounting/sweep.py            896 problems per accountant, about 15 minutes
    python tests/accounting/sweep.py --quick    one in nine

Each accountant runs in a process of its own, so that memory is its own. Seconds are those of one core. Exit
code 1 if a promise was broken.
"""

import argparse
import itertools
import json
import math
import resource
import subprocess
import sys
import time

EPSILONS = (0.01, 0.1, 1.0, 3.0, 10.0, 50.0, 200.0)
DELTAS = (1e-12, 1e-9, 1e-5, 1e-2)
RATES = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.999, 1.0)
STEPS = (1, 100, 10_000, 1_000_000)
SECONDS, MEGABYTES, SHARE = 5.0, 500.0, 0.99


def sweep(accountant: str, every: int) -> dict[str, object]:
    from clipless.accounting import epsilon, noise_multiplier
    from clipless.accounting.accountants import _epsilon
    from clipless.accounting.calibrate import LEAST_MULTIPLIER

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows, broken, loose = [], [], []
    for problem in list(itertools.product(EPSILONS, DELTAS, RATES, STEPS))[::every]:
        target, delta, rate, steps = problem
        start = time.process_time()
        z = noise_multiplier(target, delta, rate, steps, accountant)
        calibrating = time.process_time() - start
        _epsilon.cache_clear()
        start = time.process_time()
        spent = epsilon(z, rate, steps, delta, accountant)
        rows.append((calibrating, time.process_time() - start, problem, z))
        if not (0 <= spent <= target and math.isfinite(z)) or calibrating > SECONDS:
            broken.append((problem, z, spent, calibrating))
        if spent < SHARE * target and z > LEAST_MULTIPLIER:
            loose.append((problem, z, spent))
    return {
        "accountant": accountant,
        "problems": len(rows),
        "slowest calibration": max(rows)[::2],
        "slowest epsilon": max(row[1:3] for row in rows),
        "extra megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before,
        "broken": broken,
        "below 99 %": loose,
        "at the least multiplier": sum(row[3] == LEAST_MULTIPLIER for row in rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--accountant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.accountant:
        sys.stdout.write(json.dumps(sweep(options.accountant, 9 if options.quick else 1)))
        return 0
    failed = False
    for name in ("pld", "rdp", "gdp"):
        command = [sys.executable, *sys.argv, "--accountant", name]
        report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        failed |= bool(report["broken"]) or report["extra megabytes"] > MEGABYTES
        for key, value in report.items():
            sys.stdout.write(f"{key}: {value}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

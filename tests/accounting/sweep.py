"""Calibrate over the whole range and report the slowest and the largest call, and every promise that was broken.

    python tests/accounting/sweep.py            896 problems per accountant, 420 with clipping policies: about 20 minutes
    python tests/accounting/sweep.py --quick    one in nine
    python tests/accounting/sweep.py --every 50 one in fifty

Promises: at most 5 seconds of one core and 500 MB, epsilon recomputed by the same accountant at most the target and at
least 99 % of it. The one exception: where a record is sampled at all with a chance of at most delta, any noise keeps the
promise, and the answer is the least multiplier. Each accountant runs in a process of its own, so that memory is its own.
Exit code 1 if a promise was broken.
"""

import argparse
import itertools
import json
import math
import resource
import subprocess
import sys
import time
import warnings
from typing import Any

EPSILONS = (0.01, 0.1, 1.0, 3.0, 10.0, 50.0, 200.0)
DELTAS = (1e-12, 1e-9, 1e-5, 1e-2)
RATES = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.999, 1.0)
STEPS = (1, 100, 10_000, 1_000_000)
SECONDS, MEGABYTES, SHARE = 5.0, 500.0, 0.99
ACCOUNTANTS = ("pld", "rdp", "gdp")

# For policies: epsilon, delta, (records, expected batch), steps
POLICY_GRID = ((0.01, 3.0, 200.0), (1e-10, 1e-5), ((10**7, 10), (60_000, 600), (1000, 1000)), (1, 1000, 1_000_000))


def policies() -> dict[str, Any]:
    import clipless

    return {
        "dc-p": clipless.dc_p(),
        "dc-e, per layer": clipless.dc_e(groups="per-layer"),
        "quantile": clipless.quantile(),
        "quantile, per layer": clipless.quantile(groups="per-layer"),
        "auto-s, per layer": clipless.auto_s(groups="per-layer"),
        "decay": clipless.decay(noise_rho=0.5),
        "decay by 20": clipless.decay(noise_rho=0.05),
    }


def chance_of_being_sampled(rate: float, steps: int) -> float:
    return 1.0 if rate == 1 else -math.expm1(steps * math.log1p(-rate))


def verdict(target: float, spent: float, noise: float, floor: float, sampled: float, delta: float) -> str:
    """ "" if all is well, "floor" for the exception, or what is wrong."""
    if not (0 <= spent <= target and math.isfinite(noise)):
        return "unsafe"
    if noise == floor:
        return "floor" if sampled <= delta else "at the least multiplier for no reason"
    return "" if spent >= SHARE * target else "below 99 %"


def constant(accountant: str, every: int) -> list[tuple[float, str, object]]:
    """Seconds, verdict and problem of every calibration of plain steps."""
    from clipless.accounting import epsilon, noise_multiplier
    from clipless.accounting.calibrate import LEAST_MULTIPLIER

    rows = []
    for problem in list(itertools.product(EPSILONS, DELTAS, RATES, STEPS))[::every]:
        target, delta, rate, steps = problem
        start = time.process_time()
        z = noise_multiplier(target, delta, rate, steps, accountant)
        seconds = time.process_time() - start
        spent = epsilon(z, rate, steps, delta, accountant)
        sampled = chance_of_being_sampled(rate, steps)
        rows.append((seconds, verdict(target, spent, z, LEAST_MULTIPLIER, sampled, delta), problem))
    return rows


def planned(accountant: str, every: int) -> list[tuple[float, str, object]]:
    """The same for plans of every clipping policy, recomputed from the events that the steps would write down."""
    from clipless.accounting.calibrate import LEAST_MULTIPLIER
    from clipless.partition import partition
    from clipless.phases import as_schedule
    from clipless.planning import make_plan

    names = ["body.weight", "body.bias", "head.weight", "head.bias"]
    rows = []
    for name, clipping in policies().items():
        groups = partition(clipping.groups, names)
        for problem in list(itertools.product(*POLICY_GRID))[::every]:
            target, delta, (records, batch), steps = problem
            start = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # delta above 1/N
                plan = make_plan(
                    dataset_size=records,
                    batch_size=batch,
                    epochs=None,
                    steps=steps,
                    epsilon=target,
                    noise_multiplier=None,
                    delta=delta,
                    accountant=accountant,
                    schedule=as_schedule(clipping),
                    groups=groups,
                    dimensions=(1000,) * len(groups),
                    loss_reduction="mean",
                    noise="secure",
                )
            seconds = time.process_time() - start
            sampled = chance_of_being_sampled(plan.sample_rate, steps)
            z = plan.noise_multiplier
            found = verdict(target, recomputed(plan), z, LEAST_MULTIPLIER, sampled, delta)
            rows.append((seconds, found, (name, *problem)))
    return rows


def recomputed(plan: Any) -> float:
    """Epsilon of the events that a run of this plan writes into its ledger."""
    from clipless.accounting import ACCOUNTANTS

    first, events = 0, []
    for _, count in plan.schedule.noise_schedule(plan.steps):
        events.append((plan.event(first), count))
        first += count
    return ACCOUNTANTS[plan.accountant].epsilon(events, plan.delta)


def sweep(kind: str, accountant: str, every: int) -> dict[str, Any]:
    import clipless  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = {"constant": constant, "policies": planned}[kind](accountant, every)
    seconds, _, slowest = max(rows, key=lambda row: row[0])
    return {
        "kind": kind,
        "accountant": accountant,
        "problems": len(rows),
        "slowest": (round(seconds, 2), slowest),
        "extra megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before),
        "at the least multiplier, as they should": sum(found == "floor" for _, found, _ in rows),
        "broken": [row for row in rows if row[1] not in ("", "floor") or row[0] > SECONDS],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", dest="every", action="store_const", const=9, help="one problem in nine")
    parser.add_argument("--every", type=int, default=1, help="one problem in so many")
    parser.add_argument("--accountants", nargs="+", choices=ACCOUNTANTS, default=ACCOUNTANTS)
    parser.add_argument("--only", nargs=2, metavar=("KIND", "ACCOUNTANT"), help="constant or policies; pld, rdp or gdp")
    options = parser.parse_args()
    if options.only:
        sys.stdout.write(json.dumps(sweep(*options.only, every=options.every)))
        return 0
    failed = False
    for kind, name in itertools.product(("constant", "policies"), options.accountants):
        command = [sys.executable, *sys.argv, "--only", kind, name]
        report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        failed |= bool(report["broken"]) or report["extra megabytes"] > MEGABYTES
        sys.stdout.write("".join(f"{key}: {value}\n" for key, value in report.items()) + "\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

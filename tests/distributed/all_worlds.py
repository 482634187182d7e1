"""`make test-worlds`: sharded runs, and models under both forms, in worlds of one to four processes, against one process.
With a number, up to that many; with --quick, few of the runs, to try the script.

Too long for every run of the tests, which see the world of two in full and the others in part.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import scenarios
import torch
from scenarios import CASES
from sharded_scenarios import few, model_of, trained
from shared_run import BATCH
from torch import Tensor
from world_scenarios import MODELS, SOME, worlds_among
from worlds import world

# Relative to the gradient, or to what one record adds where the records of a batch cancel.
LIMIT = 1e-6


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    flat = [torch.cat([tensor.flatten().double() for tensor in tensors]) for tensors in (one, other)]
    return float((flat[0] - flat[1]).norm() / max(float(flat[1].norm()), 1 / BATCH))


def expected(cases: Sequence[tuple[str, str]], models: Sequence[str]) -> dict[str, list[list[Tensor]]]:
    """The released gradients of every run in one process."""
    found = {f"{name} {groups}": scenarios.case(name, groups)["gradients"] for name, groups in cases}
    found["few"] = few()["gradients"]
    for name in models:
        found[f"sharded {name}"] = found[f"whole {name}"] = trained(model_of(name))
    return found


def main(processes: int, quick: bool) -> int:
    torch.set_num_threads(1)
    scenario, chosen = ("some_sharded_worlds", SOME) if quick else ("sharded_worlds", (CASES, MODELS))
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[dict[Any, Any]] = world(scenario, processes, Path(folder), seconds=1800)
    alone, noise, failed = expected(*chosen), scenarios.pure_noise()["gradients"], False
    for size, members in worlds_among(processes).items():
        worst: dict[str, float] = {}
        for member in members:
            said = ranks[member][size]
            same = all(map(torch.equal, chain(*said["noise"]["gradients"]), chain(*noise)))
            failed |= not same
            for case, steps in alone.items():
                found = said[case]["gradients"] if isinstance(said[case], dict) else said[case]
                far = max(distance(*pair) for pair in zip(found, steps, strict=True))
                worst[case] = max(far, worst.get(case, 0.0))
        case = max(worst, key=worst.__getitem__)
        failed |= worst[case] >= LIMIT
        told = f"{len(worst)} runs, at most {worst[case]:.1e} apart ({case}); noise bit for bit: {same}"
        print(f"{size} ranks: {told}")  # noqa: T201
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", nargs="?", type=int, default=4, help="of the largest world")
    parser.add_argument("--quick", action="store_true", help="few of the runs")
    given = parser.parse_args()
    sys.exit(main(given.processes, given.quick))

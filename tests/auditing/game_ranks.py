"""Step games that two processes play together: `python game_ranks.py FOLDER`, with RANK and WORLD_SIZE in the environment,
leaves verdicts and scores in FOLDER. In the last game every rank's sum is added twice, as if records were in two of them."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from test_step_game import COMBINATIONS, GAMES, SURE, seeded

from clipless.auditing import StepGame, judge_step, play
from clipless.distributed import Ranks
from clipless.distributed.ranks import Arrived

ADD_UP = Ranks.add_up


def judged(name: str, noise: str) -> dict[str, Any]:
    game = StepGame(COMBINATIONS[name], noise=noise, seed=seeded(noise), group=None)
    torch.manual_seed(0)  # weights must be the same on both ranks
    seen = play(game, 20 if game.joint else 1280)
    verdict = judge_step(seen, confidence=SURE)
    return {
        "sound": verdict.sound,
        "claimed_epsilon": verdict.claimed_epsilon,
        "lower_bound": verdict.lower_bound,
        "pair_bound": verdict.pair_bound,
        "joint": game.joint,
        "scores": float(seen.inside.sum()),
    }


def add_up_twice(self: Ranks, tensors: list[torch.Tensor], *arrived: Arrived) -> None:
    for tensor in tensors:
        tensor.mul_(2)
    ADD_UP(self, tensors, *arrived)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {f"{name}, {noise}": judged(name, noise) for name, noise in GAMES}
    Ranks.add_up = add_up_twice  # type: ignore[method-assign]
    found["added twice"] = judged("abadi", "seeded")
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""One process under Lightning's DDP strategy: `python lightning_rank.py FOLDER NAME [CHECKPOINT]`."""

import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning_runs import BATCH, Classifier, loader, privacy, trainer

from clipless.integrations.lightning import PrivateTraining


def trained(folder: Path, path: Path | None) -> dict[str, object]:
    module, callback = Classifier(dropout=0.0), PrivateTraining(privacy())
    checkpoints = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    made = trainer(
        folder, callback, checkpoints, max_epochs=1, devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
        enable_checkpointing=True, accumulate_grad_batches=2,
    )  # fmt: skip
    made.fit(module, loader(BATCH // 2), ckpt_path=path)
    assert callback.private is not None
    return {"weights": module.state_dict(), "ledger": callback.private.ledger.to_dict()}


def main() -> None:
    warnings.simplefilter("ignore")
    folder, name = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    path = folder / sys.argv[3] if len(sys.argv) > 3 else None
    torch.save(trained(folder, path), folder / f"{name}.{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

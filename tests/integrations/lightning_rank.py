"""One process under Lightning's DDP strategy: `python lightning_rank.py FOLDER lightning|loop [CHECKPOINT]`."""

import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning_runs import BATCH, Classifier, loader, privacy, records, trainer

import clipless
from clipless.integrations.lightning import PrivateTraining


def by_lightning(folder: Path, path: Path | None) -> dict[str, object]:
    module, callback = Classifier(dropout=0.0), PrivateTraining(privacy())
    checkpoints = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    made = trainer(
        folder, callback, checkpoints, max_epochs=1, devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
        enable_checkpointing=True, accumulate_grad_batches=2,
    )  # fmt: skip
    made.fit(module, loader(BATCH // 2), ckpt_path=path)
    assert callback.private is not None
    return {"weights": module.state_dict(), "ledger": callback.private.ledger.to_dict()}


def by_loop() -> dict[str, object]:
    torch.distributed.init_process_group("gloo")
    module = Classifier(dropout=0.0)
    optimizer = module.configure_optimizers()
    arguments = privacy().arguments()
    private = clipless.make_private(module, optimizer, records(), **arguments, batch_size=BATCH, epochs=1)
    for parts in private.loader.parts(2):
        optimizer.zero_grad()
        for part in parts:
            module.training_step(part, 0).backward()
        optimizer.step()
    return {"weights": module.state_dict(), "ledger": private.ledger.to_dict()}


def main() -> None:
    warnings.simplefilter("ignore")
    folder, how = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    path = folder / sys.argv[3] if len(sys.argv) > 3 else None
    found = by_loop() if how == "loop" else by_lightning(folder, path)
    torch.save(found, folder / f"{how}{len(sys.argv)}.{os.environ['RANK']}.pt")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

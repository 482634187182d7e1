"""One process of a PrivateTrainer under torchrun: `hf_rank.py FOLDER` leaves what came of it in FOLDER."""

import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))

import hf_problems as hf  # noqa: E402

import clipless  # noqa: E402
from clipless.integrations.transformers import PrivateTrainer  # noqa: E402


def made(folder: Path, per_device: int) -> PrivateTrainer:
    """Four steps on expected batches of 8, without dropout, so that the processes of a run do not matter."""
    model = hf.bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    settings = {
        "per_device_train_batch_size": per_device,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "linear",
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
    }
    return PrivateTrainer(
        model,
        hf.arguments(folder / "run", **settings),
        train_dataset=hf.texts(),
        data_collator=hf.collate,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        privacy=clipless.Privacy(**hf.PLAN),
    )


def main() -> None:
    folder = Path(sys.argv[1])
    trainer = made(folder, per_device=2)
    trainer.train()
    assert trainer.private is not None
    kept = {
        "weights": hf.weights_of(trainer.model),
        "ledger": trainer.private.ledger.to_dict(),
        "predicted": torch.as_tensor(trainer.predict(hf.texts(6)).predictions),
    }
    torch.save(kept, folder / f"{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

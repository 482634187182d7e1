"""A Lightning module, trained with differential privacy: the lines marked with "private" are all that is new.

pip install clipless[lightning]
python examples/lightning_module.py --epochs 20
"""

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import clipless
from clipless.integrations.lightning import PrivateTraining


class Digits(pl.LightningModule):
    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y, reduction="none")  # private: one loss per record

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=20)
    options.add_argument("--epsilon", type=float, default=3.0)
    options.add_argument("--records", type=int, default=1797, help="use so many of the 1,797 digits")
    chosen = options.parse_args()

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images[: chosen.records], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(pixels, torch.tensor(labels[: chosen.records]))
    train, test = random_split(data, [0.8, 0.2])

    private = PrivateTraining(clipless.Privacy(epsilon=chosen.epsilon))  # private
    trainer = pl.Trainer(
        max_epochs=chosen.epochs,
        callbacks=[private],  # private
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=128), DataLoader(test, batch_size=256))
    print(f"accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}, {private.spent()}")


if __name__ == "__main__":
    main()

"""Good wine or not? A small network on a CSV table, here the red wines of the UCI Wine Quality data.

Needs winequality-red.csv or winequality-red.csv.gz in --data-dir or $CLIPLESS_DATA.
"""

import argparse
import csv
import gzip
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, random_split

import clipless

# Columns are scaled by bounds that are known without the data: means and deviations of private records are not free.
BOUNDS = {
    "fixed acidity": (4, 16),
    "volatile acidity": (0, 1.6),
    "citric acid": (0, 1),
    "residual sugar": (0, 16),
    "chlorides": (0, 0.6),
    "free sulfur dioxide": (0, 75),
    "total sulfur dioxide": (0, 300),
    "density": (0.99, 1.004),
    "pH": (2.7, 4.1),
    "sulphates": (0.3, 2),
    "alcohol": (8, 15),
}


def load(folder):
    path = next(p for p in (folder / "winequality-red.csv.gz", folder / "winequality-red.csv") if p.exists())
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file, delimiter=";"))
    columns = [[(float(row[name]) - low) / (high - low) for row in rows] for name, (low, high) in BOUNDS.items()]
    labels = [int(float(row["quality"]) >= 6) for row in rows]
    return TensorDataset(torch.tensor(columns).T.clamp(0, 1) * 2 - 1, torch.tensor(labels))


def record_losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One loss for each record."""
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("CLIPLESS_DATA", "data/wine_quality"))
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--epsilon", type=float, default=3.0)
    args = parser.parse_args()

    train, test = random_split(load(args.data_dir), [0.8, 0.2], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(len(BOUNDS), 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private = clipless.make_private(
        model, optimizer, train, epsilon=args.epsilon, batch_size=args.batch_size, epochs=args.epochs
    )
    for _ in range(private.epochs):
        for batch in private.loader:
            private.step(record_losses, batch)
    with torch.no_grad():
        x, y = test[:]
        print(f"{(model(x).argmax(1) == y).float().mean():.1%} of {len(test)} test wines")
    print(private.spent())


if __name__ == "__main__":
    main()

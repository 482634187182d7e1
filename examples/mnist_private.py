"""Train a convolutional network on MNIST. Needs the four idx files of the data set, in --data-dir or $CLIPLESS_DATA."""

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import clipless


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def record_losses(model, batch):
    data, target = batch
    output = model(data)
    return F.nll_loss(output, target, reduction="none")


def train(model, private):
    model.train()
    for batch in private.loader:
        private.step(record_losses, batch)


def test(model, test_loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct += model(data).argmax(dim=1).eq(target).sum().item()
    print(f"Test set: Accuracy: {correct / len(test_loader.dataset):.2%}")


def read(folder, name):
    raw = gzip.decompress((folder / f"{name}.gz").read_bytes())
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=16 if "images" in name else 8).copy())


def mnist(folder, part):
    images = read(folder, f"{part}-images-idx3-ubyte").reshape(-1, 1, 28, 28) / 255
    return TensorDataset((images - 0.1307) / 0.3081, read(folder, f"{part}-labels-idx1-ubyte").long())


def main():
    parser = argparse.ArgumentParser(description="MNIST")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("CLIPLESS_DATA", "data/mnist"))
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.9)
    args = parser.parse_args()

    train_loader = DataLoader(mnist(args.data_dir, "train"), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(mnist(args.data_dir, "t10k"), batch_size=1000)

    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    private = clipless.make_private(model, optimizer, train_loader, epsilon=3.0, epochs=args.epochs)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for _ in range(args.epochs):
        train(model, private)
        test(model, test_loader)
        scheduler.step()
    print(private.spent())


if __name__ == "__main__":
    main()

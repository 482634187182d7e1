"""Two processes train one private run: torchrun --nproc-per-node 2 examples/torchrun.py

Every process takes its share of each batch. Noise is added once, and there is one epsilon.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import clipless
from clipless.app.data import load


def record_losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One loss for each record."""
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--epsilon", type=float, default=3.0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    data = load("digits")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, data.classes))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    private = clipless.make_private(
        model, optimizer, data.train, epsilon=args.epsilon, batch_size=args.batch_size, epochs=args.epochs
    )
    for _ in range(private.epochs):
        for batch in private.loader:
            private.step(record_losses, batch)
    if dist.get_rank() == 0:
        with torch.no_grad():
            x, y = data.test[:]
            print(f"{(model.module(x).argmax(1) == y).float().mean():.1%} of {len(data.test)} test digits")
        print(private.spent())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

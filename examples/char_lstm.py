"""Which language is a name from? A character LSTM, trained so that no single name can be told from the weights.

Needs a table of names and languages with a header, names.tsv or names.tsv.gz, in --data-dir or $CLIPLESS_DATA.
"""

import argparse
import gzip
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, random_split

import clipless

# Known without the data: every name is read as bytes of UTF-8, and 0 fills up short ones.
BYTES = 256


class CharLSTM(nn.Module):
    def __init__(self, languages, width=64):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, languages)

    def forward(self, names):
        states, _ = self.lstm(self.embedding(names))
        letters = (names != 0).unsqueeze(2)
        return self.head((states * letters).sum(1) / letters.sum(1).clamp(min=1))


def collate(records):
    names, labels = zip(*records, strict=True)
    return pad_sequence(names, batch_first=True), torch.tensor(labels)


def load(folder):
    path = next(p for p in (folder / "names.tsv.gz", folder / "names.tsv") if p.exists())
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    languages = sorted({language for _, language in rows})
    names = [torch.tensor(list(name.encode())) for name, _ in rows]
    return list(zip(names, [languages.index(language) for _, language in rows], strict=True)), languages


def record_losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One loss for each record."""
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("CLIPLESS_DATA", "data/names"))
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--epsilon", type=float, default=8.0)
    args = parser.parse_args()

    records, languages = load(args.data_dir)
    train, test = random_split(records, [0.8, 0.2], torch.Generator().manual_seed(0))
    loader = DataLoader(train, batch_size=args.batch_size, collate_fn=collate)

    torch.manual_seed(0)
    model = CharLSTM(len(languages))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private = clipless.make_private(model, optimizer, loader, epsilon=args.epsilon, epochs=args.epochs)
    for epoch in range(private.epochs):
        model.train()
        for batch in private.loader:
            private.step(record_losses, batch)
        model.eval()
        with torch.no_grad():
            names, labels = collate(list(test))
            right = (model(names).argmax(1) == labels).float().mean()
        print(f"epoch {epoch + 1}: {right:.1%} of {len(test)} test names")
    print(private.spent())


if __name__ == "__main__":
    main()

"""Networks for tokens, each `(shape, classes, vocabulary) -> nn.Module`. Token 0 is padding."""

import torch
from torch import Tensor, nn

WIDTH = 64
LSTM_WIDTH = 128
HEADS = 4


def _mean(states: Tensor, tokens: Tensor) -> Tensor:
    """The mean over a record's own tokens, [b,t,d] -> [b,d]."""
    there = (tokens != 0).unsqueeze(2)
    return (states * there).sum(1) / there.sum(1).clamp(min=1)


class Bag(nn.Module):
    """The mean of a record's word vectors, and a linear layer."""

    def __init__(self, shape: tuple[int, ...], classes: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.out = nn.Linear(WIDTH, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(_mean(self.embedding(tokens), tokens))


class Lstm(nn.Module):
    """DC's network for names: two LSTM layers of 128, and a linear layer on the mean of their states."""

    def __init__(self, shape: tuple[int, ...], classes: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.lstm = nn.LSTM(WIDTH, LSTM_WIDTH, num_layers=2, batch_first=True)
        self.out = nn.Linear(LSTM_WIDTH, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.out(_mean(states, tokens))


class _Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.norm, self.inner_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.causal = causal

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        records, length, _ = x.shape
        heads = self.mix(self.norm(x)).view(records, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = heads[0] @ heads[1].mT / heads.shape[-1] ** 0.5
        seen = there[:, None, None, :]
        if self.causal:
            seen = seen & torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mixed = scores.masked_fill(~seen, -1e9).softmax(-1) @ heads[2]
        x = x + self.out(mixed.transpose(1, 2).reshape(records, length, -1))
        return x + self.inner(self.inner_norm(x))


class _Transformer(nn.Module):
    """Two blocks of width 64 with learned positions."""

    def __init__(self, shape: tuple[int, ...], classes: int, vocabulary: int, causal: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(shape[0], WIDTH)
        self.blocks = nn.ModuleList(_Block(causal) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, classes)
        self.causal = causal

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x, tokens != 0)
        return self.out(self.norm(x) if self.causal else _mean(self.norm(x), tokens))


def bag(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    """The mean of word vectors, and a linear layer."""
    return Bag(shape, classes, vocabulary)


def lstm(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    """Two LSTM layers of 128, and a linear layer on the mean of their states."""
    return Lstm(shape, classes, vocabulary)


def encoder(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    """Two transformer blocks of width 64, and a linear layer on the mean of their states."""
    return _Transformer(shape, classes, vocabulary, causal=False)


def decoder(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    """Two causal transformer blocks of width 64: for each token the logits of the next."""
    return _Transformer(shape, classes, vocabulary, causal=True)

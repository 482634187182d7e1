"""What a record is collated with must not change its loss: padding, statistics and mixtures in a collate function are
refused, also where it draws random numbers; what is masked, sorted or drawn for each record alone is trained."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import clipless

WORDS, HIDDEN = 20, 19

Records = list[dict[str, Any]]
Collate = Callable[[Records], Any]


class Reader(nn.Module):
    """Averages the vectors of a text, with or without its padding."""

    def __init__(self, masked: bool = True, zero: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.drop, self.last = nn.Embedding(WORDS, 6), nn.Dropout(dropout), nn.Linear(6, 2)
        self.masked = masked
        if zero:
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.bias)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        weights = (mask if self.masked else torch.ones_like(mask)).unsqueeze(2)
        means = (self.words(tokens) * weights).sum(1) / weights.sum(1)
        return self.last(self.drop(torch.tanh(means)))


def record_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"], batch["mask"].float()), batch["label"], reduction="none")


def texts(lengths: list[int]) -> Records:
    generator = torch.Generator().manual_seed(0)
    return [
        {"tokens": torch.randint(1, HIDDEN, (length,), generator=generator).tolist(), "label": k % 2}
        for k, length in enumerate(lengths)
    ]


def padded(records: Records) -> dict[str, Tensor]:
    tokens = [torch.tensor(record["tokens"]) for record in records]
    batch = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return {"tokens": batch, "mask": batch > 0, "label": torch.tensor([record["label"] for record in records])}


def on_the_left(records: Records) -> dict[str, Tensor]:
    turned = padded([{**record, "tokens": record["tokens"][::-1]} for record in records])
    return {**turned, "tokens": turned["tokens"].flip(1), "mask": turned["mask"].flip(1)}


def by_length(records: Records) -> dict[str, Tensor]:
    return padded(sorted(records, key=lambda record: -len(record["tokens"])))


def hiding(batch: dict[str, Tensor], chances: Any = None) -> dict[str, Tensor]:
    chances = torch.rand(batch["tokens"].shape) if chances is None else chances
    return {**batch, "tokens": batch["tokens"].masked_fill((chances < 0.4) & batch["mask"], HIDDEN)}


def masked_at_random(records: Records) -> dict[str, Tensor]:
    return hiding(padded(records))


def masked_on_the_left(records: Records) -> dict[str, Tensor]:
    return hiding(on_the_left(records))


class OwnGenerator:
    """Masks at random, by a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, records: Records) -> dict[str, Tensor]:
        batch = padded(records)
        return hiding(batch, torch.from_numpy(self.generator.random(tuple(batch["tokens"].shape))))


class Counter:
    """Keeps something from call to call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, records: Records) -> dict[str, Tensor]:
        self.calls += 1
        batch = padded(records)
        return {**batch, "tokens": (batch["tokens"] + self.calls) % HIDDEN}


def noisy_label(records: Records) -> dict[str, Tensor]:
    """Rows of one length, with noise for each."""
    batch = of_one_length(records)
    return {**batch, "label": (batch["label"] + (torch.rand(len(records)) < 0.5)) % 2}


def of_one_length(records: Records) -> dict[str, Tensor]:
    batch = padded([*records, {"tokens": [1] * 16, "label": 0}])
    return {name: value[:-1] for name, value in batch.items()}


def mixed_up(records: Records) -> dict[str, Tensor]:
    """Every text gets some tokens of the one before it."""
    batch = of_one_length(records)
    return {
        **batch,
        "tokens": torch.where(torch.rand(batch["tokens"].shape) < 0.3, batch["tokens"].roll(1, 0), batch["tokens"]),
    }


def centred(records: Records) -> dict[str, Tensor]:
    batch = of_one_length(records)
    return {**batch, "label": (batch["label"] + round(float(batch["tokens"].float().mean()))) % 2}


def train(
    model: nn.Module,
    collate: Collate,
    lengths: list[int],
    losses: Callable[[nn.Module, Any], Tensor] = record_losses,
    steps: int = 3,
    micro: int = 16,
    rate: float = 1.0,
    data: Any = None,
) -> clipless.Private:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = texts(lengths) if data is None else data
    loader: DataLoader[Any] = DataLoader(records, batch_size=round(rate * len(records)), collate_fn=collate)
    private = clipless.make_private(
        model, optimizer, loader, noise_multiplier=1.0, delta=1e-3, accountant="rdp", steps=steps, seed=1
    )
    try:
        for parts in private.loader.microbatches(micro):
            private.step(losses, parts)
    finally:
        private.detach()
    return private


LENGTHS = [3, 9, 4, 7, 5, 5, 12, 6]


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (padded, "collated alone"),
        (on_the_left, "collated alone"),
        (by_length, "collated alone"),
        (masked_at_random, "collated alone"),
        (masked_on_the_left, "collated alone"),
        (OwnGenerator(), "collated alone"),
    ],
)
@pytest.mark.parametrize("zero", [False, True])
def test_padding_that_is_not_masked_is_refused_before_the_first_step(
    collate: Collate, message: str, zero: bool
) -> None:
    """Even where the model's last layer begins at zero, so that all losses are the same."""
    torch.manual_seed(0)
    model = Reader(masked=False, zero=zero)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(clipless.Misuse, match=message):
        train(model, collate, LENGTHS)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("collate", [mixed_up, centred])
def test_a_collate_function_that_mixes_records_is_refused(collate: Collate) -> None:
    torch.manual_seed(0)
    with pytest.raises(clipless.Misuse, match="collated alone"):
        train(Reader(), collate, LENGTHS)


@pytest.mark.parametrize(
    "collate",
    [padded, on_the_left, by_length, masked_at_random, masked_on_the_left, OwnGenerator(), noisy_label, of_one_length],
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_every_record_has_for_itself_is_trained(collate: Collate, dropout: float) -> None:
    torch.manual_seed(0)
    assert train(Reader(dropout=dropout), collate, LENGTHS).ledger.steps == 3


def test_rows_of_one_length_need_no_mask() -> None:
    torch.manual_seed(0)
    assert train(Reader(masked=False), padded, [6] * 8).ledger.steps == 3
    assert train(Reader(masked=False), masked_at_random, [6] * 8).ledger.steps == 3


@pytest.mark.parametrize("odd", [3, 9])
def test_a_shorter_or_a_longer_record_is_looked_at_when_it_comes(odd: int) -> None:
    """One record of another length is first drawn in the fifth step, in which no check is due, and the model gets nothing
    new."""
    drawn: list[set[int]] = []

    def without_mask(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return record_losses(model, {**batch, "mask": torch.ones_like(batch["mask"])})

    def noting(records: Records) -> dict[str, Tensor]:
        drawn.append({record["number"] for record in records})
        return padded(records)

    lengths = [6] * 100
    data = [{**record, "number": number} for number, record in enumerate(texts(lengths))]
    torch.manual_seed(0)
    train(Reader(), noting, lengths, without_mask, rate=0.1, data=data, steps=5)
    batches = [numbers for numbers in drawn if len(numbers) > 4]
    number = min(batches[-1] - set.union(*batches[:-1]))
    data[number]["tokens"] = [1] * odd
    with pytest.raises(clipless.Misuse, match="collated alone"):
        train(Reader(), padded, lengths, without_mask, rate=0.1, data=data, steps=5)
    assert train(Reader(), padded, lengths, without_mask, rate=0.1, data=data, steps=4).ledger.steps == 4


def test_records_in_the_order_of_their_lengths_are_collated_with_those_before() -> None:
    """Micro-batches of one length each, in which nothing is padded."""
    torch.manual_seed(0)
    with pytest.raises(clipless.Misuse, match="collated alone"):
        train(Reader(masked=False), padded, [4] * 4 + [9] * 4, micro=4, steps=1)


def test_a_function_that_fails_on_one_record_may_be_trained() -> None:
    def squeezed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["tokens"], batch["mask"].float())[:, 1:].squeeze()
        return F.binary_cross_entropy_with_logits(scores, batch["label"].float(), reduction="none")

    torch.manual_seed(0)
    assert train(Reader(), padded, LENGTHS, squeezed).ledger.steps == 3


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_noise_in_the_function_hides_nothing_that_padding_does(library: str) -> None:
    """Constants take its place, if it is torch's; the padding of others cannot be judged."""

    def noisy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        shape = tuple(batch["tokens"].shape)
        chances = torch.rand(shape) if library == "torch" else torch.from_numpy(np.random.random_sample(shape))
        return record_losses(model, {**batch, "tokens": torch.where(chances < 0.1, HIDDEN, batch["tokens"])})

    torch.manual_seed(0)
    np.random.seed(0)
    assert train(Reader(), of_one_length, LENGTHS, noisy).ledger.steps == 3
    if library == "torch":
        assert train(Reader(), padded, LENGTHS, noisy).ledger.steps == 3
    with pytest.raises(clipless.Misuse, match="collated alone" if library == "torch" else "cannot see whether padding"):
        train(Reader(masked=library != "torch"), padded, LENGTHS, noisy)


def test_a_collate_function_that_keeps_something_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(clipless.Misuse, match="keeps from call to call"):
        train(Reader(), Counter(), LENGTHS)


class Once(list[Any]):
    """Records that can be read only once."""

    def __init__(self, records: Records) -> None:
        super().__init__(records)
        self.read: set[int] = set()

    def __getitem__(self, number: Any) -> Any:
        if number in self.read:
            raise OSError("closed")
        self.read.add(number)
        return super().__getitem__(number)


def test_records_that_cannot_be_read_again_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(clipless.Misuse, match=r"raised OSError.*readable in every process"):
        train(Reader(), padded, LENGTHS, data=Once(texts(LENGTHS)))


def test_checks_leave_every_random_generator_as_it_was() -> None:
    """A run whose checks are due and one of which none is have the same random numbers."""
    found = []
    for micro in (8, 9):  # one part, or one and an empty one: the same records
        collate = OwnGenerator()
        torch.manual_seed(0)
        train(Reader(dropout=0.3), collate, LENGTHS, steps=2, micro=micro)
        found.append((torch.rand(1), collate.generator.random()))
    plain = OwnGenerator()
    for _ in range(2):
        plain(texts(LENGTHS))
    assert found[0] == found[1]
    assert found[0][1] == plain.generator.random()

"""Nothing that a run writes tells an un-noised value: true values are spied on while training, and then looked for in
everything that was written."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import clipless
from clipless.app.cli import app
from clipless.clipping import CLIPPINGS
from clipless.private import Private
from clipless.runs.checkpoint import read_checkpoint
from clipless.sampling.loader import Batch

# So many records that a true count, of four digits, is no number that would be written for another reason.
SIZE, BATCH, TEST = 20_011, 6_007, 997
# What a run says of itself without looking at a record. A batch may happen to be as large as expected.
PUBLIC = {SIZE, BATCH, TEST, SIZE - BATCH, SIZE + TEST}
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")  # a number of its own, no digits of a hash


@dataclass
class Spy:
    """True values, as seen from inside, and the statistics that were released in their place."""

    counts: set[int] = field(default_factory=set)
    summaries: set[float] = field(default_factory=set)
    values: set[float] = field(default_factory=set)
    released: set[float] = field(default_factory=set)

    def learn(self, tensor: Tensor) -> None:
        """A tensor of true values, and what a careless log would say of it."""
        known = tensor.detach().double().flatten()
        self.values.update(value for value in known.tolist() if value not in (0.0, 1.0))
        if len(known):
            self.summaries.update(map(float, (known.sum(), known.mean(), known.max(), known.norm(), known.median())))


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spy]:
    """Watches batch sizes, losses, norms, clipping factors, statistics and sums of every private run of this process."""
    spy, undone = (
        Spy(),
        {"open_batch": Private.open_batch, "factors": Private._factors, "sums": Private._noised_gradients},
    )
    noised, loss_function = Private._noised_statistic, F.cross_entropy

    def open_batch(self: Private, batch: Batch) -> None:
        spy.counts.update((batch.records, SIZE - batch.records))
        undone["open_batch"](self, batch)  # type: ignore[operator]

    def factors(self: Private, norms: Tensor, groups: list[int]) -> Tensor:
        shares: Tensor = undone["factors"](self, norms, groups)  # type: ignore[operator]
        spy.learn(norms)
        found = shares
        clipped = (found < 1).double()
        spy.counts.add(int(clipped.sum()))
        for summary in (clipped.mean(), found.mean(), found.sum()):
            if 0.01 < summary < 0.99 or summary > 1.01:  # that all were clipped, or none, is told by nothing
                spy.summaries.add(float(summary))
        return shares

    def sums(self: Private, step: int, values: dict[str, Tensor], *rest: Any) -> dict[str, Tensor]:
        for value in values.values():
            spy.learn(value)
            spy.learn(value * BATCH)
        return undone["sums"](self, step, values, *rest)  # type: ignore[operator, no-any-return]

    def statistic(self: Private, step: int, true: Tensor | None) -> Tensor | None:
        released = noised(self, step, true)
        if true is not None and released is not None:
            spy.released.update(released.double().flatten().tolist())
            spy.counts.update(int(count) for count in true.flatten().tolist() if count == int(count))
            spy.values.update(v for v in true.double().flatten().tolist() if v != int(v))
        return released

    def loss(*arguments: Any, **options: Any) -> Tensor:
        value: Tensor = loss_function(*arguments, **options)
        spy.learn(value.detach())
        spy.summaries.update(float(summary) for summary in (value.detach().mean(), value.detach().sum()))
        return value

    monkeypatch.setattr(Private, "open_batch", open_batch)
    monkeypatch.setattr(Private, "_factors", factors)
    monkeypatch.setattr(Private, "_noised_gradients", sums)
    monkeypatch.setattr(Private, "_noised_statistic", statistic)
    monkeypatch.setattr(F, "cross_entropy", loss)
    return spy


def told(text: str, spy: Spy, *folders: Path) -> list[str]:
    """Numbers in the text that tell a true value: a large count as it is, a summary to 6 digits, any other to 9.

    Left out is what no record decides and may be any number: the names of these folders, and how long something took; and
    released statistics, which lie on a grid, so that one in 16 is a whole number and may be some count by chance.

    Shorter ones would match by chance: among some hundred summaries and some thousand numbers in the text one of 6 digits
    does so with a probability of about 0.1 in all, which a fixed seed then makes certain or impossible.
    """
    for chance in (*map(str, folders), *(folder.name for folder in folders)):
        text = text.replace(chance, "")
    text = re.sub(r'"seconds": [\d.]+|[\d.]+ s\b', "", text)
    counts = {count for count in spy.counts if count >= 1000} - PUBLIC
    summaries, values = np.array(sorted(spy.summaries)), np.array(sorted(spy.values))
    found = []
    for token in set(NUMBER.findall(text)):
        number, digits = float(token), len(re.sub(r"e.*|\D", "", token).lstrip("0"))
        near = {6: summaries, 9: values}
        if number.is_integer() and int(number) in counts and number not in spy.released:
            found.append(token)
        found += [token for least, known in near.items() if digits >= least and _tells(number, min(digits, 12), known)]
    return found


def _tells(number: float, digits: int, known: np.ndarray) -> bool:
    return bool((np.abs(np.abs(known) - number) <= 10.0 ** (1 - digits) * np.abs(known)).any())


def records(count: int) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(0)
    x = chance.normal(size=(count, 6)).astype(np.float32)
    return x, (x[:, 0] > 0.3).astype(np.int64)


def everything_in(folder: Path) -> str:
    """All text files, and every number in the checkpoints but for weights and momentum, which are releases."""
    texts = [p.read_text() for p in sorted(folder.rglob("*")) if p.suffix in (".json", ".jsonl")]
    for path in folder.rglob("*.pt"):
        if not path.name.startswith("model"):
            saved = read_checkpoint(path)
            plain = {"private": saved.private, "extra": saved.extra, "position": saved.position}
            texts.append(json.dumps(plain, default=lambda value: value.tolist()))
    return "\n".join(texts)


def test_the_search_finds_what_is_told(spy: Spy) -> None:
    spy.counts.add(6123)
    spy.learn(torch.tensor([0.123456791, 2.5]))
    spy.summaries.add(0.693147181)
    for text in (
        "batch of 6123",
        '{"n": 6123.0}',
        "loss 0.693147",
        "6.93147e-01",
        '"norm": 0.123456791',
        "sum 2.6234568",
    ):
        assert told(text, spy), text
    for text in ("batch of 6124", "loss 0.69315 0.693131", "norm 0.1234799", "6.123", f"{BATCH} of {SIZE}"):
        assert not told(text, spy), text


def test_a_number_that_no_record_decides_is_not_taken_for_a_count(spy: Spy, tmp_path: Path) -> None:
    """pytest numbers its folders, and a batch can be as large as expected."""
    spy.counts.update((6123, BATCH, SIZE - BATCH))
    folder = tmp_path / "pytest-6123" / "run"
    for text in (f"written to {folder}/run.json", f"{BATCH} expected", '"seconds": 6123.0', "time 6123.0 s"):
        assert not told(text, spy, folder), text
    assert told(f"{folder}: 6123", spy, folder) == ["6123"]


def library_run(clipping: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Everything that a run of the library writes, and everything public that can be printed of it."""
    torch.manual_seed(0)
    x, y = (torch.from_numpy(part) for part in records(SIZE))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    budget: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "delta": 1e-6,
        "batch_size": BATCH,
        "steps": 6,
        "accountant": "rdp",
    }
    private = clipless.make_private(
        model, optimizer, TensorDataset(x, y), clipping=clipping, seed=0, **{"loss_reduction": "mean", **budget}
    )
    private.save_to(folder / "ledger.jsonl")
    for features, labels in private.loader:
        optimizer.zero_grad()
        F.cross_entropy(model(features), labels).backward()
        optimizer.step()
        print(private.spent(), private.ledger, private.thresholds, private.ledger_file, repr(private))  # noqa: T201
    private.save_checkpoint(folder / "run.pt")
    print(private.plan, private.history.to_dict(), private.state_dict())  # noqa: T201
    private.detach()
    output = capfd.readouterr()
    return output.out + output.err + everything_in(folder)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_the_library_writes_no_true_value(
    spy: Spy, tmp_path: Path, capfd: pytest.CaptureFixture[str], clipping: str
) -> None:
    text = library_run(clipping, tmp_path, capfd)
    assert len(spy.counts - PUBLIC) >= 6
    assert len(spy.summaries) > 30
    assert told(text, spy, tmp_path) == []


def test_a_statistic_without_noise_would_be_found(
    spy: Spy, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Private._noised_statistic

    def leaking(self: Private, step: int, true: Tensor | None) -> Tensor | None:
        watched(self, step, true)
        return true

    monkeypatch.setattr(Private, "_noised_statistic", leaking)
    assert told(library_run("dc-e", tmp_path, capfd), spy, tmp_path)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_the_command_line_writes_no_true_value(
    spy: Spy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clipping: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (x, y), (test_x, test_y) = records(SIZE), records(TEST)
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=test_x, y_test=test_y)
    options = ["--data", "data.npz", "--model", "linear", "--batch-size", str(BATCH), "--epochs", "2", "--seed", "1"]
    written = []
    for arguments in (
        ["train", *options, "--clipping", clipping, "--accountant", "rdp", "--out", "run"],
        ["train", *options, "--clipping", clipping, "--accountant", "rdp", "--out", "other", "--json"],
        ["report", "run"],
        ["report", "run", "--json"],
        ["budget", "--ledger", "run"],
        ["train", "--resume", "--out", "run"],
    ):
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        written.append(result.output)
    text = "\n".join(written) + everything_in(tmp_path)
    assert len(spy.summaries) > 30
    assert re.search(r"epsilon", text)
    assert told(text, spy, tmp_path) == []

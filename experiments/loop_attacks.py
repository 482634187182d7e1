"""Attacks on what surrounds the model in a training loop: `python experiments/loop_attacks.py`, some minutes on one core.

Every loop trains with real noise, with one record and without it (its losses are zero then), 120 times each. Half of
the runs choose a direction in the space of the final weights, and a threshold; by these the other half is told apart.
At the claimed epsilon the true positive rate minus the false positive rate is at most tanh(epsilon / 2). What
clipless refuses is not attacked. Results go to loop_attacks.json among the stored results, the table to
docs/sharp_edges.md."""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import clipless
from clipless.auditing.rates import clopper_pearson

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "experiments" / "results" / "loop_attacks.json", ROOT / "docs" / "sharp_edges.md"
BEGIN, END = "<!-- written by experiments/loop_attacks.py -->", "<!-- end of what it has written -->"

EPSILON, DELTA, CONFIDENCE = 0.93, 1e-5, 0.95
BOUND = math.tanh(EPSILON / 2)
RECORDS, BATCH, STEPS, FEATURES, CLASSES = 640, 64, 24, 4, 3
# How far the record that is there or not is from all others. Its label is its own.
FAR = 50.0

Function = Callable[[nn.Module, Any], Tensor]
Train = Callable[[bool], Tensor]
Run = tuple[nn.Module, torch.optim.Optimizer, clipless.Private]


class Linear(nn.Module):
    """An encoder and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Bag(nn.Module):
    """The mean of all embeddings, those of padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).mean(1))


def vectors(present: bool) -> TensorDataset:
    """Inputs, labels and weights; without the first record its input and weight are zero."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(RECORDS, FEATURES, generator=generator), torch.ones(RECORDS)
    y = torch.randint(1, CLASSES, (RECORDS,), generator=generator)
    x[0], y[0], weight[0] = (FAR, 0, 1.0) if present else (0.0, 1, 0.0)
    return TensorDataset(x, y, weight)


def sentences(present: bool) -> DataLoader[Any]:
    """Five tokens each, padded to the longest; the first record has a hundred."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, 20, (5,), generator=generator) for _ in range(RECORDS)]
    rows = [(row, k % 2 + 1, 1.0) for k, row in enumerate(tokens)]
    rows[0] = (torch.ones(100, dtype=torch.long), 0, 1.0) if present else (tokens[0], 1, 0.0)

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
        labels, weights = torch.tensor([y for _, y, _ in samples]), torch.tensor([w for *_, w in samples])
        return pad_sequence([x for x, _, _ in samples], batch_first=True), labels, weights

    return DataLoader(rows, batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]


def begin(present: bool, make: Callable[[], nn.Module], data: Callable[[bool], Any], **settings: Any) -> Run:
    """A run with noise from the operating system, from weights that are public."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    given = {"noise_multiplier": NOISE, "delta": DELTA, "batch_size": BATCH, "steps": STEPS, "accountant": "rdp"}
    return (
        model,
        optimizer,
        clipless.make_private(model, optimizer, data(present), clipping="abadi", **given, **settings),
    )


def by_step(make: Callable[[], Function], model: Any = Linear, data: Any = vectors) -> Train:
    """A loop with `private.step`."""

    def train(present: bool) -> Tensor:
        module, _, private = begin(present, model, data)
        function = make()
        with closing(private):
            for batch in private.loader:
                private.step(function, batch)
        return weights_of(module)

    return train


def by_backward(make: Callable[[], Function], model: Any = Linear, data: Any = vectors) -> Train:
    """The same loop with `private.backward`."""

    def train(present: bool) -> Tensor:
        module, optimizer, private = begin(present, model, data)
        function = make()
        with closing(private):
            for batch in private.loader:
                optimizer.zero_grad()
                private.backward(function(module, batch))
                optimizer.step()
        return weights_of(module)

    return train


def by_loss(loss: Callable[[Tensor, Any], Tensor]) -> Train:
    """A loop with `loss.backward()` on a sum, computed from the model's outputs."""

    def train(present: bool) -> Tensor:
        module, optimizer, private = begin(present, Linear, vectors, loss_reduction="sum")
        with closing(private):
            for batch in private.loader:
                optimizer.zero_grad()
                loss(module(batch[0]), batch).backward()
                optimizer.step()
        return weights_of(module)

    return train


def steered(present: bool) -> Tensor:
    """`private.step`, with a learning rate from the training loss."""
    module, optimizer, private = begin(present, Linear, vectors)
    with closing(private):
        for batch in private.loader:
            with torch.no_grad():
                loss = float(plain(module, batch).sum()) / BATCH
            optimizer.param_groups[0]["lr"] = 0.2 if loss < 3 else 0.02
            private.step(plain, batch)
    return weights_of(module)


class closing:  # noqa: N801
    """Detaches a run at the end, whatever happens."""

    def __init__(self, private: clipless.Private) -> None:
        self._private = private

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._private.detach()


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# Functions from model and batch to losses: sound, and coupled in all the ways that loops are.


def per_record(z: Tensor, batch: Any) -> Tensor:
    return batch[2] * F.cross_entropy(z, batch[1], reduction="none")


def plain(model: nn.Module, batch: Any) -> Tensor:
    return per_record(model(batch[0]), batch)


def running_scale() -> Function:
    kept = {"scale": 1.0}

    def losses(model: nn.Module, batch: Any) -> Tensor:
        found, scale = plain(model, batch), kept["scale"]
        kept["scale"] = 0.9 * scale + 0.1 * float(found.detach().sum()) / BATCH
        return found / scale

    return losses


def feature_queue() -> Function:
    kept = {"keys": torch.zeros(BATCH, CLASSES)}

    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        found = per_record(z, batch) + batch[2] * (z @ kept["keys"].T).logsumexp(1)
        kept["keys"] = torch.cat([z.detach(), kept["keys"]])[:BATCH]
        return found

    return losses


def moving_center() -> Function:
    kept = {"center": torch.zeros(CLASSES)}

    def losses(model: nn.Module, batch: Any) -> Tensor:
        z, center = model(batch[0]), kept["center"]
        kept["center"] = 0.9 * center + 0.1 * z.detach().sum(0) / BATCH
        return per_record(z, batch) + batch[2] * (z - center).square().sum(1)

    return losses


def trained_centers() -> Function:
    centers = nn.Parameter(torch.zeros(CLASSES, CLASSES))
    optimizer = torch.optim.SGD([centers], lr=0.5)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        if centers.grad is not None:
            optimizer.step()
            optimizer.zero_grad()
        z = model(batch[0])
        return per_record(z, batch) + batch[2] * (z - centers[batch[1]]).square().sum(1)

    return losses


def between_modules(model: nn.Module, batch: Any) -> Tensor:
    h = model.get_submodule("encoder")(batch[0])
    return per_record(model.get_submodule("head")(h - h.mean(0).detach()), batch)


def through_forward(model: nn.Module, batch: Any) -> Tensor:
    return per_record(model.forward(batch[0] - batch[0].mean(0)), batch)


def centered(model: nn.Module, batch: Any) -> Tensor:
    return per_record(model(batch[0] - batch[0].mean(0)), batch) if len(batch[0]) else plain(model, batch)


def scaled(model: nn.Module, batch: Any) -> Tensor:
    largest = batch[0].abs().max() if len(batch[0]) else 1.0
    return per_record(model(batch[0] / largest), batch)


def robust(model: nn.Module, batch: Any) -> Tensor:
    found = plain(model, batch)
    return found * torch.softmax(found.detach(), 0) * BATCH


def balanced(model: nn.Module, batch: Any) -> Tensor:
    counts = torch.bincount(batch[1], minlength=CLASSES)
    weights = torch.where(counts > 0, 1 / counts.clamp(min=1), 0.0)
    return plain(model, batch) * (weights / weights.sum().clamp(min=1e-9))[batch[1]] * CLASSES


def squared_mean(z: Tensor, batch: Any) -> Tensor:
    return per_record(z, batch).sum() + 30 * (batch[2].unsqueeze(1) * z).sum(0).div(BATCH).square().sum()


def log_of_mean(z: Tensor, batch: Any) -> Tensor:
    return BATCH * (per_record(z, batch).sum() / BATCH + 1e-3).log()


def variances(z: Tensor, batch: Any) -> Tensor:
    return per_record(z, batch).sum() - BATCH * (z.var(0) + 1e-3).sqrt().sum()


def hinges(z: Tensor, batch: Any) -> Tensor:
    return per_record(z, batch).sum() + (batch[2] * F.relu(1 + z[:, :1] - z[:, 1].unsqueeze(0))).sum()


# Name, form, loop, and whether the page says that clipless does not see it.
LOOPS: list[tuple[str, str, Train, bool]] = [
    ("sound", "private.step", by_step(lambda: plain), False),
    ("sound", "private.backward", by_backward(lambda: plain), False),
    ("sound", "loss.backward()", by_loss(lambda z, batch: per_record(z, batch).sum()), False),
    ("a squared mean of the outputs", "loss.backward()", by_loss(squared_mean), False),
    ("the logarithm of a mean", "loss.backward()", by_loss(log_of_mean), False),
    ("variances of the outputs", "loss.backward()", by_loss(variances), False),
    ("hinges of pairs", "loss.backward()", by_loss(hinges), True),
    ("the learning rate follows the training loss", "private.step", steered, True),
]
COUPLED: dict[str, tuple[Callable[[], Function], bool]] = {
    "batch statistics between modules": (lambda: between_modules, False),
    "batch statistics before model.forward(x)": (lambda: through_forward, False),
    "a center loss with its own optimizer": (trained_centers, False),
    "a running loss scale": (running_scale, True),
    "a feature queue": (feature_queue, True),
    "a moving center": (moving_center, True),
    "inputs centered by the batch": (lambda: centered, True),
    "inputs scaled by the batch": (lambda: scaled, True),
    "weights from other losses": (lambda: robust, True),
    "weights from other labels": (lambda: balanced, True),
}
for title, (function, unseen) in COUPLED.items():
    LOOPS.append((title, "private.backward", by_backward(function), unseen))
    LOOPS.append((title, "private.step", by_step(function), False))
LOOPS.append(
    ("padding to the longest record", "private.backward", by_backward(lambda: plain, Bag, sentences), True),
)
LOOPS.append(("padding to the longest record", "private.step", by_step(lambda: plain, Bag, sentences), False))
LOOPS.append(
    (
        "hinges of pairs",
        "private.step",
        by_step(lambda: lambda m, b: hinges(m(b[0]), b) / len(b[0]) + plain(m, b)),
        False,
    )
)


# Attacks.


def attacked(train: Train, runs: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The runs that are done, and at last the result: what refuses the loop, or how well runs are told apart."""
    final: dict[bool, list[np.ndarray[Any, Any]]] = {True: [], False: []}
    for number in range(2 * runs):
        for present in (True, False):
            try:
                final[present].append(train(present).double().numpy())
            except clipless.CliplessError as refusal:
                yield 4 * runs, {"refused": str(refusal).partition(". ")[0].partition(": ")[0]}
                return
        yield 2 * (number + 1), None
    choosing, telling = ({k: np.stack(v)[half] for k, v in final.items()} for half in (slice(runs), slice(runs, None)))
    direction = choosing[True].mean(0) - choosing[False].mean(0)
    spread = np.concatenate(list(choosing.values())).std(0) + 1e-12
    scores = {
        name: {k: v @ (direction / spread**2) for k, v in half.items()}
        for name, half in (("choosing", choosing), ("telling", telling))
    }
    thresholds = np.sort(np.concatenate(list(scores["choosing"].values())))
    gains = [(scores["choosing"][True] > t).mean() - (scores["choosing"][False] > t).mean() for t in thresholds]
    threshold = thresholds[int(np.argmax(gains))]
    hits, alarms = (int((scores["telling"][k] > threshold).sum()) for k in (True, False))
    each = 1 - (1 - CONFIDENCE) / 2
    least = 1 - float(clopper_pearson(runs - hits, runs, each)) - float(clopper_pearson(alarms, runs, each))
    rates = {"true_positives": hits, "false_positives": alarms, "runs": runs}
    yield 4 * runs, rates | {"gap": round((hits - alarms) / runs, 3), "least_gap": round(max(least, 0.0), 3)}


def table(rows: list[dict[str, Any]]) -> str:
    """The results in Markdown: a line for each loop, a column for each form."""
    forms = ("loss.backward()", "private.backward", "private.step")
    lines = ["| the loop has | " + " | ".join(f"`{form}`" for form in forms) + " |", "| --- |" + " --- |" * len(forms)]
    for name in dict.fromkeys(row["loop"] for row in rows):
        cells = {row["form"]: cell(row) for row in rows if row["loop"] == name}
        lines.append(f"| {name} | " + " | ".join(cells.get(form, "") for form in forms) + " |")
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    if "refused" in row:
        return "refused"
    gap = f"{row['gap']:.2f}"
    return f"**{gap}**, not seen" if row["least_gap"] > BOUND else gap


def write_page(rows: list[dict[str, Any]]) -> None:
    """Put the table between the two comments of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, default=60, help="runs with and without the record, for each half of an attack"
    )
    parser.add_argument("--only", help="loops whose name has this in it; writes nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [loop for loop in LOOPS if given.only is None or given.only in loop[0]]
    rows, began = [], time.monotonic()
    for number, (name, form, train, known) in enumerate(chosen, 1):
        result: dict[str, Any] = {}
        for done, found in attacked(train, given.runs):
            result = found or result
            share = (number - 1 + done / (4 * given.runs)) / len(chosen)
            left = (time.monotonic() - began) * (1 / share - 1)
            sys.stderr.write(f"\r{number} of {len(chosen)}: {name}, {form}; {done} runs, {left:.0f} s left \033[K")
        rows.append({"loop": name, "form": form, "stated": known} | result)
        sys.stdout.write(f"\r{json.dumps(rows[-1])}\033[K\n")
        sys.stdout.flush()
    claim = {"epsilon": EPSILON, "delta": DELTA, "bound": round(BOUND, 4), "confidence": CONFIDENCE}
    setting = {"records": RECORDS, "batch": BATCH, "steps": STEPS, "noise_multiplier": round(NOISE, 4)}
    wrong = [row for row in rows if row.get("least_gap", 0.0) > BOUND and not row["stated"]]
    if given.only is None:
        record = {"claim": claim, "setting": setting, "torch": torch.__version__, "loops": rows}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        write_page(rows)
    sys.stdout.write(f"{len(rows)} loops, {len(wrong)} above {BOUND:.2f} that the page does not name\n")
    sys.exit(1 if wrong else 0)


NOISE = clipless.noise_multiplier(
    epsilon=EPSILON, delta=DELTA, sample_rate=BATCH / RECORDS, steps=STEPS, accountant="pld"
)

if __name__ == "__main__":
    main()

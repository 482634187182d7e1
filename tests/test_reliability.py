"""Scores of predictions against closed forms, brute force and simulation; figures as files."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import clipless.reliability as reliability
from clipless.errors import InvalidArgument, InvalidType, Misuse
from clipless.reliability import accuracy, bins_of, bootstrap, brier, ece, ece_when_calibrated, mce, nll, report

METRICS = {"ece": ece, "mce": mce, "nll": nll, "brier": brier}


def predictions(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and labels drawn from them: perfectly calibrated."""
    draws = np.random.default_rng(seed)
    table = draws.dirichlet(np.full(classes, 0.7), size=count)
    labels = (draws.random(count)[:, None] > table.cumsum(1)).sum(1).clip(max=classes - 1)
    return table, labels


def binary(confidence: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predictions of class 0 with a given confidence, right or wrong."""
    return np.stack([confidence, 1 - confidence], 1), np.where(right, 0, 1)


def slow_ece(table: np.ndarray, labels: np.ndarray, bins: int) -> tuple[float, float]:
    """ECE and MCE straight from the definition, a record and a bin at a time."""
    total, worst = 0.0, 0.0
    for bin in range(bins):
        inside = [
            (max(row), int(np.argmax(row)) == label)
            for row, label in zip(table, labels, strict=True)
            if bin / bins < max(row) <= (bin + 1) / bins
        ]
        if inside:
            gap = abs(sum(c for c, _ in inside) - sum(right for _, right in inside)) / len(inside)
            total, worst = total + gap * len(inside) / len(labels), max(worst, gap)
    return total, worst


@given(count=st.integers(1, 40), classes=st.integers(2, 5), bins=st.integers(1, 20), seed=st.integers(0, 99))
def test_ece_and_mce_are_what_the_definition_says(count: int, classes: int, bins: int, seed: int) -> None:
    table, labels = predictions(count, classes, seed)
    assert (ece(table, labels, bins), mce(table, labels, bins)) == pytest.approx(slow_ece(table, labels, bins))


def test_a_confidence_on_an_edge_belongs_to_the_lower_bin() -> None:
    table, labels = binary(np.array([0.5, 0.75, 0.76, 1.0]), np.array([True, True, False, True]))
    assert bins_of(table, labels, bins=4).counts.tolist() == [0, 1, 1, 2]
    np.testing.assert_allclose(bins_of(table, labels, bins=4).confidence[1:], [0.5, 0.75, 0.88])


def test_nll_and_brier_are_what_the_definition_says() -> None:
    table, labels = predictions(50, 4, 0)
    truth = np.eye(4)[labels]
    assert nll(table, labels) == pytest.approx(float(-(truth * np.log(table)).sum() / 50))
    assert brier(table, labels) == pytest.approx(float(((table - truth) ** 2).sum() / 50))
    assert nll([[1.0, 0.0]], [0]) == 0.0
    assert nll([[1.0, 0.0]], [1]) == math.inf


@pytest.mark.parametrize("adaptive", [False, True])
def test_calibrated_predictions_have_the_ece_of_the_known_bias(adaptive: bool) -> None:
    """The mean of 200 data sets within four standard errors: a false alarm in 15,000 seeds."""
    found = []
    for seed in range(200):
        table, labels = predictions(2000, 5, seed)
        found.append(ece(table, labels, adaptive=adaptive) - ece_when_calibrated(table, adaptive=adaptive))
    assert abs(np.mean(found)) < 4 * np.std(found) / math.sqrt(200) + 1e-4, "1e-4: the bins are not quite normal"
    assert ece_when_calibrated(table, adaptive=adaptive) > 0.01


def test_known_miscalibration_has_its_closed_form() -> None:
    """Confidence c uniform on [½, 1] and accuracy c²: ECE is 2∫(c − c²)dc = 1/6, for any bins. Five standard errors."""
    draws = np.random.default_rng(3)
    confidence = draws.uniform(0.5, 1, 400_000)
    table, labels = binary(confidence, draws.random(len(confidence)) < confidence**2)
    error = 5 * 0.5 / math.sqrt(len(confidence))
    for bins in (5, 15, 50):
        assert ece(table, labels, bins) == pytest.approx(1 / 6, abs=error)
        assert ece(table, labels, bins, adaptive=True) == pytest.approx(1 / 6, abs=error)
    assert mce(table, labels, 15) == pytest.approx(0.25, abs=0.01), "at c = ½ the gap is ¼"


def test_brier_and_nll_of_a_calibrated_model_have_their_closed_form() -> None:
    """c uniform on [½, 1]: E 2c(1−c) = 1/3, and the mean entropy; five standard errors."""
    draws = np.random.default_rng(4)
    confidence = draws.uniform(0.5, 1, 200_000)
    table, labels = binary(confidence, draws.random(len(confidence)) < confidence)
    grid = np.linspace(0.5, 1, 100_001)[:-1]
    entropy = -(grid * np.log(grid) + (1 - grid) * np.log1p(-grid)).mean()
    assert brier(table, labels) == pytest.approx(1 / 3, abs=5 * 0.6 / math.sqrt(len(labels)))
    assert nll(table, labels) == pytest.approx(entropy, abs=5 * 0.7 / math.sqrt(len(labels)))


def test_adaptive_bins_are_equally_full_and_keep_ties_together() -> None:
    table, labels = predictions(1003, 3, 5)
    counts = bins_of(table, labels, 15, adaptive=True).counts
    assert counts.sum() == 1003
    assert counts.max() - counts.min() <= 1
    tied = np.concatenate([np.full(500, 0.9), np.linspace(0.5, 0.8, 100)])
    found = binary(tied, np.arange(600) % 2 == 0)
    order = np.random.default_rng(0).permutation(600)
    assert bins_of(*found, 15, adaptive=True).counts.max() >= 500
    assert ece(*found, adaptive=True) == pytest.approx(ece(found[0][order], found[1][order], adaptive=True))


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_arrays_tensors_and_lists_give_the_same(metric: Callable[..., float]) -> None:
    table, labels = predictions(60, 3, 6)
    expected = metric(table, labels)
    assert metric(table.tolist(), labels.tolist()) == pytest.approx(expected)
    assert metric(torch.tensor(table, requires_grad=True), torch.tensor(labels)) == pytest.approx(expected)
    assert metric(torch.tensor(table).bfloat16(), torch.tensor(labels)) == pytest.approx(expected, abs=0.05)
    halves = table[:, :2] / table[:, :2].sum(1, keepdims=True)
    scale = 0.5 if metric is brier else 1.0
    assert metric(halves[:, 1], labels % 2) == pytest.approx(scale * metric(halves, labels % 2))


@pytest.mark.parametrize(
    ("probabilities", "labels", "words"),
    [
        ([[3.0, -1.0]], [0], "softmax"),
        ([[0.7, 0.7]], [0], "sum to 1"),
        ([[math.nan, 1.0]], [0], "softmax"),
        ([[0.5, 0.5]], [2], "0 … 1"),
        ([[0.5, 0.5]], [-1], "0 … 1"),
        ([[0.5, 0.5]], [0.0], "whole numbers"),
        ([[0.5, 0.5]], [[1, 0]], "one per row"),
        ([[0.5, 0.5]], [0, 1], "one per row"),
        ([[1.0]], [0], "one column"),
        (np.zeros((0, 2)), np.zeros(0, int), "no rows"),
        ("half", [0], "numbers"),
    ],
)
@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_what_cannot_be_meant_is_refused(
    metric: Callable[..., float], probabilities: object, labels: object, words: str
) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match=words):
        metric(probabilities, labels)


@pytest.mark.parametrize("bins", [0, -1, 2.5, True])
def test_bins_are_a_whole_number(bins: object) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="bins"):
        ece([[0.5, 0.5]], [0], bins=bins)  # type: ignore[arg-type]


@pytest.mark.parametrize(("metric", "truth"), [(brier, 1 / 3), (ece, 1 / 6)], ids=["brier", "ece"])
def test_intervals_cover_the_truth_as_often_as_they_say(metric: Callable[..., float], truth: float) -> None:
    """100 data sets, 90 % intervals: 80 to 98 of them cover, a false alarm in 300 if 90 % do; seeds are fixed."""
    covered = 0
    for seed in range(100):
        draws = np.random.default_rng(seed)
        confidence = draws.uniform(0.5, 1, 600)
        right = draws.random(600) < (confidence**2 if metric is ece else confidence)
        found = bootstrap(metric, *binary(confidence, right), level=0.9, resamples=100, seed=seed)
        covered += found.low <= truth <= found.high
    assert 80 <= covered <= 98


def test_interval_takes_the_bias_of_ece_away() -> None:
    """Calibrated, so the truth is 0: reflected at the value, quantiles of resamples that all lie above it reach 0."""
    table, labels = predictions(300, 3, 11)
    found, draws = bootstrap(ece, table, labels, level=0.8, resamples=60, seed=5), np.random.default_rng(5)
    chosen = [draws.integers(300, size=300) for _ in range(60)]
    lower, upper = np.quantile([ece(table[c], labels[c]) for c in chosen], [0.1, 0.9])
    assert found.value == ece(table, labels)
    assert (found.low, found.high) == pytest.approx((max(0, 2 * found.value - upper), 2 * found.value - lower))
    assert found.low < lower / 2


def test_interval_is_the_same_for_the_same_seed_and_narrows_with_records() -> None:
    small, large = predictions(200, 3, 7), predictions(3200, 3, 7)
    assert bootstrap(nll, *small, resamples=50) == bootstrap(nll, *small, resamples=50)
    widths = [f.high - f.low for f in (bootstrap(nll, *each, resamples=200) for each in (small, large))]
    assert 2.5 < widths[0] / widths[1] < 6.5
    assert bootstrap(nll, [[1.0, 0.0]] * 3, [0, 1, 0], resamples=5).high == math.inf
    with pytest.raises(InvalidArgument, match="level"):
        bootstrap(nll, *small, level=95)


def test_report_says_which_records_it_judges() -> None:
    table, labels = predictions(300, 3, 8)
    found = report(table, labels, resamples=20)
    assert "on 300 test records" in str(found)
    assert found.private
    assert found.intervals["nll"].value == found.nll == nll(table, labels)
    assert json.loads(json.dumps(found.to_dict()))["records"] == "test"
    sure = report([[0.9, 0.1]] * 40, [0] * 39 + [1], resamples=50)
    assert sure.intervals["accuracy"].high == 1.0, "a share is not above 1"
    private = report(table, labels, records="train")
    assert "NOT PRIVATE" in str(private)
    assert not private.private
    with pytest.raises(InvalidArgument, match="test"):
        report(table, labels, records="tset")


def test_predictions_of_any_model_and_loader() -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(50, 6, generator=generator), torch.randint(0, 3, (50,), generator=generator))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    model[0].eval()
    table, labels = reliability.predictions(model, DataLoader(data, batch_size=16))
    assert [module.training for module in model.modules()] == [True, False, True, True], "modes are left as they were"
    with torch.no_grad():  # without the dropout
        logits = model[2](model[0](data.tensors[0])).double()
    np.testing.assert_allclose(table, logits.softmax(1).numpy(), rtol=1e-6)
    assert accuracy(table, labels) == float((logits.argmax(1) == data.tensors[1]).double().mean())
    one = torch.nn.Linear(6, 1)
    both, _ = reliability.predictions(one, DataLoader(data, batch_size=16))
    np.testing.assert_allclose(both[:, 1], one(data.tensors[0]).flatten().sigmoid().detach().numpy(), rtol=1e-5)
    with pytest.raises(InvalidArgument, match="no batches"):
        reliability.predictions(model, [])
    with pytest.raises(InvalidArgument, match=r"\(inputs, labels\)"):
        reliability.predictions(model, [{"x": data.tensors[0], "y": data.tensors[1]}])


def test_training_batches_are_refused() -> None:
    import clipless

    model = torch.nn.Linear(2, 2)
    data = TensorDataset(torch.zeros(20, 2), torch.zeros(20, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = clipless.make_private(model, optimizer, data, noise_multiplier=1.0, batch_size=4, epochs=1, delta=1e-3)
    with pytest.raises(Misuse, match="test records"):
        reliability.predictions(model, private.loader)
    private.detach()


def test_figures_show_every_run_and_say_where_they_come_from(tmp_path: Path) -> None:
    runs = {"abadi": predictions(300, 3, 9), "global": predictions(300, 3, 10)}
    figure = reliability.compare(runs, tmp_path / "new" / "runs.png")
    curve, confident, true = figure.axes
    legend = [text.get_text() for text in curve.get_legend().get_texts()]
    assert [name.split(":")[0] for name in legend] == ["perfectly calibrated", "abadi", "global"]
    assert "300 test records" in figure.get_supxlabel()
    assert (tmp_path / "new" / "runs.png").read_bytes().startswith(b"\x89PNG")
    for axes in (confident, true):
        for outline in axes.patches:
            heights = outline.get_path().vertices[:, 1]
            assert heights[1:-1:2].sum() == pytest.approx(1.0), "shares of all records"
    single = reliability.diagram(*runs["abadi"], adaptive=True, records="train")
    assert "NOT PRIVATE" in single.get_supxlabel()
    with pytest.raises(InvalidArgument, match="no run"):
        reliability.compare({})
    with pytest.raises(InvalidArgument, match=".svg"):
        reliability.diagram(*runs["abadi"], path=tmp_path / "picture.bmp")


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "reliability.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.randn(30, 4), torch.randint(0, 3, (30,)))
    p2, y2 = predictions(30, 3, 12)
    names = {"model": torch.nn.Linear(4, 3), "test_loader": DataLoader(data, batch_size=10), "p2": p2, "y2": y2}
    exec(compile(block.replace("1000", "20"), "docs/reliability.md", "exec"), dict(names))
    assert "on 30 test records" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"runs.png", "abadi.png"}

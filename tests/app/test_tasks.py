"""Training beyond classes: numbers, labels, texts and language models, and how a run's settings act."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import clipless
from clipless.app import models
from clipless.app.data import Data
from clipless.app.data.dataset import make_data, make_targets, make_texts
from clipless.app.training import LR_SCHEDULES, TASKS, TrainingProgress, TrainingSettings, evaluate, train
from clipless.app.training.settings import lr_factor
from clipless.errors import InvalidArgument

RNG = np.random.default_rng(0)
RECORDS, LENGTH, VOCABULARY = 120, 12, 20
QUICK = TrainingSettings(model="linear", epochs=2, batch_size=30, seed=1, lr=0.1)


def numbers() -> Data:
    x = RNG.normal(size=(RECORDS, 4))
    y = x @ np.array([[1.0], [-2.0], [0.5], [0.0]]) + 3
    return make_targets("lines", (x, y), (x[:40], y[:40]), "numbers")


def labels() -> Data:
    x = RNG.normal(size=(RECORDS, 4))
    return make_targets("signs", (x, x[:, :3] > 0), (x[:40], x[:40, :3] > 0), "labels")


def sentences() -> Data:
    tokens = RNG.integers(1, VOCABULARY, (RECORDS, LENGTH))
    tokens[::3, 7:] = 0
    y = (tokens[:, 0] > VOCABULARY // 2).astype(np.int64)
    return make_texts("words", (tokens, y), (tokens[:40], y[:40]), 2, VOCABULARY)


def language() -> Data:
    tokens = RNG.integers(1, VOCABULARY, (RECORDS, LENGTH + 1))
    x, y = tokens[:, :-1], tokens[:, 1:].copy()
    y[::2, 5:] = -100
    return make_texts("language", (x, y), (x[:40], y[:40]), VOCABULARY, VOCABULARY, "tokens")


CASES = {
    "numbers": (numbers, "global-mlp"),
    "labels": (labels, "mlp"),
    "bag": (sentences, "bag"),
    "lstm": (sentences, "lstm"),
    "encoder": (sentences, "encoder"),
    "decoder": (language, "decoder"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_model_and_its_loss_keep_the_declared_sensitivity(case: str) -> None:
    make, model = CASES[case]
    data = make()
    torch.manual_seed(0)
    losses = TASKS[data.task].losses
    built = models.build(model, data.shape, data.classes, data.vocabulary)
    batch = tuple(tensor[:6] for tensor in data.train.tensors)
    report = clipless.check(built, lambda m, b: losses(m(b[0]), b[1]), batch, clipping="auto-s")
    assert report.sound, str(report)


@pytest.mark.parametrize("case", CASES)
def test_every_task_trains_privately_and_is_tested_by_its_own_metric(case: str) -> None:
    make, model = CASES[case]
    data = make()
    result = train(data, replace(QUICK, model=model, epochs=1, optimizer="adam", lr=0.001))
    metrics = result.metrics()
    assert metrics[f"test_{TASKS[data.task].metric}"] == result.score == result.scores[-1]
    assert result.epsilon is not None
    assert result.epsilon <= 3.0
    assert set(result.record()["not_private"]) > {
        f"metrics.test_{result.metric}",
        f"metrics.test_{result.metric}_per_epoch",
    }
    assert result.score == evaluate(result.model, data.test, TASKS[data.task])


@pytest.mark.parametrize("case", ["numbers", "labels", "decoder"])
def test_the_loss_of_a_record_does_not_depend_on_the_others(case: str) -> None:
    make, model = CASES[case]
    data = make()
    built = models.build(model, data.shape, data.classes, data.vocabulary)
    x, y = (tensor[:8] for tensor in data.train.tensors)
    losses = TASKS[data.task].losses
    together = losses(built(x), y)
    assert together.shape == (8,)
    alone = torch.cat([losses(built(x[k : k + 1]), y[k : k + 1]) for k in range(8)])
    assert torch.allclose(together, alone, atol=1e-5)


def test_metrics_by_hand() -> None:
    y = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert TASKS["labels"].measure(torch.tensor([[2.0, -1.0], [-2.0, 3.0]]), y) == (3.0, 4)
    assert TASKS["numbers"].measure(torch.tensor([[1.0], [5.0]]), torch.tensor([[2.0], [3.0]])) == (5.0, 2)
    total, count = TASKS["tokens"].measure(torch.zeros(1, 3, 4), torch.tensor([[1, -100, 2]]))
    assert (total, count) == (pytest.approx(2 * np.log(4)), 2.0)
    assert [TASKS[name].merit(2.0) for name in ("classes", "numbers")] == [2.0, -2.0]


def test_numbers_are_learned() -> None:
    """Far below the variance of the targets, which a constant would leave."""
    result = train(numbers(), replace(QUICK, clipping="none", epochs=30, lr=0.05))
    assert result.score < 0.1


def test_a_model_for_tokens_is_refused_on_numbers_and_the_reverse() -> None:
    with pytest.raises(InvalidArgument, match="made for tokens, and the records are numbers"):
        models.build("lstm", (4,), 2)
    with pytest.raises(InvalidArgument, match="made for numbers, and the records are tokens"):
        models.build("mlp", (4,), 2, 20)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("cnn", (1, 28, 28), 10, 26_010),
        ("cnn-relu", (1, 28, 28), 10, 26_010),
        ("dc-cnn", (1, 28, 28), 10, 28_058),
        ("cifar-cnn", (3, 32, 32), 10, 62_006),
        ("global-mlp", (11,), 1, 11 * 64 + 64 + 64 * 64 + 64 + 64 * 32 + 32 + 33),
    ],
)
def test_the_papers_networks_have_the_papers_sizes(
    name: str, shape: tuple[int, ...], classes: int, parameters: int
) -> None:
    built = models.build(name, shape, classes)
    assert sum(p.numel() for p in built.parameters()) == parameters
    assert built(torch.zeros(2, *shape)).shape == (2, classes)


def blobs() -> Data:
    y = np.arange(RECORDS) % 3
    x = RNG.normal(size=(RECORDS, 4)) + np.eye(3, 4)[y] * 4
    return make_data("blobs", (x, y), (x[:30], y[:30]))


def weights(settings: TrainingSettings) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in train(blobs_once, settings).model.parameters()])


blobs_once = blobs()


@pytest.mark.parametrize(
    "change",
    [
        {"lr_schedule": "linear"},
        {"lr_schedule": "cosine"},
        {"momentum": 0.0},
        {"weight_decay": 0.5},
        {"averaging": 0.9},
        {"noise_multiplier": 9.0},
        {"clipping": "auto-s(threshold=0.5)"},
        {"clipping": "abadi(threshold=0.5)", "unit_gradients": True},
    ],
    ids=str,
)
def test_every_setting_acts(change: dict[str, object]) -> None:
    base = replace(QUICK, clipping="abadi(threshold=0.5)") if "unit_gradients" in change else QUICK
    assert not torch.allclose(weights(base), weights(replace(base, **change)))  # type: ignore[arg-type]


@pytest.mark.parametrize("clipping", ["none", "auto-s"])
def test_the_scores_of_a_run_with_averages_are_those_of_the_average(clipping: str) -> None:
    last: list[float] = []
    data = numbers()

    def look(model: nn.Module, progress: TrainingProgress) -> None:
        last.append(evaluate(model, data.test, TASKS[data.task]))

    result = train(data, replace(QUICK, clipping=clipping, averaging=0.9), research=look)
    assert result.scores[-1] == evaluate(result.model, data.test, TASKS[data.task])
    assert all(score != of_last for score, of_last in zip(result.scores, last[1:], strict=True))
    assert len(result.scores) == 2


def test_the_last_step_of_a_linear_schedule_is_the_shortest() -> None:
    settings = TrainingSettings(lr_schedule="linear")
    assert [lr_factor(settings, step, 4) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert [LR_SCHEDULES["cosine"](done) for done in (0.0, 0.5)] == pytest.approx([1.0, 0.5])


def test_tests_are_made_as_often_as_asked_and_at_the_end() -> None:
    assert len(train(blobs_once, replace(QUICK, epochs=5, test_every=2)).scores) == 3
    assert len(train(blobs_once, replace(QUICK, epochs=4, test_every=2)).scores) == 2


def test_research_sees_the_model_before_training_and_after_each_test() -> None:
    seen: list[int] = []

    def look(model: nn.Module, progress: TrainingProgress) -> None:
        seen.append(progress.step)

    watched = train(blobs_once, QUICK, research=look)
    assert seen == [0, 4, 8]
    assert watched.score == train(blobs_once, QUICK).score


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"momentum": 0.5, "optimizer": "adam"}, "momentum is sgd's"),
        ({"momentum": 1.0}, "from 0 to below 1"),
        ({"averaging": 1.5}, "from 0 to below 1"),
        ({"weight_decay": -1.0}, "weight_decay is -1"),
        ({"lr_schedule": "step"}, "lr_schedule"),
        ({"test_every": 0}, "test_every is 0"),
        ({"clipping": "dc-p(percentile=2)"}, "percentile"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        train(blobs_once, replace(QUICK, **change))  # type: ignore[arg-type]

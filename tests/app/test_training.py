"""The training loop and the files it leaves, on a data set small enough for seconds."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from clipless.app import training
from clipless.app.data import Data, load
from clipless.app.data.dataset import make_data
from clipless.app.training import OPTIMIZERS, Result, TrainingProgress, TrainingSettings, save_run, train
from clipless.app.training.saving import Saving
from clipless.clipping import CLIPPINGS
from clipless.errors import CliplessError, InvalidArgument
from clipless.noise import NoiseSource, noise_source
from clipless.noise.keys import keys_of
from clipless.runs.checkpoint import read_checkpoint
from clipless.runs.run_folder import RunFolder

QUICK = TrainingSettings(model="linear", epochs=2, batch_size=32, seed=1)


@pytest.fixture(scope="module")
def data() -> Data:
    """Three well separated classes in eight dimensions."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 3
    features = 3 * torch.eye(3, 8)[labels] + torch.randn(120, 8, generator=generator)
    x, y = features.numpy(), labels.numpy()
    return make_data("blobs", (x[:96], y[:96]), (x[96:], y[96:]))


def weights(result: Result) -> Tensor:
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


@pytest.mark.parametrize("clipping", ["none", *CLIPPINGS])
def test_run_reports_what_it_promises(data: Data, clipping: str) -> None:
    result = train(data, replace(QUICK, clipping=clipping))
    private = clipping != "none"
    assert len(result.scores) == 2
    assert result.score == result.scores[-1] == training.accuracy(result.model, data.test)
    assert result.steps == 6
    assert (result.plan is not None) == (result.ledger is not None) == private
    if private:
        assert result.epsilon is not None
        assert 0 < result.epsilon <= 3.0
        assert result.delta == 1e-5
    else:
        assert result.epsilon is None
        assert result.delta is None


@pytest.mark.parametrize("clipping", ["none", "auto-s"])
def test_learns_when_the_budget_allows(data: Data, clipping: str) -> None:
    assert train(data, replace(QUICK, clipping=clipping, epsilon=50.0, epochs=10, lr=0.3)).score > 0.9


def test_stronger_privacy_is_less_accurate_or_noisier(data: Data) -> None:
    loose, tight = (train(data, replace(QUICK, epsilon=epsilon)) for epsilon in (50.0, 0.1))
    assert weights(tight).norm() > weights(loose).norm()


@pytest.mark.parametrize("clipping", ["none", "auto-s"])
def test_seed_repeats_a_run_and_nothing_else_does(data: Data, clipping: str) -> None:
    torch.manual_seed(5)
    first = train(data, replace(QUICK, clipping=clipping))
    torch.manual_seed(6)
    again, other, fresh = (train(data, replace(QUICK, clipping=clipping, seed=seed)) for seed in (1, 2, None))
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))
    torch.manual_seed(6)
    assert not torch.equal(weights(fresh), weights(train(data, replace(QUICK, clipping=clipping, seed=None))))


@pytest.mark.parametrize("seed", [2**32, 2**40 + 1, 2**120 + 3])
def test_noise_takes_a_seed_of_more_than_32_bits_whole(data: Data, seed: int, tmp_path: Path) -> None:
    """Of 32 bits each number can be tried; the noise is that of the whole seed, bit for bit."""
    train(data, replace(QUICK, epochs=1, seed=seed), saving=Saving(tmp_path, every=0))
    noise = read_checkpoint(tmp_path / "checkpoint.pt").private["noise"]
    zeros = [torch.zeros(9)]
    for place in (0, 3):
        expected = noise_source(seed=seed).release("gradient", place, zeros, [1.0])[0]
        found = NoiseSource("seeded", keys_of(noise)).release("gradient", place, zeros, [1.0])[0]
        assert torch.equal(found, expected)


def test_global_generator_is_left_alone(data: Data) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    train(data, QUICK)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_moves_the_weights(data: Data, optimizer: str) -> None:
    result = train(data, replace(QUICK, optimizer=optimizer, epochs=1))
    assert weights(result).isfinite().all()
    smaller = train(data, replace(QUICK, optimizer=optimizer, epochs=1, lr=1e-6))
    assert not torch.allclose(weights(result), weights(smaller), atol=1e-4)


def test_progress_counts_steps_and_knows_epsilon_after_an_epoch(data: Data) -> None:
    seen: list[TrainingProgress] = []
    result = train(data, QUICK, on_progress=seen.append)
    assert [p.step for p in seen] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert {p.steps for p in seen} == {6}
    assert (seen[0].epsilon, seen[0].score) == (None, None)
    assert tuple(p.score for p in (seen[3], seen[-1])) == result.scores
    assert seen[3].epsilon is not None
    assert result.epsilon is not None
    assert 0 < seen[3].epsilon < result.epsilon
    assert seen[-1].epsilon == result.epsilon


def test_number_of_threads_is_left_alone(data: Data) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train(data, QUICK)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_hooks_are_gone_afterwards(data: Data) -> None:
    model = train(data, QUICK).model
    model(data.train.tensors[0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"model": "mpl"}, "did you mean 'mlp'"),
        ({"clipping": "auto"}, "did you mean 'auto-"),
        ({"accountant": "plt"}, "did you mean 'pld'"),
        ({"clipping": "non"}, "did you mean 'none'.*'auto-s'.*'none'"),
        ({"epochs": 0}, "at least one"),
        ({"batch_size": 0}, "from 1 to the 96"),
        ({"batch_size": 97}, "from 1 to the 96"),
        ({"lr": 0.0}, "positive"),
        ({"lr": float("nan")}, "positive"),
        ({"seed": -1}, "seed"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant_are_refused(data: Data, changes: dict[str, object], message: str) -> None:
    with pytest.raises(CliplessError, match=message):
        train(data, replace(QUICK, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("clipping", ["none", "auto-s"])
def test_saved_run_is_complete_and_loads(data: Data, tmp_path: Path, clipping: str) -> None:
    result = train(data, replace(QUICK, clipping=clipping))
    path = save_run(result, tmp_path / "new" / "folder")
    run = json.loads(path.read_text())
    assert run["private"] == (clipping != "none")
    assert run["arguments"]["clipping"] == clipping
    assert run["metrics"]["test_accuracy"] == result.score
    assert [run["plan"], run["ledger"]] == json.loads(json.dumps([result.plan, result.ledger]))
    assert {"clipless", "torch", "python"} <= set(run["versions"])
    assert all(name.split(".")[0] in run for name in run["not_private"])
    copy = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
    copy.load_state_dict(torch.load(path.with_name("model.pt"), weights_only=True))
    assert training.accuracy(copy, data.test) == result.score


@pytest.mark.parametrize(("clipping", "accountant"), [("auto-s", "gdp"), ("auto-s", "pld"), ("none", "gdp")])
def test_a_saved_run_says_whether_its_epsilon_is_an_approximation(
    data: Data, tmp_path: Path, clipping: str, accountant: str
) -> None:
    result = train(data, replace(QUICK, clipping=clipping, accountant=accountant, epochs=1))
    run = json.loads(save_run(result, tmp_path).read_text())
    assert run["approximation"] is ((clipping, accountant) == ("auto-s", "gdp"))
    assert ["may understate epsilon" in note for note in run["notes"]] == [True] * run["approximation"]


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_a_seed_is_called_known_only_if_there_is_one(data: Data, tmp_path: Path, seed: int | None) -> None:
    run = json.loads(save_run(train(data, replace(QUICK, seed=seed, epochs=1)), tmp_path).read_text())
    assert run["arguments"]["seed"] == seed
    assert ("arguments.seed" in run["not_private"]) == (seed is not None)


def test_only_what_may_be_shown_is_reported(data: Data, tmp_path: Path) -> None:
    run = json.loads(save_run(train(data, QUICK), tmp_path).read_text())
    public = {"epsilon", "delta", "steps", "seconds", "parameters"}
    assert set(run["metrics"]) == public | {"test_accuracy", "test_accuracy_per_epoch"}
    assert {f"metrics.{name}" for name in set(run["metrics"]) - public} < set(run["not_private"])
    shown = {"step", "steps", "epsilon", "score", "threshold", "tested"}
    assert {field.name for field in fields(TrainingProgress)} == shown


def test_earlier_runs_are_kept(data: Data, tmp_path: Path) -> None:
    results = [train(data, replace(QUICK, seed=seed, epochs=1)) for seed in range(3)]
    for result in results:
        save_run(result, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run.json", "run.1.json", "run.2.json", "model.pt", "model.1.pt", "model.2.pt"}
    seeds = [json.loads((tmp_path / f"run{n}.json").read_text())["arguments"]["seed"] for n in (".1", ".2", "")]
    assert seeds == [0, 1, 2]


def test_folder_that_cannot_be_written_is_refused(data: Data, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="Choose another folder"):
        RunFolder(tmp_path / "file").check_writable()
    with pytest.raises(InvalidArgument, match="Choose another folder"):
        save_run(train(data, replace(QUICK, clipping="none", epochs=1)), tmp_path / "file" / "inside")


def test_accuracy_restores_the_mode_and_splits_nothing_away() -> None:
    digits = load("digits")
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    whole, parts = training.accuracy(model, digits.test), training.accuracy(model, digits.test, batch_size=7)
    assert whole == parts
    assert model.training


def test_what_a_policy_released_is_kept_with_the_run(data: Data, tmp_path: Path) -> None:
    thresholds: list[float | None] = []
    result = train(data, replace(QUICK, clipping="dc-e"), lambda progress: thresholds.append(progress.threshold))
    record = json.loads(save_run(result, tmp_path).read_text())
    assert len(record["history"]["thresholds"]) == result.steps
    assert len(record["history"]["statistic"][0][0]) == 20
    assert thresholds[-1] == pytest.approx(record["history"]["thresholds"][-1][0][0])
    assert len(set(thresholds)) > 1

"""clipless.check tells sound models from unsound ones, by what they do."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipless
from problems import PROBLEMS, Problem, losses


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_every_problem_is_sound(problem: Problem) -> None:
    report = clipless.check(problem.model(), losses, problem.batch(5), clipping="abadi")
    report.raise_if_unsound()
    assert report.records == 5
    assert report.oracle_error < 1e-4
    assert 0 < report.largest_change <= report.sensitivity * (1 + 1e-4)
    assert {row.parameter for row in report.handling} == dict(problem.model().named_parameters()).keys()


def test_report_lists_how_each_parameter_is_handled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.LayerNorm(4), nn.Linear(4, 3))
    model[3].requires_grad_(False)
    report = clipless.check(model, losses, (torch.randn(4, 4), torch.zeros(4, dtype=torch.long)))
    how = {row.parameter: row.how for row in report.handling}
    assert how["0.weight"] == "linear"
    assert how["1.weight"] == "generic"
    assert how["2.weight"] == "layer norm"
    assert how["3.bias"] == "frozen"
    assert "sound" in str(report)


class Mixing(nn.Module):
    """Subtracts the mean over the batch: a record's output depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return out - out.mean(0)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(6, 4), torch.randint(3, (6,))


def test_a_model_that_mixes_records_is_unsound() -> None:
    report = clipless.check(Mixing(), losses, batch())
    assert not report.sound
    with pytest.raises(clipless.Unsound, match="mixes records"):
        report.raise_if_unsound()


def test_a_loss_that_mixes_records_is_unsound() -> None:
    def contrastive(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        out = F.normalize(model(data[0]), dim=1)
        return F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="none")

    with pytest.raises(clipless.Unsound, match="mixes records"):
        clipless.check(nn.Linear(4, 3), contrastive, batch()).raise_if_unsound()


def test_batch_norm_is_unsound_and_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    report = clipless.check(model, losses, batch())
    assert "1.running_mean" in report.changed_buffers
    assert torch.equal(model[1].running_mean, torch.zeros(3))
    with pytest.raises(clipless.Unsound, match="BatchNorm1d '1' mixes records"):
        report.raise_if_unsound()
    model.eval()
    clipless.check(model, losses, batch()).raise_if_unsound()


def test_a_buffer_that_follows_the_data_is_unsound() -> None:
    class Tracking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.largest.copy_(x.detach().abs().max())
            return self.inner(x)

    with pytest.raises(clipless.Unsound, match="buffer 'largest' changes"):
        clipless.check(Tracking(), losses, batch()).raise_if_unsound()


def test_dropout_does_not_disturb_the_comparison() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    clipless.check(model, losses, batch()).raise_if_unsound()
    assert model[1].p == 0.5

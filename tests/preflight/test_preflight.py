"""clipless.check tells sound models from unsound ones, by what they do."""

import copy
import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless.preflight import CheckReport
from problems import PROBLEMS, Branching, Problem, Unused, losses


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_every_problem_is_sound(problem: Problem) -> None:
    report = clipless.check(problem.model(), losses, problem.batch(5), clipping="abadi")
    report.raise_if_unsound()
    assert report.records == 5
    assert report.oracle_error < 1e-4
    assert 0 < report.largest_change <= report.sensitivity * (1 + 1e-4)
    assert {row.parameter for row in report.handling} == dict(problem.model().named_parameters()).keys()


def test_report_lists_how_each_parameter_is_handled() -> None:
    model = nn.Sequential(Branching(4), nn.Linear(4, 4), Unused(), nn.LayerNorm(3), nn.Linear(3, 3))
    model[4].requires_grad_(False)
    report = clipless.check(model, losses, batch())
    report.raise_if_unsound()
    how = {row.parameter: row.how for row in report.handling}
    assert how["1.weight"] == "linear"
    assert how["0.up"] == "generic"
    assert how["2.unused.weight"] == "unused"
    assert how["3.weight"] == "layer norm"
    assert how["4.bias"] == "frozen"


class Tied(nn.Module):
    """A parameter in no layer, and one that an embedding and a head share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.token, self.head = nn.Embedding(5, 4), nn.Parameter(torch.rand(1, 4)), nn.Linear(4, 5)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x).sum(1) + self.token))


def test_a_parameter_that_several_modules_share_names_all_their_rules() -> None:
    torch.manual_seed(0)
    report = clipless.check(Tied(), losses, (torch.randint(5, (6, 3)), torch.randint(5, (6,))))
    report.raise_if_unsound()
    how = {row.parameter: row.how for row in report.handling}
    assert how == {"token": "by operation", "table.weight": "linear + embedding", "head.bias": "linear"}


def test_report_is_a_table_with_verdicts() -> None:
    text = str(clipless.check(nn.Linear(4, 3), losses, batch()))
    assert re.search(r"^parameter +shape +handled by$", text, re.MULTILINE)
    assert re.search(r"^weight +3x4 +linear$", text, re.MULTILINE)
    assert re.search(r"^oracle agreement +holds: relative error .* over 6 records", text, re.MULTILINE)
    assert re.search(r"^remove one record +holds: the clipped sum moves by .*, sensitivity 1$", text, re.MULTILINE)
    assert re.search(r"^buffers +unchanged\n\nsound$", text, re.MULTILINE)


def test_report_of_a_refused_model_says_what_was_not_tested() -> None:
    report = clipless.check(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), losses, batch())
    text = str(report)
    assert re.search(r"^0\.weight +3x4 +linear$", text, re.MULTILINE)
    assert re.search(r"^oracle agreement +not tested$", text, re.MULTILINE)
    assert re.search(r"^remove one record +not tested$", text, re.MULTILINE)
    assert "buffers            1.running_mean, 1.running_var, 1.num_batches_tracked changed" in text
    assert "UNSOUND\nBatchNorm1d '1' mixes records, so no per-record bound exists. Replace it with GroupNorm" in text
    assert report.oracle_agreement is report.remove_one_record is None


def test_report_as_json() -> None:
    for model in (nn.Linear(4, 3), Mixing(), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))):
        report = clipless.check(model, losses, batch())
        record = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert record["sound"] == report.sound == (record["problems"] == [])
        assert record["oracle_agreement"] == report.oracle_agreement
        assert [row["parameter"] for row in record["parameters"]] == [name for name, _ in model.named_parameters()]
        assert record["parameters"][0]["shape"] == [3, 4]
    assert record["oracle_error"] is None
    assert record["parameters"][0] == {"parameter": "0.weight", "shape": [3, 4], "how": "linear"}


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


def test_mixing_breaks_both_verdicts() -> None:
    class Shouting(Mixing):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * x.sum()

    report = clipless.check(Shouting(), losses, batch(), clipping=clipless.abadi(threshold=1e3))
    assert report.oracle_agreement is False
    assert "BROKEN" in str(report)


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

    report = clipless.check(Tracking(), losses, batch())
    assert report.changed_buffers == ("largest",)
    with pytest.raises(clipless.Unsound, match="buffer 'largest' changes"):
        report.raise_if_unsound()


def test_dropout_does_not_disturb_the_comparison() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    clipless.check(model, losses, batch()).raise_if_unsound()
    assert model[1].p == 0.5


def test_functional_dropout_does_not_disturb_the_comparison() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.attention_dropout = nn.Linear(4, 3), 0.5

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.inner(x), self.attention_dropout, self.training)

    model = Dropping()
    clipless.check(model, losses, batch()).raise_if_unsound()
    assert model.attention_dropout == 0.5


@pytest.mark.parametrize(("records", "message"), [(0, "0 records cannot"), (1, "1 record cannot")])
def test_too_few_records_prove_nothing(records: int, message: str) -> None:
    x, y = batch()
    with pytest.raises(clipless.Unsound, match=f"{message} show whether records mix: check on a batch of two or more"):
        clipless.check(nn.Linear(4, 3), losses, (x[:records], y[:records])).raise_if_unsound()


def test_a_model_without_trainable_parameters_is_a_problem() -> None:
    with pytest.raises(clipless.Unsound, match="no trainable parameter"):
        clipless.check(nn.Linear(4, 3).requires_grad_(False), losses, batch()).raise_if_unsound()


def test_half_precision_is_judged_by_its_own_rounding() -> None:
    def mixed(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return losses(model, data)

    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
    report = clipless.check(model, mixed, batch())
    report.raise_if_unsound()
    assert report.tolerance == 2e-2


class Steep(nn.Module):
    """A sine of many turns: what float32 makes of a record's gradient depends on how it was rounded before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((1e5 * self.first(x)).sin())


class SinglePrecision(Steep):
    """Cannot be run in another type."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            super().forward(x + torch.ones(4, dtype=torch.float32)) if x.dtype == torch.float32 else x @ torch.ones(4)
        )


def test_an_ill_conditioned_model_is_judged_in_double_precision() -> None:
    torch.manual_seed(0)
    report = clipless.check(Steep(), losses, batch(), clipless.auto_v())
    report.raise_if_unsound()
    assert report.oracle_error < 1e-7
    rough = clipless.check(SinglePrecision(), losses, batch(), clipless.auto_v())
    assert rough.oracle_error > 1e-4
    assert rough.records == 6


@pytest.mark.parametrize("share", [0.02, 0.05])
def test_records_that_mix_a_little_are_unsound(share: float) -> None:
    class Slightly(Mixing):
        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            return out - share * out.mean(0)

    report = clipless.check(Slightly(), losses, batch())
    assert report.tolerance == 1e-3
    assert report.tolerance < report.oracle_error < 0.1
    assert report.oracle_agreement is False
    assert not report.sound


def test_every_record_is_removed_in_turn() -> None:
    """Only without the third record do the losses of the others change."""
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    x[:, 0] = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])

    def coupled(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[:, 0] * (1 + 5 * x[:, 0].sum())

    report = clipless.check(nn.Linear(4, 1), coupled, x, clipless.abadi(threshold=1e3))
    assert report.largest_change > 10


def test_what_clipping_hides_is_compared_without_it() -> None:
    """Losses that grow with the batch: every share is scaled to the same length."""
    torch.manual_seed(0)
    report = clipless.check(nn.Linear(4, 1), lambda model, x: model(x)[:, 0] * len(x), torch.randn(5, 4), "auto-v")
    assert report.remove_one_record is True
    assert report.oracle_agreement is False


def test_a_change_little_above_the_sensitivity_is_unsound() -> None:
    figures = {"handling": (), "records": 3, "oracle_error": 0.0, "changed_buffers": (), "problems": ()}
    for change, holds in ((1.0, True), (1.0005, True), (1.002, False), (1.05, False)):
        assert CheckReport(**figures, largest_change=change, sensitivity=1.0).remove_one_record is holds


def test_check_leaves_model_and_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    data, hooks = batch(), dict(model._forward_hooks)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    clipless.check(model, losses, data)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model._forward_hooks == hooks
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# make_private(..., check=...)


def private(model: nn.Module, check: object) -> clipless.Private:
    data, optimizer = TensorDataset(*batch()), torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"noise_multiplier": 1.0, "delta": 1e-2, "batch_size": 3, "steps": 2}
    return clipless.make_private(model, optimizer, data, **settings, check=check)


def test_make_private_checks_first() -> None:
    model = Mixing()
    with pytest.raises(clipless.Unsound, match="mixes records"):
        private(model, (losses, batch()))
    assert not model._forward_hooks
    private(model, None).detach()
    private(nn.Linear(4, 3), (losses, batch())).detach()


@pytest.mark.parametrize("check", [True, losses, (losses,), (batch(), losses), [losses, batch()]])
def test_make_private_wants_a_loss_and_a_batch(check: object) -> None:
    with pytest.raises(clipless.InvalidType, match=r"check must be a pair \(loss_fn, batch\)"):
        private(nn.Linear(4, 3), check)

"""Gradients in units of the step's threshold: the same releases, divided by a number that was released before."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipless
from clipless.clipping import CLIPPINGS, Clipping

RECORDS, BATCH, STEPS = 60, 20, 6


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(RECORDS, 5, generator=generator), torch.randint(3, (RECORDS,), generator=generator)
    )


def run(
    clipping: "str | Clipping | clipless.Schedule", unit: bool, lr: float = 0.0
) -> tuple[clipless.Private, list[Tensor], list[float]]:
    """A whole run, the gradients that the optimizer saw and the length of the threshold vector before each step. With a
    learning rate of 0 both kinds of run see the same weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    private = clipless.make_private(
        model, optimizer, records(), noise_multiplier=1.1, delta=1e-5, batch_size=BATCH, steps=STEPS,
        clipping=clipping, seed=7, unit_gradients=unit,
    )  # fmt: skip
    seen, thresholds = [], []
    for x, y in private.loader:
        thresholds.append(float(private.thresholds.norm()))
        optimizer.zero_grad()
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    private.detach()
    return private, seen, thresholds


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
@pytest.mark.parametrize("name", CLIPPINGS)
def test_the_release_is_divided_by_the_threshold_and_nothing_else_changes(name: str, groups: str) -> None:
    (plain, usual, thresholds), (unit, divided, same) = (
        run(CLIPPINGS[name](groups=groups), unit) for unit in (False, True)
    )
    assert unit.spent() == plain.spent()
    assert unit.ledger.events == plain.ledger.events
    assert unit.history.to_dict() == plain.history.to_dict()
    assert same == thresholds
    assert len(set(thresholds)) == (STEPS if plain.plan.thresholds_change else 1)
    for one, other, threshold in zip(usual, divided, thresholds, strict=True):
        assert torch.allclose(other, one / threshold, rtol=1e-5, atol=1e-9)
        assert float(one.norm()) > 0


def test_thresholds_of_phases_divide_their_own_steps() -> None:
    how = clipless.schedule([(0.5, clipless.abadi(4.0)), (0.5, clipless.global_(cutoff=10.0))])
    (_, usual, _), (_, divided, _) = (run(how, unit) for unit in (False, True))
    ratios = [float(one.norm() / other.norm()) for one, other in zip(usual, divided, strict=True)]
    assert ratios == pytest.approx([4.0] * 3 + [10.0] * 3, rel=1e-4)


@pytest.mark.parametrize("threshold", [0.01, 1.0, 100.0])
def test_the_learning_rate_means_the_same_at_every_threshold(threshold: float) -> None:
    """AUTO theorem 1 says how to rescale the learning rate; in units of the threshold there is nothing to rescale."""
    _, seen, _ = run(clipless.auto_s(threshold=threshold), True, lr=0.3)
    _, reference, _ = run(clipless.auto_s(), True, lr=0.3)
    assert all(torch.allclose(a, b, rtol=0.02, atol=2e-3) for a, b in zip(seen, reference, strict=True))


def test_the_plan_says_so_and_is_as_before_without() -> None:
    plain, unit = (run("auto-s", unit)[0].plan for unit in (False, True))
    assert unit.to_dict() == plain.to_dict() | {"unit_gradients": True}
    assert "units of the threshold" in str(unit)
    assert "units of the threshold" not in str(plain)
    assert json.loads(json.dumps(unit.to_dict()))["unit_gradients"] is True


def test_anything_but_true_and_false_is_refused() -> None:
    with pytest.raises(clipless.InvalidType, match="unit_gradients must be True or False"):
        run("auto-s", "yes")  # type: ignore[arg-type]


def test_a_threshold_without_room_for_noise_is_refused_in_units_too() -> None:
    """Divided by the threshold the noise is large enough, but it is added before."""
    with pytest.raises(clipless.InvalidArgument, match="noise"):
        run(clipless.abadi(1e-32), True)


def test_a_run_is_not_resumed_with_the_other_units(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": BATCH, "steps": STEPS}
    private = clipless.make_private(model, optimizer, records(), **arguments, unit_gradients=True)
    private.save_to(tmp_path / "ledger.jsonl")
    private.save_checkpoint(tmp_path / "checkpoint.pt")
    private.detach()
    again = clipless.make_private(model, optimizer, records(), **arguments)
    with pytest.raises(clipless.CliplessError, match="plan"):
        again.load_checkpoint(tmp_path / "checkpoint.pt")
    again.detach()

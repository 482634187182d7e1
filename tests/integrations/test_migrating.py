"""docs/migrating.md: both sides of every pair run, and spend and add up the same."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clipless

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the"),
    pytest.mark.filterwarnings("ignore:.*delta"),
]
PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
BEGINNING, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


PAIRS = {section.partition("\n")[0]: blocks(section) for section in SECTIONS}
TRAINED = [title for title in PAIRS if title not in ("Secure mode", "ModuleValidator")]
BATCH = torch.randn(12, 4, generator=torch.Generator().manual_seed(8)) * 3, torch.arange(12) % 3


def run(code: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "migrating"} if names is None else names
    exec(compile(code, "docs/migrating.md", "exec"), found)
    return found


def both(title: str) -> tuple[dict[str, Any], dict[str, Any]]:
    theirs, ours = (run(block, run(blocks(BEGINNING)[0])) for block in PAIRS[title])
    return theirs, ours


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def their_sums(names: dict[str, Any]) -> list[Tensor]:
    """What Opacus adds up on one batch, from the first weights on."""
    model, optimizer = names["model"], names["optimizer"]
    model._module.load_state_dict(names["build_model"]().state_dict())
    optimizer.zero_grad()
    if "criterion" in names:
        names["criterion"](model(BATCH[0]), BATCH[1]).backward()
        return [p.grad for p in optimizer.params]
    nn.functional.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    if names["title"] == "Adaptive clipping":
        optimizer.max_grad_norm = 1.0
    optimizer.clip_and_accumulate()
    return [p.summed_grad for p in optimizer.params]


def test_every_section_has_both_sides() -> None:
    assert len(PAIRS) == 10
    assert all(len(pair) == 2 and "# clipless" in pair[1] and "# Opacus" in pair[0] for pair in PAIRS.values())


@pytest.mark.parametrize("title", TRAINED)
def test_both_sides_spend_and_add_up_the_same(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs, ours = both(title)
    private = ours["private"]
    assert theirs["engine"].accountant.mechanism() == private.plan.accountant == "rdp"
    (_, rate, steps), (event, ours_steps) = theirs["engine"].accountant.history[0], private.ledger.events[0]
    assert (rate, steps) == (event.sample_rate, ours_steps)
    if title != "make_private_with_epsilon":
        assert theirs["optimizer"].noise_multiplier == pytest.approx(event.noise_multiplier)
    assert 0.98 * theirs["epsilon"] <= ours["epsilon"] <= 1.001 * theirs["epsilon"]
    expected = clipless.clipped_sum(ours["build_model"](), losses, BATCH, clipping=private.plan.clipping)
    assert bool((expected.norms > 1).any())
    found = their_sums(theirs | {"title": title})
    for value, wanted in zip(found, expected.grads.values(), strict=True):
        assert torch.allclose(value, wanted, atol=2e-6, rtol=1e-5)


def test_both_calibrate_to_the_same_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opacus stops its search within 0.01 of the target, below it."""
    monkeypatch.chdir(tmp_path)
    theirs, ours = both("make_private_with_epsilon")
    assert theirs["epsilon"] == pytest.approx(3.0, abs=0.011)
    assert ours["epsilon"] == pytest.approx(3.0, abs=0.011)
    assert ours["private"].plan.noise_multiplier == pytest.approx(theirs["optimizer"].noise_multiplier, rel=0.02)


def test_the_gradients_of_adaptive_clipping_have_the_same_noise() -> None:
    _, ours = both("Adaptive clipping")
    assert ours["private"].plan.gradient_multiplier == pytest.approx((1.1**-2 - 4.0**-2) ** -0.5)


def test_secure_mode(capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = PAIRS["Secure mode"]
    with pytest.raises(ImportError, match="torchcsprng"):
        run(theirs)
    run(ours, run(blocks(BEGINNING)[0]))
    assert capsys.readouterr().out == "secure\n"


def test_validators_replace_the_same_layers() -> None:
    theirs, ours = both("ModuleValidator")
    assert len(theirs["errors"]) == 1
    kinds = [[type(layer) for layer in found["model"]] for found in (theirs, ours)]
    assert kinds[0] == kinds[1] == [nn.Conv2d, nn.GroupNorm, nn.ReLU]

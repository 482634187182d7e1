"""Every kind of broken privacy that the audit claims to catch is caught, and sound training is not.

Seeds are fixed. Confidence is 0.999 for bounds and each test of the noise has a false-alarm rate of 1e-6 in all, so that a
sound library fails the second test for one seed in about 200 at most.
"""

import pytest
import zoo

SOUND = {
    "step": zoo.step(6400),
    "per layer": zoo.step(3200, clipping=zoo.PER_LAYER, layers=4),
    "sampled": zoo.step(1600, sample_rate=0.25, canaries=8),
    "statistic": zoo.step(100, clipping="dc-p"),
    "resumed": zoo.step(2560, resume_after=20),
    "model": zoo.mixing(120, zoo.plain),
}


@pytest.mark.parametrize("inmate", zoo.ZOO, ids=lambda inmate: inmate.name)
def test_sabotage_is_caught(inmate: zoo.Inmate, monkeypatch: pytest.MonkeyPatch) -> None:
    inmate.sabotage(monkeypatch)
    verdict = inmate.game()
    assert not verdict.sound
    assert inmate.by in zoo.gives_away(verdict)


@pytest.mark.parametrize("name", SOUND)
def test_sound_training_passes_the_same_games(name: str) -> None:
    verdict = SOUND[name]()
    assert zoo.gives_away(verdict) == set()
    assert verdict.sound


def test_batch_norm_is_refused_unless_the_refusal_is_sabotaged() -> None:
    with pytest.raises(zoo.clipless.UnsupportedModule, match="mixes records"):
        zoo.mixing(120)()

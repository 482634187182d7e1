"""Features from patches: what they promise of single images, and of the dictionary they are made of."""

import math
from collections.abc import Iterator

import pytest
import torch

from clipless.app.data import patches
from clipless.errors import InvalidArgument

CHANNELS = sorted(patches.ATOMS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few pictures and atoms, so that a dictionary takes a second."""
    monkeypatch.setattr(patches, "PICTURES", 4)
    monkeypatch.setattr(patches, "PICTURE_SIDE", 40)
    monkeypatch.setattr(patches, "ATOMS", dict.fromkeys(CHANNELS, 16))
    patches.dictionary.cache_clear()
    yield
    patches.dictionary.cache_clear()


def images(count: int, channels: int, side: int = 12) -> torch.Tensor:
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("channels", CHANNELS)
def test_the_features_of_an_image_do_not_depend_on_the_others(channels: int) -> None:
    pixels = images(3, channels)
    together, alone = patches.patch_features(pixels), patches.patch_features(pixels[1:2])
    assert together.shape == (3, 32, patches.GRID, patches.GRID)
    assert torch.allclose(together[1:2], alone, atol=1e-5)
    assert not torch.allclose(together[:1], together[1:2], atol=0.1)


@pytest.mark.parametrize("side", [8, 13, 28])
def test_features_have_mean_zero_and_variance_one_within_each_record(side: int) -> None:
    found = patches.patch_features(images(2, 1, side)).flatten(1)
    assert torch.allclose(found.mean(1), torch.zeros(2), atol=1e-5)
    assert torch.allclose(found.square().mean(1), torch.ones(2), atol=1e-2)


def test_an_image_without_contrast_has_finite_features() -> None:
    assert patches.patch_features(torch.zeros(1, 3, 12, 12)).isfinite().all()
    assert patches.patch_features(-torch.ones(1, 1, 12, 12)).isfinite().all()


def test_a_patch_keeps_its_contrast_and_loses_its_brightness() -> None:
    patch = torch.tensor([[0.1, 0.5, -0.3, 0.9]])
    normalised = patches.contrast_normalised(patch)
    assert torch.allclose(normalised, patches.contrast_normalised(patch + 0.2), atol=1e-5)
    assert torch.allclose(normalised, -patches.contrast_normalised(-patch), atol=1e-5)
    assert float(normalised.square().mean()) == pytest.approx(0.2 / (0.2 + patches.CONTRAST), abs=1e-5)


def test_the_dictionary_ignores_brightness_and_its_atoms_differ() -> None:
    atoms = patches.dictionary(1)
    assert atoms.shape == (patches.PATCH**2, 16)
    likeness = torch.nn.functional.normalize(atoms, dim=0).T @ torch.nn.functional.normalize(atoms, dim=0)
    assert float((likeness.abs() - torch.eye(16)).max()) < 0.99
    assert atoms.isfinite().all()


def test_the_parts_of_an_image_are_averages_that_cover_it() -> None:
    parts = patches._parts(7, 9)
    assert torch.allclose(parts.sum(1), torch.ones(patches.GRID**2))
    assert ((parts > 0).sum(0) == 1).all()
    assert math.isclose(float((parts > 0).sum()), 7 * 9)


@pytest.mark.parametrize("shape", [(1, 4, 28), (3, 28, 4), (2, 28, 28), (4, 8, 8)])
def test_images_that_patches_cannot_describe_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="leave \\+patches out"):
        patches.patch_features(torch.zeros(2, *shape))


def test_the_smallest_images_have_a_patch_in_every_part() -> None:
    assert patches.patch_features(images(2, 1, 5)).isfinite().all()

"""Synthetic pictures, and the whitening of features by them."""

import pytest
import torch

from clipless.app.data import features, load, synthetic, whitening
from clipless.errors import InvalidArgument


def test_leaves_are_those_of_their_seed_and_cover_the_picture() -> None:
    pictures = synthetic.dead_leaves(2, 40, 3, seed=5)
    assert torch.equal(pictures, synthetic.dead_leaves(2, 40, 3, seed=5))
    assert not torch.equal(pictures, synthetic.dead_leaves(2, 40, 3, seed=6))
    assert pictures.shape == (2, 3, 40, 40)
    assert float(pictures.abs().max()) <= 1
    assert float((pictures == 0).all(1).float().mean()) < 2 * (1 - synthetic.COVERED)
    near, far = (pictures[:, :, :, shift:] * pictures[:, :, :, :-shift] for shift in (1, 20))
    assert float(near.mean()) > 1.3 * float(far.mean())  # as in photographs


def test_drawings_are_bright_in_the_middle_and_dark_outside() -> None:
    pictures = synthetic.drawings(700, 28, seed=5)
    assert torch.equal(pictures, synthetic.drawings(700, 28, seed=5))
    assert not torch.equal(pictures, synthetic.drawings(700, 28, seed=6))
    assert pictures.shape == (700, 1, 28, 28)
    assert float(pictures.abs().max()) <= 1
    assert float(pictures[:, :, 10:18, 10:18].mean()) > float(pictures[..., :2].mean()) + 0.3
    ink = (pictures > -1).float().mean((1, 2, 3))
    assert float(ink.min()) > 0  # no picture is empty
    assert float(ink.quantile(0.1)) < 0.15 < 0.3 < float(ink.quantile(0.9))  # lines and blobs
    assert not torch.equal(pictures[:200], pictures[500:])


def test_pictures_are_drawings_if_grey_and_else_leaves_in_eight_positions() -> None:
    assert torch.equal(synthetic.pictures(9, 1, 12, seed=0), synthetic.drawings(9, 12, seed=0))
    leaves = synthetic.pictures(16, 3, 12, seed=0)
    assert torch.equal(leaves[:2], synthetic.dead_leaves(2, 12, 3, seed=0))
    assert len({tuple(picture.flatten().tolist()) for picture in leaves}) == 16
    assert torch.allclose(leaves.mean((2, 3)), leaves[:2].mean((2, 3)).repeat(8, 1), atol=1e-5)
    assert synthetic.pictures(13, 3, 12, seed=0).shape == (13, 3, 12, 12)


@pytest.mark.parametrize("count", [12, 400])  # fewer records than features, and more
def test_whitened_features_have_unit_variance_in_every_direction(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whitening, "REGULARISATION", 0.0)
    mixing = torch.randn(20, 20, generator=torch.Generator().manual_seed(1))
    given = 3 + torch.randn(count, 20, generator=torch.Generator().manual_seed(2)) @ mixing
    found = whitening.whitening_of(given)
    assert found.directions.shape == (20, min(20, count - 1))
    white = (given - found.mean) @ found.directions
    assert torch.allclose(white.T @ white / count, torch.eye(white.shape[1]), atol=2e-2)
    assert torch.allclose(found(given).square().mean(1), torch.ones(count), atol=1e-4)


def test_whitened_features_do_not_depend_on_where_the_mean_lies() -> None:
    given = torch.randn(400, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    moved = given + torch.linspace(-50, 50, 20, dtype=torch.float64)
    found, white = (whitening.whitening_of(one)(one) for one in (moved, given))
    torch.testing.assert_close((found @ found.T), (white @ white.T), rtol=1e-6, atol=1e-6)
    assert float(white.mean(0).abs().max()) < 0.2


def test_regularisation_keeps_weak_directions_weak() -> None:
    scales = torch.tensor([10.0, 1.0, 0.01])
    given = torch.randn(500, 3, generator=torch.Generator().manual_seed(2)) * scales
    found = whitening.whitening_of(given)
    expected = scales / (scales.square() + scales.square().mean()).sqrt()
    assert torch.allclose(((given - found.mean) @ found.directions).std(0).flip(0), expected, rtol=0.2)


def test_only_the_strongest_directions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whitening, "MOST", 2)
    given = torch.randn(300, 4, generator=torch.Generator().manual_seed(2)) * torch.tensor([0.1, 5.0, 0.2, 3.0])
    used = whitening.whitening_of(given).directions.square().sum(1)
    assert float(used[[1, 3]].min()) > 50 * float(used[[0, 2]].max())


@pytest.fixture
def means(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scattering is replaced by the means of columns, so that nothing takes long."""
    monkeypatch.setenv("CLIPLESS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setitem(features.FEATURES, "scattering", features.Feature(lambda images: images.mean(2), 500, "means"))
    monkeypatch.setattr(whitening, "PICTURES", 50)
    features._whitening.cache_clear()


@pytest.mark.usefixtures("means")
def test_the_whitened_features_of_a_record_do_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    data, plain = load("digits+scattering+whitened"), load("digits+scattering")
    assert (data.name, data.shape) == ("digits+scattering+whitened", (8,))
    fixed = whitening.whitening_of(synthetic.drawings(50, 8, whitening.SEED).mean(2).flatten(1))
    assert torch.allclose(data.train.tensors[0], fixed(plain.train.tensors[0].flatten(1)), atol=1e-4)
    assert torch.allclose(data.test.tensors[0], fixed(plain.test.tensors[0].flatten(1)), atol=1e-4)
    monkeypatch.setattr(features, "AT_A_TIME", 7)
    monkeypatch.setattr(features, "kept", lambda name, made_of, compute: compute())
    one_by_one = load("digits+scattering+whitened").train.tensors[0]
    assert torch.allclose(one_by_one, data.train.tensors[0], atol=1e-4)


@pytest.mark.usefixtures("means")
def test_images_that_are_not_square_cannot_be_whitened() -> None:
    with pytest.raises(InvalidArgument, match="square"):
        features._whitened(torch.zeros(2, 1, 8, 9), ["scattering", "whitened"], torch.relu)


@pytest.mark.parametrize("name", ["scattering+whitened", "scattering+patches+mirrored+whitened", "patches"])
def test_features_that_can_be_made(name: str) -> None:
    features.refuse_unknown(name.split("+"))


@pytest.mark.parametrize(
    "name",
    [
        "scattering+whitened+mirrored",
        "whitened",
        "whitened+scattering",
        "scattering+whitened+whitened",
        "patches+patches",
        "mirrored",
    ],
)
def test_changes_come_last_and_in_order_and_features_once(name: str) -> None:
    with pytest.raises(InvalidArgument, match="in that order"):
        load(f"digits+{name}")


@pytest.mark.usefixtures("means")
def test_a_feature_that_does_not_exist_is_named_beside_those_that_do() -> None:
    with pytest.raises(InvalidArgument, match="unknown feature 'scatering': did you mean 'scattering'"):
        load("digits+scatering")
    with pytest.raises(InvalidArgument, match="unknown data set 'digit': did you mean 'digits'"):
        load("digit+scattering")


@pytest.mark.usefixtures("means")
def test_features_are_reported_while_they_are_made_and_not_when_they_are_kept() -> None:
    reports: list[tuple[str, float, float]] = []
    load("digits+scattering+whitened", on_progress=lambda *report: reports.append(report))
    assert set(reports) == {("features +scattering", done, total) for done, total in [(0, 1), (0, 3), (1, 3), (2, 3)]}
    reports.clear()
    load("digits+scattering+whitened", on_progress=lambda *report: reports.append(report))
    assert not reports

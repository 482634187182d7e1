"""Every registered model maps records to logits, takes a private step's layers only, and wrong names are refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from clipless.app.models import MODELS, build
from clipless.errors import InvalidArgument, InvalidType

SMALLEST_SIDE = {"cnn-relu": 16, "dc-cnn": 16, "cifar-cnn": 16, "resnet8-gn": 8}
IMAGES = [(1, 8, 8), (3, 8, 8), (1, 28, 28), (3, 32, 32), (1, 15, 16), (2, 4, 9)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_maps_a_batch_to_logits(name: str, shape: tuple[int, ...]) -> None:
    if min(shape[1:]) < SMALLEST_SIDE.get(name, 0):
        with pytest.raises(InvalidArgument, match=f"sides of at least {SMALLEST_SIDE[name]}"):
            build(name, shape, 7)
        return
    model = build(name, shape, 7)
    assert model(torch.zeros(5, *shape)).shape == (5, 7)
    assert model(torch.zeros(0, *shape)).shape == (0, 7)


@pytest.mark.parametrize("name", MODELS)
def test_has_no_buffers_that_training_could_fill_with_data(name: str) -> None:
    assert not list(build(name, (1, 28, 28), 10).buffers())


def test_cnn_for_mnist_is_the_network_of_the_papers() -> None:
    model = build("cnn", (1, 28, 28), 10)
    assert sum(p.numel() for p in model.parameters()) == 26_010
    assert [type(layer) for layer in model] == [  # type: ignore[union-attr]
        *(nn.Conv2d, nn.Tanh, nn.MaxPool2d) * 2,
        nn.Flatten,
        nn.Linear,
        nn.Tanh,
        nn.Linear,
    ]
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert [(c.kernel_size, c.stride, c.padding) for c in convolutions] == [
        ((8, 8), (2, 2), (2, 2)),
        ((4, 4), (2, 2), (0, 0)),
    ]
    pools = [layer for layer in model.modules() if isinstance(layer, nn.MaxPool2d)]
    assert [(pool.kernel_size, pool.stride) for pool in pools] == [(2, 1), (2, 1)]


@pytest.mark.parametrize("shape", [(64,), (1, 3, 9)], ids=str)
def test_cnn_refuses_what_is_no_image(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="'mlp'"):
        build("cnn", shape, 10)


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_flat_features_are_fine(name: str) -> None:
    assert build(name, (11,), 3)(torch.zeros(2, 11)).shape == (2, 3)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'linear'"):
        build("linaer", (4,), 2)


def test_factory_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from torch import nn\ndef make(shape, classes): return nn.Linear(shape[0], classes)\nwidth = 3\n"
    (tmp_path / "own_models.py").write_text(source + "def wrong(shape, classes): return 'model'\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = build("own_models:make", (4,), 2)
    assert isinstance(model, nn.Linear)
    assert (model.in_features, model.out_features) == (4, 2)
    with pytest.raises(InvalidType, match="returned str"):
        build("own_models:wrong", (4,), 2)
    with pytest.raises(InvalidType, match="is int"):
        build("own_models:width", (4,), 2)


@pytest.mark.parametrize("name", ["no_such_module:make", "math:no_such_factory", ":make", "math:"])
def test_import_path_that_leads_nowhere_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot import"):
        build(name, (4,), 2)

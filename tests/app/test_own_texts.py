"""Columns of text: words by a fixed hash, each row by itself, alone as tokens or beside other columns as counts."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clipless.app.data import OwnData, load, load_features
from clipless.app.data.own.public_schema import public_schema
from clipless.app.data.own.reading import Table
from clipless.app.data.own.texts import TokensColumn, WordCountsColumn, words
from clipless.app.data.texts import BUCKETS
from clipless.errors import InvalidArgument
from commanding import Done, run_main

REVIEWS = [f'{i % 5},"{"a good, long" if i % 2 else "the worst"} film number {i}",{i % 2}' for i in range(60)]
TEXT = {"review": {"word_counts": 32}, "stars": {"low": 0, "high": 4}}
TOKENS = {"review": {"tokens": 6}}
LIKED = {"target": ("liked",), "classes": "2"}


def reviews(folder: Path, *more: str) -> Path:
    path = folder / "reviews.csv"
    path.write_text("\n".join(["stars,review,liked", *REVIEWS, *more]) + "\n", encoding="utf-8")
    return path


def column(*texts: str) -> Table:
    return Table(Path("t.csv"), {"t": list(texts)}, range(len(texts)), "line", "")


def test_words_are_counted_in_columns_of_their_hash() -> None:
    good_film, film_good, empty, twice = WordCountsColumn(64).encode(
        column("a good film", "Film: A GOOD", "", "film film"), "t"
    )
    assert np.linalg.norm(good_film) == pytest.approx(1)
    assert np.count_nonzero(film_good - good_film) > 0  # the colon counts
    assert not empty.any()
    assert sorted(twice)[-2:] == [0, 1]


def test_tokens_are_the_first_words_and_zeros() -> None:
    table = column("a good film", "good", "", "a a a a a a")
    tokens = TokensColumn(4).encode(table, "t")
    assert tokens.dtype == np.int64
    assert tokens[0, 1] == tokens[1, 0] > 0
    assert tokens[:3, 3].tolist() == [0, 0, 0]
    assert (tokens[2] == 0).all()
    assert len(set(tokens[3])) == 1


@given(st.text(), st.lists(st.text(), max_size=3), st.sampled_from([TokensColumn(5), WordCountsColumn(1)]))
def test_a_text_is_encoded_by_itself_whatever_it_holds(
    text: str, others: list[str], rule: TokensColumn | WordCountsColumn
) -> None:
    alone, among = rule.encode(column(text), "t")[0], rule.encode(column(*others, text), "t")[-1]
    assert np.array_equal(alone, among)
    assert np.isfinite(alone).all()
    assert alone.max() < BUCKETS


def test_the_same_text_written_otherwise_is_the_same() -> None:
    assert words("Caf\u00e9") == words("cafe\u0301")
    assert words("a\r\nb\tc") == ["a", "b", "c"]


def test_a_text_may_be_long(tmp_path: Path) -> None:
    """Longer than what Python's csv takes by default, and over several lines, as spreadsheets write it."""
    long = "good\r\n" * 40_000
    data = load(reviews(tmp_path, f'1,"{long}",1'), own=OwnData(**LIKED, columns=TEXT))
    assert len(data.train) + len(data.test) == 61
    assert csv.field_size_limit() == 131_072


def test_counts_stand_beside_numbers(tmp_path: Path) -> None:
    data = load(reviews(tmp_path), own=OwnData(**LIKED, columns=TEXT))
    assert (data.shape, data.vocabulary, data.task) == ((33,), None, "classes")
    assert data.notes == ()


@pytest.mark.parametrize(
    ("stated", "task", "outputs", "kind"),
    [
        (LIKED, "classes", 2, torch.int64),
        ({"target": ("stars",), "task": "regression"}, "numbers", 1, torch.float32),
        ({"target": ("liked",), "task": "labels"}, "labels", 1, torch.float32),
    ],
)
def test_tokens_alone_have_every_task(
    tmp_path: Path, stated: dict[str, Any], task: str, outputs: int, kind: torch.dtype
) -> None:
    drop = ("stars",) if "liked" in stated["target"] else ("liked",)
    data = load(reviews(tmp_path), own=OwnData(**stated, columns=TOKENS, drop=drop))
    assert (data.shape, data.vocabulary, data.task, data.classes) == ((6,), BUCKETS, task, outputs)
    assert data.train.tensors[0].dtype == torch.int64
    assert data.train.tensors[1].dtype == kind


@pytest.mark.parametrize(("columns", "drop"), [(TEXT, ()), (TOKENS, ("stars",))])
def test_new_rows_are_encoded_as_in_training(tmp_path: Path, columns: dict[str, Any], drop: tuple[str, ...]) -> None:
    path = reviews(tmp_path, '3,"neu für alle, ""echt""",1')
    data = load(path, own=OwnData(**LIKED, columns=columns, drop=drop, test=str(path)))
    stored = json.loads(json.dumps(data.columns))
    found = load_features(path, stored)
    assert found.dtype == data.test.tensors[0].dtype
    assert torch.equal(found, data.test.tensors[0])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"review": {"tokens": 6}}, "'review' is stated as tokens, which a model takes alone"),
        ({"review": {"tokens": 0}}, r"\[columns\.review\] has tokens that is not a whole number from 1"),
        ({"review": {"word_counts": 2.5}}, r"\[columns\.review\] has word_counts that is not a whole number"),
        ({"review": {"word_counts": True}}, "not a whole number"),
        ({"review": {"word_counts": 10**9}}, "not a whole number"),
        ({"review": {"word_counts": 8, "missing": "x"}}, "an empty cell is a text without words"),
        ({"review": {"word_counts": 8, "tokens": 8}}, "word_counts and tokens, which contradict each other"),
        ({"review": {"word_count": 8}}, "did you mean 'word_counts'"),
        ({"liked": {"word_counts": 8}}, "the target 'liked' is a text: list its categories"),
        ({}, "line 2 of .*column 2, is not a number.*word_counts = 256 for a text"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as refused:
        load(reviews(tmp_path), own=OwnData(**LIKED, columns=columns))
    assert "worst" not in str(refused.value)


def test_a_schema_proposes_counts_for_texts_and_leaves_out_identifiers() -> None:
    texts = [f"a text of five words {i}" for i in range(60)]
    ids = [f"A-{i}" for i in range(60)]
    made = public_schema(Table(Path("t.csv"), {"note": texts, "id": ids, "y": texts}, range(60), "line", ""), ["y"])
    assert made["columns"] == {"note": {"word_counts": 256}, "id": {"use": False}, "y": {"use": False}}


@pytest.mark.parametrize("model", ["bag", "decoder", "mlp"])
def test_a_text_model_is_trained_and_another_refused(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "schema.toml").write_text("[columns.review]\ntokens = 6\n")
    table = ["--data", str(reviews(tmp_path)), "--target", "liked", "--classes", "2", "--drop", "stars"]
    quick = ["--schema", "schema.toml", "--model", model, "--epochs", "1", "--batch-size", "16", "--json"]
    done: Done = run_main(["train", *table, *quick], tmp_path, capsys)
    if model == "bag":
        assert done.returncode == 0, done.stderr
        return
    assert (done.returncode, done.stdout) == (2, "")
    wrong = {
        "mlp": "the records are tokens: use one of bag",
        "decoder": "'decoder' cannot be trained on reviews",
    }
    assert wrong[model] in done.stderr

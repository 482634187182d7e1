"""Tables by name: wine and housing for regression, adult for one class or several labels.

Columns are shifted and scaled by the constants below. None was computed from the records that are trained on: wine's are the
rounded means and deviations of the white wines, which are another data set; the others are round numbers that follow from
what a column means (degrees, years, shares of a day).
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clipless.app.data.dataset import Array, Data, make_data, make_targets
from clipless.app.data.sources import Source, find, find_any, text
from clipless.errors import InvalidArgument

SPLIT_SEED = 0
WINE_RECORDS, WINE_TRAIN = 1_599, 1_279
HOUSING_RECORDS, HOUSING_TRAIN = 20_640, 18_576
ADULT_RECORDS = 32_561, 16_281

WINE_CENTRE = (6.9, 0.28, 0.33, 6.4, 0.046, 35.0, 140.0, 0.994, 3.2, 0.49, 10.5)
WINE_SCALE = (0.84, 0.1, 0.12, 5.1, 0.022, 17.0, 42.0, 0.003, 0.15, 0.11, 1.2)
# Income in 10,000 dollars, age of houses in years, rooms, bedrooms and people per household, people, latitude, longitude.
HOUSING_CENTRE = (4.0, 25.0, 5.0, 1.0, 1500.0, 3.0, 37.0, -120.0)
HOUSING_SCALE = (2.0, 15.0, 2.0, 0.5, 1500.0, 2.0, 2.5, 2.5)
HOUSING_MOST = 10.0  # a scaled feature is cut off here: a few blocks have a hundred rooms for each household
DOLLARS = 100_000.0

WINE = Source("wine", ("wine_quality", "wine"), "Put winequality-red.csv of archive.ics.uci.edu/dataset/186 there.")
HOUSING = Source(
    "housing",
    ("california_housing", "CaliforniaHousing"),
    "Put cal_housing.data there, from cal_housing.tgz of StatLib (www.dcc.fc.up.pt/~ltorgo/Regression).",
)
ADULT = Source(
    "adult",
    ("adult",),
    "Put adult.data and adult.test of archive.ics.uci.edu/dataset/2 there (or adult_train.csv and adult_test.csv).",
)

ADULT_COLUMNS = [
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
]
# The values that the set's documentation lists; "?" stands for one that is missing.
ADULT_VALUES = {
    "workclass": [
        "?",
        "Private",
        "Self-emp-not-inc",
        "Self-emp-inc",
        "Federal-gov",
        "Local-gov",
        "State-gov",
        "Without-pay",
        "Never-worked",
    ],
    "occupation": [
        "?",
        "Tech-support",
        "Craft-repair",
        "Other-service",
        "Sales",
        "Exec-managerial",
        "Prof-specialty",
        "Handlers-cleaners",
        "Machine-op-inspct",
        "Adm-clerical",
        "Farming-fishing",
        "Transport-moving",
        "Priv-house-serv",
        "Protective-serv",
        "Armed-Forces",
    ],
    "race": ["White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"],
}
ADULT_LABELS = ("income over 50K", "male", "married", "degree", "full time", "owns capital")


def wine(data_dir: str | Path | None = None) -> Data:
    """Quality of 1,599 red wines from 11 measurements, as a number: 1,279 to train on and 320 to test."""
    (path,) = find(WINE, ("winequality-red.csv",), data_dir)
    table = _numbers(path, text(path).splitlines()[1:], ";", 12, WINE)
    _refuse_count(WINE, path, len(table), WINE_RECORDS)
    features = (table[:, :11] - np.array(WINE_CENTRE)) / np.array(WINE_SCALE)
    return _split("wine", features, table[:, 11:], WINE_TRAIN)


def housing(data_dir: str | Path | None = None) -> Data:
    """Median house value of 20,640 Californian blocks, in 100,000 dollars: 18,576 to train on and 2,064 to test."""
    (path,) = find(HOUSING, ("cal_housing.data",), data_dir)
    table = _numbers(path, text(path).splitlines(), ",", 9, HOUSING)
    _refuse_count(HOUSING, path, len(table), HOUSING_RECORDS)
    lon, lat, age, rooms, bedrooms, people, households, income, value = table.T
    if (households <= 0).any():
        raise InvalidArgument(f"{path} has a block without households. {HOUSING.remedy}")
    per = (rooms / households, bedrooms / households, people, people / households)
    features = np.stack([income, age, *per, lat, lon], axis=1)
    scaled = np.clip((features - np.array(HOUSING_CENTRE)) / np.array(HOUSING_SCALE), -HOUSING_MOST, HOUSING_MOST)
    return _split("housing", scaled, value[:, None] / DOLLARS, HOUSING_TRAIN)


def adult(data_dir: str | Path | None = None) -> Data:
    """Whether one of 48,842 people earns over 50,000 dollars: 32,561 to train on and 16,281 to test."""
    train, test = (_adult_features(rows, income_known=False) for rows in _adult_rows(data_dir))
    (x, labels), (x_test, test_labels) = train, test
    return make_data(
        "adult", (x, labels[:, 0].astype(np.int64)), (x_test, test_labels[:, 0].astype(np.int64)), classes=2
    )


def adult_labels(data_dir: str | Path | None = None) -> Data:
    """Six binary columns of adult predicted at once (`ADULT_LABELS`) from age, work, occupation and origin."""
    train, test = (_adult_features(rows, income_known=True) for rows in _adult_rows(data_dir))
    return make_targets("adult-labels", train, test, "labels")


def _split(name: str, features: Array, targets: Array, train: int) -> Data:
    order = np.random.default_rng(SPLIT_SEED).permutation(len(features))
    first, rest = order[:train], order[train:]
    return make_targets(name, (features[first], targets[first]), (features[rest], targets[rest]), "numbers")


def _numbers(path: Path, lines: Sequence[str], separator: str, columns: int, source: Source) -> Array:
    rows = [line for line in lines if line.strip()]
    try:
        table: Array = np.loadtxt(rows, delimiter=separator, ndmin=2)
    except ValueError:
        raise InvalidArgument(
            f"{path} is not the table of {source.name}: a cell is not a number, or rows differ in length. {source.remedy}"
        ) from None
    if not rows or table.shape[1] != columns:
        raise InvalidArgument(f"{path} has no table of {columns} columns. {source.remedy}")
    return table


def _refuse_count(source: Source, path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise InvalidArgument(
            f"{path} has {found} rows, and {source.name} has {expected}: it is cut short or another file. {source.remedy}"
        )


def _adult_rows(data_dir: str | Path | None) -> list[list[dict[str, str]]]:
    sets = (("adult.data", "adult.test"), ("adult_train.csv", "adult_test.csv"))
    number, paths = find_any(ADULT, sets, data_dir)
    parts = []
    for path, expected in zip(paths, ADULT_RECORDS, strict=True):
        lines = [line for line in text(path).splitlines() if line.strip() and not line.startswith("|")]
        rows = list(csv.reader(io.StringIO("\n".join(lines[number:])), skipinitialspace=True))
        _refuse_count(ADULT, path, len(rows), expected)
        if any(len(row) != len(ADULT_COLUMNS) for row in rows):
            raise InvalidArgument(f"{path} has a row without its {len(ADULT_COLUMNS)} columns. {ADULT.remedy}")
        parts.append([dict(zip(ADULT_COLUMNS, row, strict=True)) for row in rows])
    return parts


def _adult_features(rows: list[dict[str, str]], income_known: bool) -> tuple[Array, Array]:
    """Features and the six labels. `income_known` leaves out the columns that labels other than income come from."""
    try:
        number = {
            name: np.array([float(row[name]) for row in rows]) for name in ("age", "education-num", "hours-per-week")
        }
        capital = np.array([[float(row["capital-gain"]), float(row["capital-loss"])] for row in rows])
    except ValueError:
        raise InvalidArgument(f"adult: a number is missing. {ADULT.remedy}") from None
    chosen = [
        np.array([[row[name] == value for value in values] for row in rows]) for name, values in ADULT_VALUES.items()
    ]
    married = np.array([row["marital-status"].startswith("Married-") for row in rows])
    male = np.array([row["sex"] == "Male" for row in rows])
    labels = np.stack(
        [
            np.array([row["income"].rstrip(".") == ">50K" for row in rows]),
            male,
            married,
            number["education-num"] >= 13,
            number["hours-per-week"] >= 40,
            (capital > 0).any(axis=1),
        ],
        axis=1,
    ).astype(np.float64)
    foreign = np.array([row["native-country"] != "United-States" for row in rows])
    shared = [number["age"][:, None] / 50 - 1, foreign[:, None], *chosen]
    own = [
        number["education-num"][:, None] / 8 - 1,
        number["hours-per-week"][:, None] / 40 - 1,
        np.log1p(capital) / 10,
        married[:, None],
        male[:, None],
    ]
    features = np.concatenate([*shared, *([] if income_known else own)], axis=1).astype(np.float64)
    return features, labels

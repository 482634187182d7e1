"""New rows of a table, as inputs of a model that was trained on such a table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipless.app.data.own.reading import read
from clipless.app.data.own.rules import AS_IT_IS, as_date, encode, rule_of

MAY_BE_DATES = ("low", "high", "missing")


def load_features(path: str | Path, columns: Mapping[str, Any]) -> Tensor:
    """The rows of a csv or Parquet file as float32 inputs [rows, width], or as int64 tokens if the model was trained on
    these. `columns` is that of the run's run.json.

    The file needs the columns that the model was trained on, and may have others. Raises InvalidArgument for a missing
    column, and for cells that training would have refused.
    """
    stated = columns["rules"]
    table = read(Path(path).expanduser(), (*columns["features"], *columns["target"], *stated))
    for name in columns["features"]:
        if name not in table.columns:
            raise table.unknown_column("column", name)
    rules = {
        name: rule_of(name, _with_dates(stated[name])) if name in stated else AS_IT_IS for name in columns["features"]
    }
    inputs = encode(table, rules)
    return torch.from_numpy(inputs if columns["vocabulary"] else inputs.astype(np.float32))


def _with_dates(rule: Mapping[str, Any]) -> dict[str, Any]:
    """The rule with dates, which JSON has as text."""
    return {
        key: (as_date(value) or value) if key in MAY_BE_DATES and isinstance(value, str) else value
        for key, value in rule.items()
    }

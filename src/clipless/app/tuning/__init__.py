"""Tuning as one private computation: a grid, a price for the whole search, and one released run."""

from clipless.app.tuning.candidates import Grid, flattened, parse_tries, read_grid, shape_of, varied
from clipless.app.tuning.pools import Borrowed, DaskCluster, InProcess, Pool, Processes, open_pool
from clipless.app.tuning.release import NothingToRelease, Tuned, tune
from clipless.app.tuning.search import SCORE, Search, plan_search

__all__ = [
    "SCORE",
    "Borrowed",
    "DaskCluster",
    "Grid",
    "InProcess",
    "NothingToRelease",
    "Pool",
    "Processes",
    "Search",
    "Tuned",
    "flattened",
    "open_pool",
    "parse_tries",
    "plan_search",
    "read_grid",
    "shape_of",
    "tune",
    "varied",
]

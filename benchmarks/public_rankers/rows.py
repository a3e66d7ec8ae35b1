"""Rows that all rankers share: MovieLens 1M, with a history for each user and a second label.

Two things are derived, because the rows have neither times nor a second event:

* A history holds items of the same user's training positives, in a drawn order, without the row's own item.
  Ids of items in it start at 1; 0 pads it at its end.
* `bought` is drawn for positives only, with a probability that is logistic in two numeric columns. It stands
  for a conversion; nothing is concluded from its loss but that a second output is held to a budget.

Nothing of these rows is committed (GroupLens' terms): they stay in the cache directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from loka_zoo.movielens1m import movielens_1m
from loka_zoo.prepared import PreparedData

TRAIN_ROWS = 640_000
"""First rows of the training file; the others, calibration and test are what runs draw their splits from."""
LENGTH = 20
"""Longest history."""
SEED = 17


@dataclass(frozen=True)
class Rows:
    """Columns of training and of what is left for runs.

    Attributes:
        train: Column → (rows,) or (rows, LENGTH).
        rest: The same columns of the other rows.
        categorical: Column → rows of its embedding table.
        numeric: Columns of numbers.
    """

    train: dict[str, np.ndarray]
    rest: dict[str, np.ndarray]
    categorical: dict[str, int]
    numeric: tuple[str, ...]


def read_rows(seed: int = SEED) -> Rows:
    """Every row of `$LOKA_ONNX_DATA`, with the derived columns."""
    data = movielens_1m()
    train_file = data.splits["train"].path
    files = (train_file, data.splits["calibration"].path, data.splits["certification"].path)
    table = pa.concat_tables([pq.read_table(path) for path in files])
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    columns |= _derived(columns, data, np.random.default_rng(seed))
    columns["ids"] = np.stack([columns[name] for name, _ in data.categorical], axis=1)
    # FuxiCTR's mean over a history is 0 ÷ 0 where it is empty, and a recurrent cell has nothing to run over.
    known = columns["history_length"] > 0
    train = np.arange(len(known)) < TRAIN_ROWS
    return Rows(
        {name: values[train & known] for name, values in columns.items()},
        {name: values[~train & known] for name, values in columns.items()},
        dict(data.categorical),
        data.numeric,
    )


def _derived(
    columns: dict[str, np.ndarray], data: PreparedData, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    users, items, label = columns["user_id"], columns["item_id"], columns[data.label]
    genre = np.zeros(items.max() + 1, np.int64)
    genre[items] = columns["genre1"]
    history = histories(users, items, np.flatnonzero(label[:TRAIN_ROWS] > 0), rng)
    there = history > 0
    odds = 0.8 * columns["genre_aff_mean"] + 0.5 * columns["year"] - 0.5
    bought = (label > 0) & (rng.random(len(label)) < 1 / (1 + np.exp(-odds)))
    return {
        "clicked": label.astype(np.float32),
        "bought": bought.astype(np.float32),
        "item": (items + 1).astype(np.int64),
        "item_genre": columns["genre1"].astype(np.int64) + 1,
        "history": history,
        "history_genre": np.where(there, genre[history - 1] + 1, 0),
        "history_reversed": history[:, ::-1],
        "history_length": there.sum(axis=1),
        "row": np.arange(len(label)),
    }


def histories(
    users: np.ndarray, items: np.ndarray, positives: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Histories (rows, LENGTH) of item ids from 1, 0 behind the last.

    Args:
        users: (rows,) ids of users.
        items: (rows,) ids of items, from 0.
        positives: Rows that histories are drawn from.
        rng: Of the order.
    """
    drawn = rng.permutation(positives)
    drawn = drawn[np.argsort(users[drawn], kind="stable")]
    pool = np.append(items[drawn] + 1, 0)  # one more, so that an empty history may index it
    start = np.searchsorted(users[drawn], np.arange(users.max() + 2))
    size = np.diff(start)[users]
    offset = (rng.random(len(users)) * size).astype(np.int64)
    steps = np.arange(LENGTH + 1)
    at = start[users][:, None] + (offset[:, None] + steps) % np.maximum(size, 1)[:, None]
    taken = pool[at]
    gone = (steps >= size[:, None]) | (taken == items[:, None] + 1)
    order = np.argsort(gone, axis=1, kind="stable")[:, :LENGTH]
    rows = np.arange(len(users))[:, None]
    return np.where(gone[rows, order], 0, taken[rows, order]).astype(np.int64)


def write_rows(columns: dict[str, np.ndarray], path: Path) -> None:
    """Write Parquet; histories become lists of fixed length."""
    arrays = {
        name: values
        if values.ndim == 1
        else pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
        for name, values in columns.items()
    }
    part = path.with_suffix(".part")
    pq.write_table(pa.table(arrays), part, row_group_size=65_536)
    part.rename(path)

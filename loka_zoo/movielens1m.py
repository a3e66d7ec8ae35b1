"""MovieLens 1M interactions with sampled negatives, where `$LOKA_ONNX_DATA` holds them.

GroupLens' terms forbid redistribution: the files are read where they lie, and nothing is copied.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from loka_onnx.data.selection import RowRange
from loka_onnx.errors import DataError
from loka_zoo.movielens100k import LABEL, NUMERIC
from loka_zoo.prepared import Part, PreparedData, data_root

CATEGORICAL = (
    ("user_id", 6040),
    ("gender", 2),
    ("age_bucket", 7),
    ("occupation", 21),
    ("zip3", 678),
    ("item_id", 3706),
    ("year5", 18),
    ("genre1", 19),
    ("genre2", 19),
    ("genre3", 19),
    ("title_word", 83),
)
RULE = (
    "label: 1 for an interaction, 0 for one of two popularity-proportional sampled negatives. Selection is "
    "the last 100,000 rows of train.parquet, train the rows before; certification is test.parquet"
)
SELECTION_ROWS = 100_000


def movielens_1m(root: str | Path | None = None) -> PreparedData:
    """Describe the four splits in `<root>/movielens-1m/`; `DataError` when a file is unreadable."""
    directory = data_root(root) / "movielens-1m"
    train = directory / "train.parquet"
    try:
        rows = int(pq.read_metadata(train).num_rows)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            "the training rows of MovieLens 1M cannot be read",
            where=str(train),
            evidence=str(error),
            remedy="set LOKA_ONNX_DATA to a directory whose movielens-1m/ holds train, calibration and test",
        ) from error
    if rows <= SELECTION_ROWS:
        raise DataError(
            "the training file of MovieLens 1M is too short to take the selection rows from",
            where=str(train),
            evidence=f"{rows} rows, of which the last {SELECTION_ROWS} are selection",
            remedy="restore the file",
        )
    splits = {
        "train": Part(train, RowRange(0, rows - SELECTION_ROWS)),
        "calibration": Part(directory / "calibration.parquet"),
        "selection": Part(train, RowRange(rows - SELECTION_ROWS, rows)),
        "certification": Part(directory / "test.parquet"),
    }
    return PreparedData("movielens-1m", directory, splits, CATEGORICAL, NUMERIC, LABEL, RULE)

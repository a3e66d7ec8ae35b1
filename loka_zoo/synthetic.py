"""Generated rows with a known teacher, for tests and for trying the tool without data.

Nothing uses this unless it is asked for by name. The teacher is logistic: its logit is a sum of one effect
per id, a linear term of the numbers and one product of two numbers, scaled to a given spread. It is written
beside the label, so the smallest reachable loss, E[H(p)], is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from loka_onnx.data.batch import Array
from loka_onnx.data.parquet import write_table
from loka_onnx.errors import ConfigError
from loka_zoo.prepared import SPLITS, Part, PreparedData, make_directory

LABEL, TEACHER = "label", "teacher_logit"


@dataclass(frozen=True)
class SyntheticOptions:
    """Size and difficulty of generated data.

    Attributes:
        rows: Rows of train, calibration, selection and certification.
        cardinalities: Ids of each categorical column.
        numeric: Number of numeric columns; at least 2.
        spread: Standard deviation of the teacher's logit.
        seed: Generates the teacher and the rows.
    """

    rows: tuple[int, int, int, int] = (20_000, 4_000, 4_000, 8_000)
    cardinalities: tuple[int, ...] = (50, 20, 10, 5)
    numeric: int = 4
    spread: float = 1.5
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.rows) < 1 or not self.cardinalities or min(self.cardinalities) < 1 or self.numeric < 2:
            raise ConfigError(
                "synthetic data need rows, ids and at least two numeric columns",
                evidence=f"rows {self.rows}, cardinalities {self.cardinalities}, numeric {self.numeric}",
                remedy="use positive sizes",
            )


def prepare_synthetic(directory: str | Path, options: SyntheticOptions | None = None) -> PreparedData:
    """Generate the four splits as Parquet files with columns c0…, x0…, label and teacher_logit."""
    options, target = options or SyntheticOptions(), make_directory(directory)
    random = np.random.default_rng(options.seed)
    rows = sum(options.rows)
    ids = [random.integers(0, n, rows) for n in options.cardinalities]
    numbers = random.standard_normal((rows, options.numeric)).astype(np.float32)
    logit = _teacher(random, options, ids, numbers.astype(np.float64))
    columns: dict[str, Array] = {f"c{i}": column for i, column in enumerate(ids)}
    columns |= {f"x{i}": numbers[:, i] for i in range(options.numeric)}
    columns[LABEL] = (random.random(rows) < 1.0 / (1.0 + np.exp(-logit))).astype(np.int8)
    columns[TEACHER] = logit
    splits, first = {}, 0
    for name, count in zip(SPLITS, options.rows, strict=True):
        path = target / f"{name}.parquet"
        write_table(pa.table({k: v[first : first + count] for k, v in columns.items()}), path)
        splits[name] = Part(path)
        first += count
    return PreparedData(
        "synthetic",
        target,
        splits,
        tuple((f"c{i}", n) for i, n in enumerate(options.cardinalities)),
        tuple(f"x{i}" for i in range(options.numeric)),
        LABEL,
        f"SYNTHETIC: labels of a logistic teacher, logit spread {options.spread}, seed {options.seed}",
        (TEACHER,),
    )


def _teacher(
    random: np.random.Generator, options: SyntheticOptions, ids: list[Array], numbers: Array
) -> Array:
    """Logits (rows,) float64 with mean 0 and the spread asked for."""
    effects = [
        random.standard_normal(n)[column] for n, column in zip(options.cardinalities, ids, strict=True)
    ]
    weights = random.standard_normal(options.numeric)
    raw: Array = sum(effects) + numbers @ weights + numbers[:, 0] * numbers[:, 1]
    centred: Array = (raw - raw.mean()) * (options.spread / raw.std())
    return centred

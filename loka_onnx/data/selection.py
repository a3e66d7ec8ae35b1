"""Rows of a data set: a contiguous range of a file, or those whose hashed key falls in an interval."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka_onnx.data.batch import Array
from loka_onnx.errors import ConfigError, DataError

UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a file; `stop` None means to its end."""

    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise ConfigError(
                "E0225 a row range needs 0 <= start < stop",
                evidence=f"start {self.start}, stop {self.stop}",
                remedy="count rows from 0; `stop` is exclusive",
            )

    @property
    def id(self) -> str:
        """Text for the digest of a data set."""
        return f"rows[{self.start}:{'' if self.stop is None else self.stop}]"


@dataclass(frozen=True)
class HashRows:
    """Rows whose key column hashes into [low, high) of the unit interval, 0 <= low < high <= 1.

    Rows that share a key stay together, whichever file order they come in. `seed` chooses the hash function.
    """

    column: str
    low: float
    high: float
    seed: int = 0

    @property
    def id(self) -> str:
        """Text for the digest of a data set."""
        return f"hash({self.column}, seed {self.seed})[{self.low!r}:{self.high!r}]"

    def mask(self, keys: Array) -> npt.NDArray[np.bool_]:
        """Return the mask of selected rows, (rows,) bool, for integer or string keys (rows,)."""
        # The top 53 bits are exactly representable, so that equal keys compare equally on any machine.
        unit = (stable_hash(keys, self.seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        selected: npt.NDArray[np.bool_] = (unit >= self.low) & (unit < self.high)
        return selected


RowSelection = RowRange | HashRows


def stable_hash(keys: Array, seed: int = 0) -> UInt64:
    """Hash integer, boolean or string keys (rows,) to uint64, equally in every process and on every machine.

    Integers go through the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014); strings through BLAKE2b. Other keys raise `DataError`.
    """
    if keys.dtype.kind in "iub":
        mixed: UInt64 = keys.astype(np.int64).view(np.uint64)
    elif keys.dtype.kind in "US":
        unique, inverse = np.unique(keys, return_inverse=True)
        codes = [hashlib.blake2b(str(key).encode(), digest_size=8).digest() for key in unique]
        mixed = np.frombuffer(b"".join(codes), dtype="<u8").astype(np.uint64)[inverse]
    else:
        raise DataError(
            "E0227 a key to split by must be a column of integers or strings",
            evidence=f"its type is {keys.dtype}",
            remedy="name another column, for example the request id or the user id",
        )
    with np.errstate(over="ignore"):
        step = np.uint64(((2 * seed + 1) * 0x9E3779B97F4A7C15) % 2**64)
        mixed = mixed + step
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        result: UInt64 = mixed ^ (mixed >> np.uint64(31))
    return result


def without_id(keys: Array) -> npt.NDArray[np.bool_]:
    """Mask (rows,) of null keys: None, NaN, NaT or an empty string, as Parquet's null strings are read."""
    if keys.dtype.kind in "fmM":
        return np.asarray(np.isnan(keys) if keys.dtype.kind == "f" else np.isnat(keys))
    if keys.dtype.kind in "US":
        return np.asarray(keys == keys.dtype.type())
    if keys.dtype.kind != "O":
        return np.zeros(keys.shape, dtype=np.bool_)
    return np.array([key is None or key == "" or key != key for key in keys], dtype=np.bool_)  # noqa: PLR0124

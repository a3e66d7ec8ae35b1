"""Hostile rows: Parquet and .npz files."""

import io
import zipfile
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from loka_onnx.data.batch import InputBinding
from loka_onnx.data.selection import HashRows, RowRange
from loka_onnx.data.splits import open_dataset
from tests.fuzz.values import damaged

ROWS = 50


def attempt(random: Random, place: Path) -> None:
    """Write a file, and read it as a run does."""
    path = place / random.choice(("rows.parquet", "rows.npz"))
    (_write_parquet if path.suffix == ".parquet" else _write_npz)(random, path)
    if random.random() < 0.15:
        path.write_bytes(damaged(random, path.read_bytes()))
    bindings = (InputBinding("dense", ("a", "b"), "float32", 2), InputBinding("item", ("item",), "int64", 1))
    if random.random() < 0.5:
        bindings = (InputBinding("a", ("a",), random.choice(("float32", "int64")), 2),)
    selection = random.choice((None, RowRange(3, 20), HashRows("group", 0.0, 0.5, 0)))
    columns, nullable = random.choice(((("label", "group"), ()), (("label", "group"), ("group",)), ((), ())))
    data = open_dataset(path, bindings, columns, selection, nullable)
    data.check()
    for batch in data.batches(random.choice((1, 7, 64))):
        assert all(len(values) for values in batch.inputs.values())


def _columns(random: Random) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(random.randrange(2**32))
    return {
        "a": numbers.standard_normal(ROWS).astype(np.float32),
        "b": numbers.standard_normal(ROWS),
        "item": numbers.integers(0, 40, ROWS),
        "label": numbers.integers(0, 2, ROWS).astype(np.float32),
        "group": np.arange(ROWS) // 4,
    }


def _odd_column(random: Random) -> pa.Array:
    n = ROWS
    # Without lists of a fixed size of 0: pyarrow 26 aborts where it writes several row groups of them.
    kind = random.randrange(16)
    if kind < 6:
        inner = random.choice((pa.float32(), pa.int64(), pa.string(), pa.list_(pa.float32())))
        values = random.choice(([[]] * n, [None] * n, [[1.0, 2.0]] * n, [[1.0]] * (n - 1) + [[1.0, 2.0]]))
        if inner in (pa.string(), pa.list_(pa.float32())):
            values = random.choice(([[]] * n, [None] * n, [[None]] * n))
        kinds = (pa.list_(inner), pa.large_list(inner), pa.list_(inner, 2))
        try:
            return pa.array(values, random.choice(kinds))
        except pa.ArrowInvalid:
            return pa.array([[]] * n, pa.list_(pa.float32()))
    scalars: list[tuple[object, pa.DataType]] = [
        *((None, pa.null()), (None, pa.float32()), (None, pa.string()), ("1.5", pa.string())),
        *((2**63 - 1, pa.int64()), (2**64 - 1, pa.uint64()), (1e308, pa.float64()), (b"ab", pa.binary())),
        *((12345, pa.timestamp("ns")), (1, pa.date32()), (5, pa.duration("s")), (1, pa.time64("us"))),
        *((True, pa.bool_()), (1, pa.decimal128(38, 2)), ({"x": 1}, pa.struct([("x", pa.int64())]))),
        *(([("k", 1)], pa.map_(pa.string(), pa.int64())), (float("nan"), pa.float64())),
    ]
    value, type_ = random.choice(scalars)
    column = pa.array([value] * n, type_)
    return column.dictionary_encode() if random.random() < 0.2 and type_ == pa.string() else column


def _write_parquet(random: Random, path: Path) -> None:
    names, arrays = [], []
    for name, values in _columns(random).items():
        names.append(name)
        arrays.append(_odd_column(random) if random.random() < 0.25 else pa.array(values))
    match random.randrange(6):
        case 0:
            names.append(random.choice(names))
            arrays.append(random.choice(arrays))
        case 1:
            names[random.randrange(len(names))] = random.choice(("", "a.b", "x" * 5000, "é\n", "item"))
        case 2:
            arrays = [array.slice(0, 0) for array in arrays]
    table = pa.Table.from_arrays(arrays, names=names)
    pq.write_table(table, path, row_group_size=random.choice((1, 7, 1000)))


def _write_npz(random: Random, path: Path) -> None:
    arrays = _columns(random)
    for name in list(arrays):
        if random.random() < 0.25:
            arrays[name] = _odd_array(random, arrays[name])
    if random.random() < 0.3:
        arrays["dense"] = np.zeros((ROWS, random.choice((0, 1, 2, 3))), np.float32)
    mode = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(path, "w", mode) as archive:
        for name, values in arrays.items():
            stream = io.BytesIO()
            np.lib.format.write_array(stream, values)
            data = stream.getvalue()
            if random.random() < 0.15:
                data = _odd_header(random, data)
            archive.writestr(f"{name}.npy", data)
        if random.random() < 0.1:
            archive.writestr("notes.txt", "text")


def _odd_array(random: Random, values: np.ndarray) -> np.ndarray:
    record = np.dtype([("x", "<f4"), ("y", "<i8")])
    kinds = (">f8", np.complex64, "U3", "S3", "U0", "M8[s]", object)
    return random.choice(
        (
            *(np.zeros(ROWS, kind) for kind in (record, "V0", "V3", [("x", "<f4", (2,))])),
            *(np.zeros(shape, np.float32) for shape in ((ROWS, 0), (0,), (ROWS, 2, 2))),
            np.asfortranarray(np.zeros((ROWS, 2), np.float32)),
            *(values.astype(kind) for kind in kinds),
            *(np.array(1.0), values > 0, values[:-1], np.full(ROWS, np.inf)),
        )
    )


def _odd_header(random: Random, data: bytes) -> bytes:
    shape = random.choice(
        ("(50,)", "(-1,)", "(10**9,)", "(9999999999999999999,)", "(True,)", "(50, 0)", "50", "('a',)", "()")
    )
    type_ = random.choice(("'<f4'", "'<i8'", "'|O'", "'<U9999999'", "[]", "[('x', '<f4')]", "'nothing'", "5"))
    text = (
        f"{{'descr': {type_}, 'fortran_order': {random.choice(('False', '0', 'None'))}, 'shape': {shape}, }}"
    )
    if random.random() < 0.3:
        text = random.choice(("", "{", "[" * 3000, "{}" * 9, "1", "{'descr': '<f4'}", "\0"))
    header = text.encode() + b" " * 8 + b"\n"
    size = random.choice((len(header), len(header), 0, 65535)).to_bytes(2, "little")
    return (
        b"\x93NUMPY"
        + random.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x09\x00"))
        + size
        + header
        + data[128:]
    )

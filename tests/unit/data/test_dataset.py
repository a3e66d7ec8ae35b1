"""Reading rows: binding, batching, checks; Parquet and npz through one suite."""

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loka_onnx.data import HashRows, InputBinding, RowRange, open_dataset
from loka_onnx.data.parquet import write_table
from loka_onnx.errors import ConfigError, DataError

ROWS = 53
BINDINGS = (
    InputBinding("dense", ("x", "y"), "float32", 2),
    InputBinding("ids", ("user", "item"), "int64", 2, (range(10), range(20))),
    InputBinding("age", ("x",), "float32", 1),
)
PARQUET, NPZ = ("parquet",), ("npz",)
FORMATS = (*PARQUET, *NPZ, "npz-compressed")
US = pa.timestamp("us")


def columns(rows: int = ROWS) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x": random.standard_normal(rows),
        "y": random.standard_normal(rows).astype(np.float32),
        "user": random.integers(0, 10, rows).astype(np.int16),
        "item": random.integers(0, 20, rows).astype(np.int64),
        "label": random.integers(0, 2, rows).astype(np.int8),
        "country": np.array(["de", "fr", "jp"])[random.integers(0, 3, rows)],
    }


def write(directory, data, kind="parquet", row_group=7):
    if kind == "parquet":
        path = directory / "rows.parquet"
        pq.write_table(
            pa.table({k: v if isinstance(v, pa.Array) else pa.array(v) for k, v in data.items()}),
            path,
            row_group_size=row_group,
            write_page_checksum=True,
        )
        return path
    path = directory / "rows.npz"
    (np.savez if kind == "npz" else np.savez_compressed)(path, **data)
    return path


def joined(data, size, **rows):
    batches = list(data.batches(size, **rows))
    inputs = {k: np.concatenate([b.inputs[k] for b in batches]) for k in batches[0].inputs}
    others = {k: np.concatenate([b.columns[k] for b in batches]) for k in batches[0].columns}
    return batches, inputs, others


@pytest.mark.parametrize("kind", FORMATS)
def test_inputs_are_the_columns_stacked_in_order(tmp_path, kind):
    raw = columns()
    data = open_dataset(write(tmp_path, raw, kind), BINDINGS, ("label", "country"))
    batches, inputs, others = joined(data, 8)
    assert [b.rows for b in batches] == [8] * 6 + [5]
    assert [b.first_row for b in batches] == list(range(0, ROWS, 8))
    assert inputs["dense"].dtype == np.float32 and inputs["ids"].dtype == np.int64
    np.testing.assert_array_equal(inputs["dense"], np.column_stack([raw["x"], raw["y"]]).astype(np.float32))
    np.testing.assert_array_equal(inputs["ids"], np.column_stack([raw["user"], raw["item"]]))
    np.testing.assert_array_equal(inputs["age"], raw["x"].astype(np.float32))
    np.testing.assert_array_equal(others["label"], raw["label"])
    np.testing.assert_array_equal(others["country"], raw["country"])
    assert others["label"].dtype == np.int8
    assert set(batches[0].inputs) == {"dense", "ids", "age"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(FORMATS))
def test_any_batch_size_and_range_give_the_same_rows(tmp_path, data, kind):
    low = data.draw(st.integers(0, ROWS - 1))
    high = data.draw(st.integers(low + 1, ROWS))
    size = data.draw(st.integers(1, ROWS + 3))
    start = data.draw(st.integers(0, high - low))
    stop = data.draw(st.integers(start, high - low))
    raw = columns()
    opened = open_dataset(write(tmp_path, raw, kind), BINDINGS, ("label",), RowRange(low, high))
    for _ in range(2):
        batches = list(opened.batches(size, start=start, stop=stop))
        assert all(b.rows == size for b in batches[:-1])
        got = np.concatenate([b.inputs["age"] for b in batches]) if batches else np.empty(0)
        np.testing.assert_array_equal(got, raw["x"][low + start : low + stop].astype(np.float32))
        assert [b.first_row for b in batches] == list(range(start, stop, size))


@pytest.mark.parametrize("kind", FORMATS)
def test_hash_rows_select_by_key_and_keep_groups_together(tmp_path, kind):
    raw = columns()
    path = write(tmp_path, raw, kind)
    seen = []
    for low, high in ((0.0, 0.3), (0.3, 0.7), (0.7, 1.0)):
        data = open_dataset(path, BINDINGS, ("item",), HashRows("item", low, high))
        _, inputs, others = joined(data, 4)
        assert data.rows == len(others["item"])
        np.testing.assert_array_equal(
            inputs["age"], raw["x"].astype(np.float32)[np.isin(raw["item"], others["item"])]
        )
        np.testing.assert_array_equal(joined(data, 3, start=2, stop=5)[1]["age"], inputs["age"][2:5])
        seen.append(set(others["item"].tolist()))
    assert not (seen[0] & seen[1] or seen[1] & seen[2] or seen[0] & seen[2])
    assert set.union(*seen) == set(raw["item"].tolist())


def hashed(directory, kind):
    """Three tenths of 400 rows, three to a key."""
    path = write(directory, {"x": np.arange(400.0), "item": np.arange(400) // 3}, kind)
    binding = InputBinding("x", ("x",), "float32", 1)
    return open_dataset(path, [binding], ("item",), HashRows("item", 0.3, 0.6))


@pytest.mark.parametrize("kind", FORMATS)
def test_hash_rows_from_the_middle_do_not_read_what_lies_before(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("loka_onnx.data.dataset._CHUNK_ROWS", 4)
    monkeypatch.setattr("loka_onnx.data.dataset._KEPT_BYTES", 0)
    data = hashed(tmp_path, kind)
    whole = joined(data, 7)[1]["x"]
    asked: list[range] = []
    read = type(data)._read
    monkeypatch.setattr(
        type(data), "_read", lambda self, c, rows, size: asked.append(rows) or read(self, c, rows, size)
    )
    for start in range(0, data.rows, 5):
        np.testing.assert_array_equal(
            joined(data, 3, start=start, stop=min(start + 9, data.rows))[1]["x"], whole[start : start + 9]
        )
        # Selected rows are counted every 32 rows of the file.
        assert 0 <= whole[start] - asked[-1].start < 64
    assert asked[-1].start > 300


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_that_a_hash_selects_are_read_once(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("loka_onnx.data.dataset._CHUNK_ROWS", 4)
    data = hashed(tmp_path, kind)
    _, whole, first = joined(data, 7)
    assert data.rows == len(whole["x"]) > 50
    monkeypatch.setattr(type(data), "_read", lambda *_: pytest.fail("the file was read again"))
    for size in (1, 7, 64, 1000):
        _, inputs, others = joined(data, size)
        np.testing.assert_array_equal(inputs["x"], whole["x"])
        np.testing.assert_array_equal(others["item"], first["item"])
    for start in range(0, data.rows, 5):
        stop = min(start + 9, data.rows)
        np.testing.assert_array_equal(joined(data, 3, start=start, stop=stop)[1]["x"], whole["x"][start:stop])
    batch = next(iter(data.batches(4)))
    with pytest.raises(ValueError, match="read-only"):
        batch.columns["item"][0] = 7


@pytest.mark.parametrize("kind", ["fixed", "variable", "npz"])
def test_a_column_of_lists_is_a_matrix(tmp_path, kind):
    values = np.arange(40).reshape(10, 4)
    if kind == "npz":
        path = write(tmp_path, {"history": values}, "npz")
    else:
        type_ = pa.list_(pa.int32(), 4 if kind == "fixed" else -1)
        path = write(tmp_path, {"h": pa.array(values.tolist(), type_)}, row_group=3)
    data = open_dataset(path, [InputBinding("history", ("h",), "int64", 2, (range(40),))])
    _, inputs, _ = joined(data, 4, start=1)
    np.testing.assert_array_equal(inputs["history"], values[1:])


def test_digest_follows_content_and_range(tmp_path):
    path = write(tmp_path, columns())
    whole = open_dataset(path, BINDINGS)
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(path.read_bytes())
    assert whole.digest == open_dataset(copy, BINDINGS).digest
    assert whole.digest != open_dataset(path, BINDINGS, (), RowRange(0, 5)).digest
    changed = columns()
    changed["x"][-1] += 1
    write(tmp_path, changed)
    assert whole.digest != open_dataset(path, BINDINGS).digest


def test_digest_follows_the_columns_of_the_inputs_and_nothing_else_of_the_layout(tmp_path):
    path = write(tmp_path, columns())
    whole = open_dataset(path, BINDINGS)
    swapped = (dataclasses.replace(BINDINGS[0], columns=("y", "x")), *BINDINGS[1:])
    other = open_dataset(path, swapped)
    assert other.digest != whole.digest and other.rows_digest == whole.rows_digest
    # Nor is it the same when two inputs change places.
    assert open_dataset(path, (dataclasses.replace(BINDINGS[2], columns=("y",)),)).digest != whole.digest
    # What labels and slices are read beside them is no part of what the model sees, nor is the order.
    assert open_dataset(path, BINDINGS[::-1], ("label", "country")).digest == whole.digest


# ---- bad input -------------------------------------------------------------------------------------------


def spoiled(directory, kind, column, row, value, dtype=None):
    raw = columns()
    raw[column] = raw[column].astype(dtype or raw[column].dtype)
    raw[column][row] = value
    return open_dataset(write(directory, raw, kind), BINDINGS, ("label",))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("spoil", "what", "evidence"),
    [
        (("x", np.nan, None), "holds NaN", "1 of 53 rows, the first is row 17: nan"),
        (("y", -np.inf, None), "holds infinity", "1 of 53 rows, the first is row 17: -inf"),
        (("label", np.nan, np.float32), "holds NaN", "the first is row 17: nan"),
        (("x", 1e39, None), "holds values outside the range of float32", "the first is row 17: 1e+39"),
        (("user", 10, None), "holds ids outside its embedding table, which takes 0 to 9", "row 17: 10"),
        (("item", -1, None), "holds ids outside its embedding table, which takes 0 to 19", "row 17: -1"),
        (("user", 1.5, np.float64), "holds numbers that are not whole, where the model takes ids", "1.5"),
    ],
)
def test_a_bad_value_is_named_with_its_row(tmp_path, kind, spoil, what, evidence):
    column, value, dtype = spoil
    data = spoiled(tmp_path, kind, column, 17, value, dtype)
    for read in (data.check, lambda: list(data.batches(4))):
        with pytest.raises(DataError) as caught:
            read()
        text = str(caught.value)
        assert f"column '{column}' of 'rows." in text and what in text
        assert evidence in text and "remedy: " in text


def test_whole_numbers_stored_as_floats_are_ids(tmp_path):
    data = spoiled(tmp_path, "parquet", "user", 17, 3.0, np.float64)
    data.check()
    assert next(data.batches(20)).inputs["ids"][17, 0] == 3


def test_bad_values_are_counted_over_all_rows_of_the_file(tmp_path):
    rows = 100_000
    raw = columns(rows)
    raw["x"][[5, 70_000, 99_999]] = np.nan
    data = open_dataset(write(tmp_path, raw, row_group=1000), BINDINGS)
    with pytest.raises(DataError, match="3 of 100000 rows, the first is row 5: nan"):
        data.check()
    raw = columns()
    raw["x"][40] = np.nan
    path = write(tmp_path, raw)
    with pytest.raises(DataError, match="1 of 20 rows, the first is row 40"):
        open_dataset(path, BINDINGS, (), RowRange(30, 50)).check()
    open_dataset(path, BINDINGS, (), RowRange(0, 40)).check()


@pytest.mark.parametrize("empty", [None, ""])
def test_nulls_are_refused_unless_they_are_values(tmp_path, empty):
    raw = columns(3)
    raw["country"] = pa.array(["de", empty, "fr"])
    path = write(tmp_path, raw)
    with pytest.raises(DataError, match=r"column 'country' of .* holds nulls or empty .*\n.*row 1"):
        open_dataset(path, BINDINGS, ("country",)).check()
    raw["country"] = pa.array(["de", None, "fr"])
    path = write(tmp_path, raw)
    with_null = open_dataset(path, BINDINGS, ("country",), None, ("country",))
    assert next(with_null.batches(3)).columns["country"].tolist() == ["de", None, "fr"]
    raw["item"] = pa.array([1, None, None], pa.int64())
    with pytest.raises(DataError, match=r"column 'item' of .* holds nulls\n.*2 of 3 rows.*row 1: null"):
        open_dataset(write(tmp_path, raw), BINDINGS).check()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.95, None])
def test_a_file_that_is_cut_off_or_damaged_inside_is_refused(tmp_path, kind, keep):
    path = write(tmp_path, columns(5000), kind, row_group=5000)
    content = bytearray(path.read_bytes())
    if keep is None:
        content[300:20_000] = b"\xa5" * 19_700
    else:
        content = content[: keep if isinstance(keep, int) else int(len(content) * keep)]
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is not a whole .*\n  evidence: .+\n  remedy: write it again"):
        open_dataset(path, BINDINGS).check()


def test_arguments_and_files_are_checked_at_the_call(tmp_path):
    with pytest.raises(DataError, match="the data file does not exist"):
        open_dataset(tmp_path / "no.parquet", BINDINGS)
    (tmp_path / "rows.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match=r"its suffix is '.csv'\n  remedy: give a .parquet or an .npz file"):
        open_dataset(tmp_path / "rows.csv", BINDINGS)
    data = open_dataset(write(tmp_path, columns()), BINDINGS)
    with pytest.raises(ConfigError, match="size 0, rows 0 to 53 of 53"):
        data.batches(0)
    with pytest.raises(ConfigError, match="rows 0 to 54 of 53"):
        data.batches(1, stop=54)


def one(column: str, *columns: str, rank: int = 1, **more: Any) -> tuple[InputBinding, ...]:
    return (InputBinding("a", (column, *columns), "float32", rank, **more),)


LISTS = {"h": pa.array([[1, 2], [3, 9]]), "x": pa.array([1.0, 2.0])}
UNEQUAL, LATE = {"h": pa.array([[1, 2], [3]])}, {"when": pa.array([0, 1], US)}
IDS, FEW = BINDINGS[1:2], {k: v[:0] for k, v in columns().items()}
NO_COLUMN = r"column 'users' of 'rows\..*\n.*the nearest of its 6 columns is 'user'\n.*`inputs:`"
NO_SLICE = r"holds lists, where one value a row is wanted\n.*list<element: int64>\n.*under `data.slices`"
NO_LIST = "column 'h' of .* holds lists, where input 'a' takes one number a row"
REFUSED: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[InputBinding, ...], tuple[Any, ...], str]] = {
    "no rows": (FORMATS, FEW, BINDINGS, (), "the data file holds no rows"),
    "a column that is missing": (FORMATS, columns(), one("users"), (), NO_COLUMN),
    "strings": (FORMATS, columns(), one("country"), (), "holds strings, where the model takes float32"),
    "a range": (FORMATS, columns(), BINDINGS, ((), RowRange(0, 54)), r"\[0:54\], and the file has 53 rows"),
    "an id": (PARQUET, LISTS, one("h", rank=2, ids=(range(9),)), (), "the first is row 1: 9 at position 1"),
    "other lengths": (PARQUET, UNEQUAL, one("h", rank=2), (), "holds lists of different lengths"),
    "lists as a number": (PARQUET, LISTS, one("h"), (), NO_LIST),
    "lists among numbers": (PARQUET, LISTS, one("x", "h", rank=2), (), NO_LIST),
    "lists as a slice": (PARQUET, LISTS, (), (("h",), None, ("h",)), NO_SLICE),
    "timestamps": (PARQUET, LATE, one("when"), (), "holds timestamps, where the model"),
    "no timestamp": (PARQUET, {"when": pa.array([0, None], US)}, (), (("when",),), "'when' .* holds nulls"),
    "an id in an array": (NPZ, {"ids": np.array([[9, 19], [9, 20]])}, IDS, (), "row 1: 20 at position 1"),
    "a wide array": (NPZ, {"ids": np.ones((4, 3), int)}, IDS, (), "holds 3 values, and 2 columns are bound"),
    "a flat array": (NPZ, {"ids": np.ones(4, int)}, IDS, (), "holds 1 values, and 2 columns are bound"),
    "Fortran": (NPZ, {"d": np.ones((4, 3), order="F")}, (), (("d",),), "'d' cannot be streamed by rows"),
    "no width": (NPZ, {"d": np.ones((4, 0))}, (), (("d",),), "array 'd' cannot be streamed by rows"),
    "unequal": (NPZ, {"a": np.ones(4), "b": np.ones(5)}, (), (("a",),), "'a' has 4, 'b' has 5"),
    "objects": (NPZ, {"x": np.array([{}, {}], dtype=object)}, one("x"), (), "holds Python objects"),
    "records": (
        NPZ,
        {"x": np.zeros(2, [("a", "i4")])},
        one("x"),
        (),
        "holds values of a type that cannot be",
    ),
    "complex": (NPZ, {"x": np.zeros(2, "c8")}, one("x"), (), "holds values of a type that cannot be read"),
    "bytes": (NPZ, {"x": np.array([b"1", b"x"])}, one("x"), (), "holds byte strings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(tmp_path, name):
    kinds, data, bindings, more, message = REFUSED[name]
    for kind in kinds:
        with pytest.raises(DataError, match=message):
            open_dataset(write(tmp_path, data, kind), bindings, *more).check()


def test_a_null_is_a_value_of_a_slice(tmp_path):
    raw = columns(6)
    raw["shop"] = pa.array([7, 8, 9, None, 7, None], pa.int32())
    raw["score"] = pa.array([0.5, float("nan"), float("inf"), None, 1.0, 1.0])
    raw["when"] = pa.array([0, None, 1, 2, 3, 4], pa.timestamp("s"))
    names = ("shop", "score", "when", "label")
    # Row groups of two: batches join pieces with nulls and pieces without.
    path = write(tmp_path, raw, row_group=2)
    data = open_dataset(path, BINDINGS, names, None, names[:3])
    data.check()
    got = [batch.columns for batch in data.batches(4)]
    assert np.concatenate([part["shop"] for part in got]).tolist() == [7, 8, 9, None, 7, None]
    assert str(np.concatenate([part["score"] for part in got]).tolist()) == "[0.5, nan, inf, None, 1.0, 1.0]"
    assert np.isnat(got[0]["when"]).tolist() == [False, True, False, False]
    with pytest.raises(DataError, match=r"column 'shop' of 'rows\.parquet' holds nulls"):
        open_dataset(path, BINDINGS, names).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 3}, "its rank is 3"),
        ({"rank": 1}, "rank 1 with 2 columns"),
        ({"ids": (range(1),)}, "1 ranges for 2 columns"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
    ],
)
def test_contradictory_bindings_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BINDINGS[0], **change)


def test_memory_does_not_grow_with_rows(tmp_path):
    """Eight times the rows, in one row group, must not double what arrow and Python hold at the peak."""

    def peak(rows: int) -> int:
        random = np.random.default_rng(0)
        path = tmp_path / f"{rows}.parquet"
        pq.write_table(pa.table({"x": random.standard_normal(rows)}), path, row_group_size=rows)
        data = open_dataset(path, [InputBinding("x", ("x",), "float32", 1)])
        before, top = pa.total_allocated_bytes(), 0
        tracemalloc.start()
        for _ in data.batches(1024):
            top = max(top, pa.total_allocated_bytes() - before)
        top += tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    # One row group of 1,600,000 doubles is 12.8 MB; what is held must be a small part of it.
    assert peak(1_600_000) < 2 * peak(200_000)


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "rows.parquet").mkdir()
    with pytest.raises(OSError, match=r"rows\.parquet"):
        write_table({"x": np.arange(4.0)}, tmp_path / "rows.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


def test_a_file_that_we_write_shows_a_flipped_bit(tmp_path):
    """Pages are written with checksums, which readers verify."""
    path = tmp_path / "rows.parquet"
    values = np.arange(4096, dtype=np.float64)
    write_table(pa.table({"x": values}), path)
    data = bytearray(path.read_bytes())
    place = data.find(values[1000:1002].tobytes())
    assert place > 0 or pq.ParquetFile(path).metadata.row_group(0).column(0).compression != "UNCOMPRESSED"
    data[place if place > 0 else len(data) // 3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(OSError, match="checksum"):
        pq.read_table(path, page_checksum_verification=True)

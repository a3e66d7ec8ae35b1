"""Reading rows: binding, batching, checks; Parquet and npz through one suite."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loka_onnx.data import HashRows, InputBinding, RowRange, open_dataset
from loka_onnx.errors import ConfigError, DataError

ROWS = 53
BINDINGS = (
    InputBinding("dense", ("x", "y"), "float32", 2),
    InputBinding("ids", ("user", "item"), "int64", 2, (range(10), range(20))),
    InputBinding("age", ("x",), "float32", 1),
)
FORMATS = ("parquet", "npz", "npz-compressed")


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


def test_an_id_in_a_list_is_checked(tmp_path):
    path = write(tmp_path, {"h": pa.array([[1, 2], [3, 9]])})
    data = open_dataset(path, [InputBinding("history", ("h",), "int64", 2, (range(9),))])
    with pytest.raises(DataError, match=r"1 of 2 rows, the first is row 1: 9 at position 1"):
        data.check()


def test_lists_of_different_lengths_are_refused(tmp_path):
    path = write(tmp_path, {"h": pa.array([[1, 2], [3]])})
    data = open_dataset(path, [InputBinding("history", ("h",), "int64", 2)])
    with pytest.raises(DataError, match=r"column 'h' of 'rows.parquet' holds lists of different lengths"):
        list(data.batches(2))


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
        (
            ("user", 1.5, np.float64),
            "holds numbers that are not whole, where the model takes ids (int64)",
            "1.5",
        ),
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


def test_check_counts_over_the_whole_data_set(tmp_path):
    rows = 100_000
    raw = columns(rows)
    raw["x"][[5, 70_000, 99_999]] = np.nan
    data = open_dataset(write(tmp_path, raw, row_group=1000), BINDINGS)
    with pytest.raises(DataError, match="3 of 100000 rows, the first is row 5: nan"):
        data.check()


@pytest.mark.parametrize("empty", [None, ""])
def test_nulls_are_refused_unless_they_are_values(tmp_path, empty):
    raw = columns(3)
    raw["country"] = pa.array(["de", empty, "fr"])
    path = write(tmp_path, raw)
    with pytest.raises(
        DataError, match=r"column 'country' of 'rows.parquet' holds nulls or empty .*\n.*row 1"
    ):
        open_dataset(path, BINDINGS, ("country",)).check()
    raw["country"] = pa.array(["de", None, "fr"])
    path = write(tmp_path, raw)
    with_null = open_dataset(path, BINDINGS, ("country",), None, ("country",))
    assert next(with_null.batches(3)).columns["country"].tolist() == ["de", None, "fr"]
    raw["item"] = pa.array([1, None, None], pa.int64())
    with pytest.raises(
        DataError, match=r"column 'item' of 'rows.parquet' holds nulls\n.*2 of 3 rows.*row 1: null"
    ):
        open_dataset(write(tmp_path, raw), BINDINGS).check()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_missing_column_names_the_nearest(tmp_path, kind):
    path = write(tmp_path, columns(), kind)
    with pytest.raises(DataError) as caught:
        open_dataset(path, [InputBinding("ids", ("users",), "int64", 1)])
    assert "column 'users' of 'rows." in str(caught.value)
    assert "the nearest of its 6 columns is 'user'" in str(caught.value)
    assert "`inputs:`" in str(caught.value)


@pytest.mark.parametrize("kind", FORMATS)
def test_strings_cannot_feed_an_input(tmp_path, kind):
    path = write(tmp_path, columns(), kind)
    with pytest.raises(
        DataError, match=r"column 'country' of .* holds strings, where the model takes float32"
    ):
        open_dataset(path, [InputBinding("dense", ("country",), "float32", 1)])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.95])
def test_a_truncated_file_is_refused(tmp_path, kind, keep):
    path = write(tmp_path, columns(2000), kind)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(
        DataError, match=r"the file is not a whole .*\n  evidence: .+\n  remedy: write it again"
    ):
        open_dataset(path, BINDINGS)


@pytest.mark.parametrize("kind", ["parquet", "npz", "npz-compressed"])
def test_damage_inside_a_file_is_a_data_error(tmp_path, kind):
    path = write(tmp_path, columns(5000), kind, row_group=5000)
    content = bytearray(path.read_bytes())
    content[300:20_000] = b"\xa5" * 19_700
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"the file is not a whole .*\n  evidence: .+\n  remedy: write it again"
    ):
        open_dataset(path, BINDINGS).check()


def test_missing_empty_and_unknown_files(tmp_path):
    with pytest.raises(DataError, match="the data file does not exist"):
        open_dataset(tmp_path / "no.parquet", BINDINGS)
    with pytest.raises(DataError, match="the data file holds no rows"):
        open_dataset(write(tmp_path, {k: v[:0] for k, v in columns().items()}), BINDINGS)
    (tmp_path / "rows.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match=r"its suffix is '.csv'\n  remedy: give a .parquet or an .npz file"):
        open_dataset(tmp_path / "rows.csv", BINDINGS)


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


def test_timestamps_can_be_slices_but_not_inputs(tmp_path):
    when = pa.array([0, 1, 2], pa.timestamp("us"))
    path = write(tmp_path, {"when": when, "x": np.ones(3)})
    batch = next(open_dataset(path, (), ("when",)).batches(3))
    assert batch.columns["when"].dtype.kind == "M"
    with pytest.raises(DataError, match=r"column 'when' of 'rows.parquet' holds timestamps, where the model"):
        open_dataset(path, [InputBinding("x", ("when",), "float32", 1)])
    path = write(tmp_path, {"when": pa.array([0, None], pa.timestamp("us"))})
    with pytest.raises(DataError, match=r"column 'when' of 'rows.parquet' holds nulls"):
        open_dataset(path, (), ("when",)).check()


def test_a_range_outside_the_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"rows\[0:54\], and the file has 53 rows"):
        open_dataset(write(tmp_path, columns()), BINDINGS, (), RowRange(0, 54))
    with pytest.raises(ConfigError, match="0 <= start < stop"):
        RowRange(5, 5)


def test_npz_input_array_checks_each_of_its_columns(tmp_path):
    path = tmp_path / "rows.npz"
    np.savez(path, ids=np.array([[9, 19], [9, 20]]))
    data = open_dataset(path, BINDINGS[1:2])
    with pytest.raises(
        DataError, match=r"column .ids. of(?s:.*)1 of 2 rows, the first is row 1: 20 at position 1"
    ):
        data.check()
    np.savez(path, ids=np.ones((4, 3), int))
    with pytest.raises(DataError, match="a row holds 3 values, and 2 columns are bound"):
        open_dataset(path, BINDINGS[1:2])
    np.savez(path, ids=np.ones(4, int))
    with pytest.raises(DataError, match="a row holds 1 values, and 2 columns are bound"):
        open_dataset(path, BINDINGS[1:2])


def test_lists_cannot_feed_a_scalar_input(tmp_path):
    path = write(tmp_path, {"h": pa.array([[1, 2], [3, 4]]), "x": pa.array([1.0, 2.0])})
    for binding in (InputBinding("a", ("h",), "int64", 1), InputBinding("b", ("x", "h"), "float32", 2)):
        with pytest.raises(
            DataError, match=r"column 'h' of .* holds lists, where input '.' takes one number a row"
        ):
            open_dataset(path, [binding])


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

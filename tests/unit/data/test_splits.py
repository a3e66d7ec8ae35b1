"""Disjoint splits."""

import itertools
import shutil
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.data import (
    HashRows,
    InputBinding,
    RowRange,
    SplitRule,
    Splits,
    ensure_disjoint,
    open_dataset,
    split_file,
)
from loka_onnx.data.selection import stable_hash
from loka_onnx.errors import ConfigError, DataError

BINDING = (InputBinding("x", ("x",), "float32", 1),)


@pytest.fixture
def path(tmp_path):
    target = tmp_path / "day.parquet"
    request = np.repeat(np.arange(500), 2)
    np.random.default_rng(0).shuffle(request)
    table = {"x": np.arange(1000.0), "request": request, "country": np.array(["de", "fr"])[request % 2]}
    pq.write_table(pa.table(table), target, row_group_size=64)
    return target


def rows_of(data):
    return {int(x) for batch in data.batches(64) for x in batch.inputs["x"]}


def test_fractions_are_contiguous_and_hashes_keep_groups_together(path):
    splits = split_file(path, SplitRule(), BINDING)
    assert (splits.calibration.rows, splits.selection.rows, splits.certification.rows) == (200, 300, 500)
    assert rows_of(splits.selection) == set(range(200, 500))
    rule = SplitRule(0.2, 0.3, 0.5, column="request")
    splits = split_file(path, rule, BINDING, ("request",))
    parts = [splits.calibration, splits.selection, splits.certification]
    groups = [{int(g) for b in part.batches(100) for g in b.columns["request"]} for part in parts]
    assert not (groups[0] & groups[1] or groups[1] & groups[2] or groups[0] & groups[2])
    assert set.union(*(rows_of(part) for part in parts)) == set(range(1000))
    # 500 keys: four standard errors of a fraction of .5 are 9 %.
    assert np.allclose([part.rows / 1000 for part in parts], [0.2, 0.3, 0.5], atol=0.09)
    with pytest.raises(ConfigError, match=r"a split would hold no row\n  evidence: row bounds"):
        SplitRule().selections(2)


def test_strings_can_be_the_key_and_floats_cannot(path):
    data = open_dataset(path, BINDING, ("country",), HashRows("country", 0.0, 0.999))
    assert set(next(data.batches(64)).columns["country"]) <= {"de", "fr"}
    with pytest.raises(DataError, match="a key to split by must be a column of integers or strings"):
        open_dataset(path, BINDING, (), HashRows("x", 0.0, 0.5))
    with pytest.raises(DataError, match="selects none of 1000 rows"):
        open_dataset(path, BINDING, (), HashRows("country", 0.0, 1e-9))


def test_hashes_are_fixed_forever():
    """Splits of stored runs must not move: values computed by a plain-integer SplitMix64 step."""
    mask = 2**64 - 1

    def reference(key: int, seed: int) -> int:
        x = (key + (2 * seed + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    keys = np.array([0, 1, -1, 2**62, 12345])
    for seed in (0, 1, 7):
        assert stable_hash(keys, seed).tolist() == [reference(int(k) & mask, seed) for k in keys]
    # First output of SplitMix64 from state 0, as published with its reference implementation.
    assert int(stable_hash(np.array([0]))[0]) == 0xE220A8397B1DCDAF
    assert stable_hash(np.array(["a"])).tolist() == stable_hash(np.array(["b", "a"]))[1:].tolist()


@given(st.integers(10, 10_000), st.tuples(*[st.floats(0.15, 0.33)] * 3))
def test_fraction_ranges_never_overlap(rows, fractions):
    ranges = SplitRule(*fractions).selections(rows)
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))
    assert ranges[-1].stop <= rows
    for selected, fraction in zip(ranges, fractions, strict=True):
        assert abs((selected.stop - selected.start) - fraction * rows) <= 1


def test_the_same_file_twice_is_refused_even_as_a_copy(path, tmp_path):
    copy = tmp_path / "other.parquet"
    shutil.copy(path, copy)
    third = tmp_path / "third.parquet"
    pq.write_table(pa.table({"x": np.arange(5.0)}), third)
    a, b, c = (open_dataset(p, BINDING) for p in (third, path, copy))
    with pytest.raises(ConfigError) as caught:
        ensure_disjoint(a, b, c)
    text = str(caught.value)
    assert "selection and certification are the same file" in text
    assert "certification is looked at once" in text
    assert "'day.parquet'" in text and "'other.parquet'" in text and "remedy: give three files" in text


@pytest.mark.parametrize(
    ("one", "two", "refused"),
    [
        (RowRange(0, 100), RowRange(100, None), False),
        (RowRange(0, 101), RowRange(100, None), True),
        (RowRange(500), RowRange(0, 500), False),
        (HashRows("request", 0, 0.5), HashRows("request", 0.5, 1), False),
        (HashRows("request", 0, 0.6), HashRows("request", 0.5, 1), True),
        (HashRows("request", 0, 0.5, 1), HashRows("request", 0.5, 1, 2), True),
        (HashRows("request", 0, 0.5), RowRange(0, 10), True),
    ],
)
def test_ranges_of_one_file(path, tmp_path, one, two, refused):
    third = tmp_path / "third.parquet"
    pq.write_table(pa.table({"x": np.arange(5.0)}), third)
    a, b = open_dataset(path, BINDING, (), one), open_dataset(path, BINDING, (), two)
    certification = open_dataset(third, BINDING)
    share = pytest.raises(ConfigError, match="calibration and selection share rows of the same file")
    with share if refused else nullcontext():
        Splits(a, b, certification)

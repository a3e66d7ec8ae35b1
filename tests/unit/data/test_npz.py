"""Rows of .npz files: whatever is read in turns, and from wherever, is what numpy.load reads."""

import io
import os
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from loka_onnx.data import InputBinding, open_dataset
from loka_onnx.errors import DataError

ROWS = 60_000
"""Of eight bytes: several times what zipfile reads ahead."""


def write_mixed(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    """Every second member is compressed."""
    with zipfile.ZipFile(path, "w") as archive:
        for index, (name, array) in enumerate(arrays.items()):
            held = io.BytesIO()
            np.save(held, array)
            method = zipfile.ZIP_DEFLATED if index % 2 else zipfile.ZIP_STORED
            archive.writestr(f"{name}.npy", held.getvalue(), method)
    return path


@pytest.fixture
def moved_from_where_another_member_left_it(monkeypatch):
    """Positioning of CPython 3.12.3: `ZipExtFile.seek` moves relative to the position that members share."""

    def of_the_file(self, offset, whence=0):
        with self._lock:
            self._file.seek(offset, whence)
            self._pos = self._file.tell()
            return self._pos

    decoded = zipfile.ZipExtFile.seek

    def of_a_member(self, offset, whence=os.SEEK_SET):
        if self._compress_type != zipfile.ZIP_STORED:
            return decoded(self, offset, whence)
        distance = offset if whence == os.SEEK_CUR else offset - self.tell()
        if not 0 <= distance + self._offset < len(self._readbuffer):
            self._expected_crc = None
            distance -= len(self._readbuffer) - self._offset
            self._fileobj.seek(distance, os.SEEK_CUR)
            self._left -= distance
            self._readbuffer, self._offset = b"", 0
        else:
            self._offset += distance
        return self.tell()

    monkeypatch.setattr(zipfile._SharedFile, "seek", of_the_file)
    monkeypatch.setattr(zipfile.ZipExtFile, "seek", of_a_member)


@pytest.mark.parametrize("how", ["stored", "compressed", "mixed"])
@pytest.mark.parametrize("shared", [False, True])
def test_members_that_are_read_in_turns_are_those_of_numpy(tmp_path, how, shared, request):
    if shared:
        request.getfixturevalue("moved_from_where_another_member_left_it")
    random = np.random.default_rng(0)
    arrays = {
        "x": random.standard_normal(ROWS),
        "y": random.standard_normal(ROWS).astype(">f4"),
        "ids": random.integers(0, 1000, (ROWS, 5)),
        "item": random.integers(0, 1000, ROWS).astype(np.uint8),
        "key": random.integers(0, 10**6, ROWS),
    }
    path = tmp_path / "rows.npz"
    if how == "mixed":
        write_mixed(path, arrays)
    else:
        (np.savez if how == "stored" else np.savez_compressed)(path, **arrays)
    bindings = [
        InputBinding("dense", ("x", "y"), "float32", 2),
        InputBinding("ids", ("ids",), "int64", 2),
        InputBinding("item", ("item",), "int64", 1),
    ]
    data = open_dataset(path, bindings, ("key",))
    with np.load(path) as loaded:
        expected = {name: loaded[name] for name in arrays}
    # Two readers at once, from different rows, in pieces that end nowhere near a buffer's end.
    starts = (0, 31_234)
    readers = [data.batches(1_717, start=start) for start in starts]
    at = list(starts)
    for pair in zip(*readers, strict=False):
        for which, batch in enumerate(pair):
            rows = slice(at[which], at[which] + batch.rows)
            dense = np.stack([expected["x"][rows], expected["y"][rows]], axis=1).astype(np.float32)
            np.testing.assert_array_equal(batch.inputs["dense"], dense)
            np.testing.assert_array_equal(batch.inputs["ids"], expected["ids"][rows])
            np.testing.assert_array_equal(batch.inputs["item"], expected["item"][rows])
            np.testing.assert_array_equal(batch.columns["key"], expected["key"][rows])
            at[which] += batch.rows
    assert at[1] == ROWS and at[0] > ROWS // 3
    last = next(data.batches(7, start=ROWS - 3))
    np.testing.assert_array_equal(last.inputs["ids"], expected["ids"][-3:])
    last.inputs["ids"][:] = 0
    np.testing.assert_array_equal(next(data.batches(7, start=ROWS - 3)).inputs["ids"], expected["ids"][-3:])


def test_a_changed_byte_of_a_stored_array_is_found_where_all_rows_are_read(tmp_path):
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.zeros(ROWS), y=np.zeros(ROWS))
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    data = open_dataset(path, [InputBinding("d", ("x", "y"), "float64", 2)])
    with pytest.raises(DataError, match="not a whole"):
        data.check()
    # Nothing is known of a part.
    assert sum(batch.rows for batch in data.batches(3000, start=50)) == ROWS - 50


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_header_is_a_data_error(tmp_path, seed):
    """NumPy gives the header to Python's parser, which has errors of its own."""
    random = np.random.default_rng(seed)
    held = io.BytesIO()
    np.save(held, np.zeros((5, 3), np.float32))
    good, path, refused = held.getvalue(), tmp_path / "rows.npz", 0
    odd = [b"9" * 30, b"None", b"'O'", b"'''", b"f'{", b"-5", *(bytes([char]) for char in b"(){'-[\n\0")]
    for _ in range(150):
        data = bytearray(good)
        for _ in range(random.integers(1, 5)):
            at, length = random.integers(0, 120), random.integers(0, 6)
            data[at : at + length] = odd[random.integers(len(odd))]
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", bytes(data))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                open_dataset(path, [InputBinding("x", ("x",), "float32", 2)]).check()
            except DataError:
                refused += 1
    assert refused > 120


def test_what_lies_before_the_first_row_is_not_held(tmp_path):
    for write in (np.savez, np.savez_compressed):
        path = tmp_path / "rows.npz"
        write(path, x=np.zeros(1_000_000))
        data = open_dataset(path, [InputBinding("x", ("x",), "float32", 1)])
        tracemalloc.start()
        batches = list(data.batches(64, start=999_990))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # Seen: 2.2 MB, of 8 MB that are passed over.
        assert batches[0].rows == 10 and peak < 4e6


def test_zip_members_of_other_kinds_are_ignored(tmp_path):
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.zeros(9))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", "hello")
    assert open_dataset(path, [InputBinding("x", ("x",), "float32", 1)]).rows == 9

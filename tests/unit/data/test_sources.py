"""Files of rows: .npz members, and where rows may come from."""

import importlib.util
import io
import math
import os
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from loka_onnx.data import InputBinding, ensure_disjoint, open_dataset
from loka_onnx.errors import DataError, MissingPackage
from loka_zoo import movielens100k as ml
from loka_zoo.movielens1m import CATEGORICAL, movielens_1m
from loka_zoo.prepared import SPLITS
from loka_zoo.synthetic import LABEL, TEACHER, SyntheticOptions, prepare_synthetic

USERS = [
    {"user_id": str(i), "age": a, "gender": g, "occupation": o, "zip_code": z}
    for i, a, g, o, z in [
        (1, "17", "M", "writer", "85711"),
        (2, "24", "F", "other", "94043"),
        (3, "60", "F", "other", "V1G4L"),
        (4, "30", "M", "doctor", "94110"),
    ]
]
ITEMS = [
    {"item_id": str(i), "movie_title": t, "release_year": y, "class": c}
    for i, t, y, c in [
        (1, "Toy Story", "1995", "Animation Comedy"),
        (2, "Star Story", "1977", "Action Comedy Drama War"),
        (3, "Heat", "1995", "Action"),
        (4, "Unknown One", "", "unknown"),
        (5, "Alien", "1979", "Horror"),
    ]
]


def ratings(seed: int, rows: int = 14) -> list[dict[str, str]]:
    random = np.random.default_rng(seed)
    pairs = [(u, i) for u in range(1, 4) for i in range(1, 6)]
    chosen = [pairs[p] for p in random.permutation(len(pairs))[:rows]]
    return [{"user_id": str(u), "item_id": str(i), "rating": str(random.integers(1, 6))} for u, i in chosen]


def brute_force(
    train: list[tuple[int, int]], user: int, item: int, leave_out: int | None
) -> dict[str, float]:
    """The documented formulas for one row, with lists and loops (0-based ids)."""
    genres = [set(i["class"].split()) - {"unknown"} for i in ITEMS]
    known = [float(i["release_year"]) for i in ITEMS if i["release_year"]]
    years = [float(i["release_year"]) if i["release_year"] else sum(known) / len(known) for i in ITEMS]
    others = [pair for row, pair in enumerate(train) if row != leave_out]
    mine = [i for u, i in others if u == user]
    affinities = []
    for genre in genres[item]:
        share = sum(genre in genres[i] for _, i in train) / len(train)
        share = max(share, 1 / (len(train) + 1))
        count = sum(genre in genres[i] for i in mine)
        affinities.append(math.log((count + 5 * share) / ((len(mine) + 5) * share)))
    return {
        "log_user_cnt": math.log(1 + len(mine)),
        "log_item_cnt": math.log(1 + sum(i == item for _, i in others)),
        "year": years[item],
        "n_genres": len(genres[item]),
        "age": float(USERS[user]["age"]),
        "genre_aff_mean": sum(affinities) / len(affinities) if affinities else 0.0,
        "genre_aff_max": max(affinities) if affinities else 0.0,
        "year_gap": abs(years[item] - sum(years[i] for i in mine) / len(mine)) if mine else 0.0,
    }


@pytest.mark.parametrize("seed", range(5))
def test_statistics_are_leave_one_out_over_training_rows_only(seed):
    rows = ratings(seed)
    train = np.arange(8)
    positions = ml.build_ratings(USERS, ITEMS, rows, train)
    got = ml.raw_statistics(ml.build_catalog(USERS, ITEMS), positions)
    pairs = list(zip(positions.user.tolist(), positions.item.tolist(), strict=True))
    for row, (user, item) in enumerate(pairs):
        want = brute_force(pairs[:8], user, item, row if row < 8 else None)
        for name in ml.NUMERIC:
            assert got[name][row] == pytest.approx(want[name], abs=1e-12), (name, row)


def test_unseen_users_and_items_have_the_documented_defaults():
    # User 4 and item 5 occur in no training row.
    rows = [r for r in ratings(0, 15) if r["item_id"] != "5"]
    rows.append({"user_id": "4", "item_id": "5", "rating": "5"})
    train = np.arange(len(rows) - 1)
    got = ml.raw_statistics(ml.build_catalog(USERS, ITEMS), ml.build_ratings(USERS, ITEMS, rows, train))
    last = {name: float(values[-1]) for name, values in got.items()}
    assert last["log_user_cnt"] == last["log_item_cnt"] == last["year_gap"] == 0
    assert last["genre_aff_mean"] == last["genre_aff_max"] == 0


@pytest.mark.parametrize("what", ["ratings", "pairs"])
def test_held_out_rows_do_not_reach_training_features(what):
    rows, train = ratings(1), np.arange(8)
    changed = [dict(row) for row in rows]
    for row in changed[8:]:
        row["rating"] = str(6 - int(row["rating"]))
        if what == "pairs":
            row["item_id"], row["user_id"] = "1", "1"
    catalog = ml.build_catalog(USERS, ITEMS)
    before, after = (
        ml.build_columns(catalog, ml.build_ratings(USERS, ITEMS, r, train)) for r in (rows, changed)
    )
    for name in before:
        np.testing.assert_array_equal(before[name][train], after[name][train])


def test_attributes_are_encoded_and_labels_reach_no_feature():
    # A leave-one-out mean of labels would tell the label of its own row.
    rows = ratings(1)
    flipped = [row | {"rating": str(6 - int(row["rating"]))} for row in rows]
    catalog, train = ml.build_catalog(USERS, ITEMS), np.arange(8)
    one, two = (ml.build_columns(catalog, ml.build_ratings(USERS, ITEMS, r, train)) for r in (rows, flipped))
    assert [name for name in one if not np.array_equal(one[name], two[name])] == ["label"]
    assert one["label"].tolist() == [int(int(row["rating"]) >= 4) for row in rows]
    catalog = ml.build_catalog(USERS, ITEMS)
    assert catalog.users["age_bucket"].tolist() == [0, 1, 6, 2]
    assert catalog.users["zip3"].tolist() == [1, 2, 4, 3]
    assert catalog.items["genre1"].tolist() == [2, 1, 1, 0, 5]
    assert catalog.items["genre3"].tolist() == [0, 4, 0, 0, 0]
    assert catalog.items["year5"].tolist() == [5, 1, 5, 0, 1]
    assert catalog.items["title_word"][0] == catalog.items["title_word"][1] != 0
    for name, ids in (dict(catalog.users) | dict(catalog.items)).items():
        assert ids.min() >= 0 and ids.max() < catalog.cardinalities[name]


def test_unknown_items_and_broken_or_absent_sources_are_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"names a user or an item that has no attributes(?s:.*)id '9'"):
        ml.build_ratings(USERS, ITEMS, [{"user_id": "1", "item_id": "9", "rating": "3"}], np.arange(1))
    (tmp_path / "ml-100k.user").write_text("user_id:token\tage:token\n1\n")
    with pytest.raises(DataError, match="a file of MovieLens 100K cannot be read"):
        ml.prepare_movielens_100k(tmp_path / "out", source=tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install --no-deps recbole==1.2.1"):
        ml.prepare_movielens_100k(tmp_path)
    monkeypatch.delenv("LOKA_ONNX_DATA", raising=False)
    with pytest.raises(DataError, match=r"\$LOKA_ONNX_DATA(?s:.*)variable is not set(?s:.*)movielens-1m/"):
        movielens_1m()


# ---- the real MovieLens files ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hundred(tmp_path_factory):
    if importlib.util.find_spec("recbole") is None:
        pytest.skip("needs recbole: pip install --no-deps recbole==1.2.1")
    return ml.prepare_movielens_100k(tmp_path_factory.mktemp("ml100k"))


@pytest.mark.slow
def test_movielens_100k_has_the_documented_splits(hundred):
    data = {split: hundred.open(split) for split in SPLITS}
    assert [d.rows for d in data.values()] == [50_000, 8_000, 12_000, 30_000]
    for opened in data.values():
        opened.check()
    ensure_disjoint(data["calibration"], data["selection"], data["certification"])
    pairs = [
        tuple(pair)
        for split in SPLITS
        for batch in data[split].batches(10_000)
        for pair in batch.inputs["ids"][:, [0, 5]].tolist()
    ]
    assert len(set(pairs)) == len(pairs) == 100_000
    assert dict(hundred.categorical)["user_id"] == 943 and dict(hundred.categorical)["item_id"] == 1682
    assert [name for name, _ in hundred.categorical] == [name for name, _ in CATEGORICAL]


def test_movielens_1m_in_place(data_root):
    prepared = movielens_1m(data_root)
    rows = [prepared.open(split).rows for split in SPLITS]
    assert rows == [800_000, 60_000, 100_000, 299_280]
    splits = [prepared.open(split) for split in SPLITS[1:]]
    ensure_disjoint(*splits)
    splits[0].check()
    batch = next(splits[1].batches(256))
    assert batch.inputs["dense"].dtype == np.float32 and batch.inputs["ids"].dtype == np.int64
    assert batch.inputs["ids"].shape == (256, 11)


# ---- generated -------------------------------------------------------------------------------------------


def test_synthetic_labels_follow_the_teacher(tmp_path):
    data = prepare_synthetic(tmp_path, SyntheticOptions(rows=(10, 10, 10, 40_000), spread=2.0))
    assert data.rule.startswith("SYNTHETIC")
    opened = data.open("certification", (LABEL, TEACHER))
    opened.check()
    batch = next(opened.batches(40_000))
    label, logit = batch.columns[LABEL].astype(float), batch.columns[TEACHER]
    probability = 1 / (1 + np.exp(-logit))
    assert logit.std() == pytest.approx(2.0, rel=0.03)
    loss = -np.mean(label * np.log(probability) + (1 - label) * np.log1p(-probability))
    entropy = -np.mean(probability * np.log(probability) + (1 - probability) * np.log1p(-probability))
    # Var of a row's loss given p is p(1-p)·logit², so four standard errors of the mean are:
    bound = 4 * math.sqrt(np.mean(probability * (1 - probability) * logit**2) / label.size)
    assert abs(loss - entropy) < bound


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

"""Built-in data: MovieLens 100K and 1M, generated rows."""

import importlib.util
import math

import numpy as np
import pytest

from loka_onnx.data import ensure_disjoint
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

"""MovieLens 100K (GroupLens) as a ranking task: the data of the demo.

The ratings ship inside the wheel of recbole 1.2.1, whose files are read without importing it. A row is one
rating; its label is whether the rating is at least 4.

Statistics of users and items (counts, genre affinities, mean release year, standardization) come from the
training rows alone. For a training row they are leave-one-out, so that a row looks to the model as it would
have looked before it happened. Affinities count *which* genres a user rated and not *how*: a leave-one-out
mean of labels tells the label of the row that was left out (it moves against it), and a model reads that.
"""

from __future__ import annotations

import csv
import importlib.util
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from loka_onnx.data.batch import Array
from loka_onnx.data.parquet import write_table
from loka_onnx.errors import DataError, MissingPackage
from loka_zoo.prepared import SPLITS, Part, PreparedData, make_directory

NUMERIC = (
    "log_user_cnt",
    "log_item_cnt",
    "year",
    "n_genres",
    "age",
    "genre_aff_mean",
    "genre_aff_max",
    "year_gap",
)
LABEL = "label"
RULE = (
    "label: rating >= 4. Rows permuted by seed: 50,000 train, 8,000 calibration, 12,000 selection, 30,000 "
    "certification. Statistics from training rows only, leave-one-out for these; an unseen user or item has "
    "count 0, affinity 0 and year gap 0 before standardization"
)
_SIZES = {"train": 50_000, "calibration": 8_000, "selection": 12_000, "certification": 30_000}
# Lower ends of the age groups of MovieLens 1M.
_AGES = np.array([18, 25, 35, 45, 50, 56])
_GENRE_SLOTS = 3
_TITLE_WORDS = 82
# Ratings' worth of prior that pull an affinity towards 0 when a user has few.
_PRIOR = 5.0


@dataclass(frozen=True)
class Catalog:
    """Attributes of users and items, which are known before any rating.

    Attributes:
        users: Categorical ids by name, each (users,) int64.
        items: Categorical ids by name, each (items,) int64.
        cardinalities: Number of ids of each categorical, by name.
        age: (users,) years.
        year: (items,) release year; the mean of the known ones where it is unknown.
        genres: (items, genres) bool.
    """

    users: Mapping[str, Array]
    items: Mapping[str, Array]
    cardinalities: Mapping[str, int]
    age: Array
    year: Array
    genres: Array


@dataclass(frozen=True)
class Ratings:
    """Ratings as positions in the catalog.

    Attributes:
        user: (ratings,) int64.
        item: (ratings,) int64.
        label: (ratings,) int8, 1 where the rating is at least 4.
        train: (ratings,) bool, which rows statistics may use.
    """

    user: Array
    item: Array
    label: Array
    train: Array


def locate() -> Path:
    """Find the directory of the files (`MissingPackage` without recbole, or where it does not hold them)."""
    spec = importlib.util.find_spec("recbole")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        directory = Path(place) / "dataset_example" / "ml-100k"
        if (directory / "ml-100k.inter").is_file():
            return directory
    raise MissingPackage(
        "MovieLens 100K is not on this machine",
        evidence="it is read from inside the package recbole, which "
        + ("is not installed" if spec is None else "lacks dataset_example/ml-100k"),
        remedy="pip install --no-deps recbole==1.2.1",
    )


def prepare_movielens_100k(
    directory: str | Path, *, source: str | Path | None = None, seed: int = 7
) -> PreparedData:
    """Write train, calibration, selection and certification as Parquet files, each whole or not at all.

    `source` holds the `ml-100k.*` files, by default in the installed recbole; `seed` permutes the ratings
    before they are divided.

    Raises:
        MissingPackage: When `source` is None and recbole is not installed.
        DataError: When a file is not what is expected.
    """
    origin, target = locate() if source is None else Path(source), make_directory(directory)
    users, items, ratings = (_read_table(origin / f"ml-100k.{kind}") for kind in ("user", "item", "inter"))
    catalog = build_catalog(users, items)
    order = np.random.default_rng(seed).permutation(len(ratings))
    parts = divide(len(ratings), order)
    positions = build_ratings(users, items, ratings, parts["train"])
    columns = build_columns(catalog, positions)
    splits = {}
    for name in SPLITS:
        path = target / f"{name}.parquet"
        write_table(pa.table({key: values[parts[name]] for key, values in columns.items()}), path)
        splits[name] = Part(path)
    return PreparedData(
        "movielens-100k",
        target,
        splits,
        tuple(catalog.cardinalities.items()),
        NUMERIC,
        LABEL,
        f"{RULE} (seed {seed})",
    )


def divide(rows: int, order: Array) -> dict[str, Array]:
    """Row indices of each split of a permutation (rows,), in the proportions 50 : 8 : 12 : 30."""
    total = sum(_SIZES.values())
    ends = np.cumsum([size * rows // total for size in _SIZES.values()])
    return dict(zip(_SIZES, np.split(order, ends[:-1]), strict=True))


def build_catalog(users: Sequence[Mapping[str, str]], items: Sequence[Mapping[str, str]]) -> Catalog:
    """Encodes attributes; id 0 of zip3, year5, genres and title_word means none or unknown."""
    age = np.array([float(user["age"]) for user in users])
    year = np.array(
        [float(item["release_year"]) if item["release_year"].isdigit() else np.nan for item in items]
    )
    year5 = np.where(np.isnan(year), np.nan, year // 5)
    first = np.nanmin(year5)
    genre_lists = [[g for g in item["class"].split() if g != "unknown"] for item in items]
    genre_ids = _vocabulary(g for genres in genre_lists for g in genres)
    genres = np.zeros((len(items), len(genre_ids)), dtype=bool)
    for row, names in enumerate(genre_lists):
        genres[row, [genre_ids[name] - 1 for name in names]] = True
    slots = np.zeros((len(items), _GENRE_SLOTS), dtype=np.int64)
    for row, names in enumerate(genre_lists):
        kept = sorted(genre_ids[name] for name in names)[:_GENRE_SLOTS]
        slots[row, : len(kept)] = kept
    occupations = {name: i for i, name in enumerate(sorted({user["occupation"] for user in users}))}
    zips = _vocabulary(user["zip_code"][:3] for user in users)
    words = _title_words([item["movie_title"] for item in items])
    user_ids = {
        "user_id": np.arange(len(users)),
        "gender": np.array([int(user["gender"] == "M") for user in users]),
        "age_bucket": np.searchsorted(_AGES, age, side="right"),
        "occupation": np.array([occupations[user["occupation"]] for user in users]),
        "zip3": np.array([zips[user["zip_code"][:3]] for user in users]),
    }
    item_ids = {
        "item_id": np.arange(len(items)),
        "year5": np.where(np.isnan(year5), 0, year5 - first + 1).astype(np.int64),
        **{f"genre{slot + 1}": slots[:, slot] for slot in range(_GENRE_SLOTS)},
        "title_word": words,
    }
    cardinalities = {name: int(ids.max()) + 1 for name, ids in (user_ids | item_ids).items()}
    cardinalities |= {f"genre{slot + 1}": len(genre_ids) + 1 for slot in range(_GENRE_SLOTS)}
    cardinalities |= {"gender": 2, "age_bucket": len(_AGES) + 1}
    return Catalog(
        user_ids, item_ids, cardinalities, age, np.where(np.isnan(year), np.nanmean(year), year), genres
    )


def build_ratings(
    users: Sequence[Mapping[str, str]],
    items: Sequence[Mapping[str, str]],
    ratings: Sequence[Mapping[str, str]],
    train: Array,
) -> Ratings:
    """Look up the user and the item of each rating; `train` are the indices of the training rows."""
    by_user = {user["user_id"]: position for position, user in enumerate(users)}
    by_item = {item["item_id"]: position for position, item in enumerate(items)}
    try:
        user = np.array([by_user[row["user_id"]] for row in ratings])
        item = np.array([by_item[row["item_id"]] for row in ratings])
    except KeyError as error:
        raise DataError(
            "a rating names a user or an item that has no attributes",
            where="ml-100k.inter",
            evidence=f"id {error}",
            remedy="reinstall recbole==1.2.1, whose files agree",
        ) from None
    label = np.array([float(row["rating"]) >= 4 for row in ratings], dtype=np.int8)
    chosen = np.zeros(len(ratings), dtype=bool)
    chosen[train] = True
    return Ratings(user, item, label, chosen)


def build_columns(catalog: Catalog, ratings: Ratings) -> dict[str, Array]:
    """All columns, each (ratings,): categorical int64, standardized numeric float32, label int8."""
    columns = {name: ids[ratings.user] for name, ids in catalog.users.items()}
    columns |= {name: ids[ratings.item] for name, ids in catalog.items.items()}
    columns = {name: columns[name].astype(np.int64) for name in catalog.cardinalities}
    raw = raw_statistics(catalog, ratings)
    for name in NUMERIC:
        mean, deviation = raw[name][ratings.train].mean(), raw[name][ratings.train].std()
        columns[name] = ((raw[name] - mean) / (deviation or 1.0)).astype(np.float32)
    columns[LABEL] = ratings.label
    return columns


def raw_statistics(catalog: Catalog, ratings: Ratings) -> dict[str, Array]:
    """Numeric features before standardization; labels do not enter.

    With n the training ratings of a user other than the row itself, n_g those of genre g among them, q_g the
    share of genre g among all training ratings and a = 5:

        affinity(g) = log((n_g + a·q_g) / ((n + a)·q_g)),

    0 for an unseen user; `genre_aff_mean` and `genre_aff_max` are over the genres of the row's item, 0 for an
    item without genres. `year_gap` is the distance in years from the mean release year of the same n ratings.

    Returns:
        Each (ratings,) float64, by name.
    """
    user, item, train = ratings.user, ratings.item, ratings.train
    own = train.astype(np.float64)
    user_count = np.bincount(user[train], minlength=catalog.age.size)[user] - own
    item_count = np.bincount(item[train], minlength=catalog.year.size)[item] - own
    genres = catalog.genres[item].astype(np.float64)
    sums = np.zeros((catalog.age.size, genres.shape[1]))
    np.add.at(sums, user[train], genres[train])
    # A genre that no training row has would divide by zero; its affinity is then 0, as n_g is.
    share = np.maximum(genres[train].mean(axis=0), 1.0 / (train.sum() + 1))
    seen = sums[user] - own[:, None] * genres
    affinity = np.log((seen + _PRIOR * share) / ((user_count[:, None] + _PRIOR) * share))
    has = genres.sum(axis=1) > 0
    mean = np.where(has, (affinity * genres).sum(axis=1) / np.maximum(genres.sum(axis=1), 1), 0.0)
    top = np.where(has, np.where(genres > 0, affinity, -np.inf).max(axis=1, initial=-np.inf), 0.0)
    year = catalog.year[item]
    year_sum = np.bincount(user[train], weights=year[train], minlength=catalog.age.size)[user] - own * year
    gap = np.abs(year - year_sum / np.maximum(user_count, 1))
    return {
        "log_user_cnt": np.log1p(user_count),
        "log_item_cnt": np.log1p(item_count),
        "year": year,
        "n_genres": genres.sum(axis=1),
        "age": catalog.age[user],
        "genre_aff_mean": mean,
        "genre_aff_max": top,
        "year_gap": np.where(user_count > 0, gap, 0.0),
    }


def _read_table(path: Path) -> list[dict[str, str]]:
    """Rows of a RecBole atomic file: tab separated, a header of `name:type` fields."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            lines = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
            names = [field.split(":")[0] for field in next(lines)]
            return [dict(zip(names, line, strict=True)) for line in lines]
    except (OSError, StopIteration, ValueError) as error:
        raise DataError(
            "a file of MovieLens 100K cannot be read",
            where=str(path),
            evidence=str(error) or "the file is empty",
            remedy="reinstall it: pip install --force-reinstall --no-deps recbole==1.2.1",
        ) from error


def _vocabulary(words: Iterable[str]) -> dict[str, int]:
    """Ids from 1 in alphabetical order."""
    return {word: position for position, word in enumerate(sorted(set(words)), start=1)}


def _title_words(titles: Sequence[str]) -> Array:
    """Id of the most frequent long word of each title, among the 82 most frequent ones; 0 for none."""
    split = [[word for word in re.findall(r"[a-z]+", title.lower()) if len(word) > 3] for title in titles]
    counts = Counter(word for words in split for word in set(words))
    # Ties are broken alphabetically, so that ids do not depend on the order of the titles.
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:_TITLE_WORDS]
    ids = {word: position for position, word in enumerate(ranked, start=1)}
    return np.array([min((ids[word] for word in words if word in ids), default=0) for words in split])

"""The sweep over public rankers: its rows, its shares, its table, and three rankers from export to a run."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_text import parsed

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from benchmarks.public_rankers.catalog import RANKERS, Inputs, Library
from benchmarks.public_rankers.libraries import LIBRARIES_ENVIRONMENT, is_installed
from benchmarks.public_rankers.prepare import prepare
from benchmarks.public_rankers.rows import LENGTH, Rows, histories
from benchmarks.public_rankers.shares import products_of
from benchmarks.public_rankers.sweep import run_one
from benchmarks.public_rankers.table import is_certified_at_once, shares


def test_the_list_is_as_wide_as_the_issue_asks():
    assert len({ranker.name for ranker in RANKERS}) == len(RANKERS) >= 20
    assert {ranker.library for ranker in RANKERS} == set(Library)
    assert {ranker.inputs for ranker in RANKERS} == set(Inputs)
    assert sum(len(ranker.outputs) > 1 for ranker in RANKERS) >= 2


def test_a_history_is_of_the_user_and_never_the_rows_own_item():
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 40, 900), rng.integers(0, 50, 900)
    positives = np.flatnonzero((users != 7) & (rng.random(900) < 0.5))
    found = histories(users, items, positives, rng)
    assert found.shape == (900, LENGTH)
    for row in range(900):
        there = found[row][found[row] > 0]
        assert not found[row][len(there) :].any()  # padded behind the last
        own = items[[at for at in positives if users[at] == users[row]]] + 1
        assert set(there) <= set(own) - {items[row] + 1}
    assert not found[users == 7].any()
    assert (found[users != 7] > 0).sum(axis=1).min() > 0


def flops_of(path: Path, body: str, x: str, weights: dict[str, tuple[int, ...]]) -> int:
    """Operations of the one product of a model of `x`, at two rows."""
    ones = {name: np.ones(shape) for name, shape in weights.items()}
    onnx.save(parsed(f"[p] {body}", ones, inputs=f"float[{x}] x", opset=17), path)
    rows = np.ones([2 if size == "n" else int(size) for size in x.split(",")], np.float32)
    (product,) = products_of(path, {"x": rows})
    assert product.node == "p"
    return product.flops


@pytest.mark.parametrize(
    ("body", "x", "weight", "expected"),
    [
        ("y = MatMul(x, w)", "n,5,7", (7, 3), 2 * 5 * 7 * 3),
        ("y = Gemm<transB=1>(x, w)", "n,7", (3, 7), 2 * 7 * 3),
        ("y = Conv<group=2>(x, w)", "n,6,9", (4, 3, 2), 2 * 4 * 8 * 3 * 2),
        ('y = Einsum<equation="bij,jk->bik">(x, w)', "n,5,7", (7, 3), 210),
        # Nothing is summed: a product of elements is no product of matrices.
        ('y = Einsum<equation="bi,i->bi">(x, w)', "n,5", (5,), 0),
    ],
)
def test_operations_of_a_product_are_those_of_the_formula(tmp_path, body, x, weight, expected):
    assert flops_of(tmp_path / "m.onnx", body, x, {"w": weight}) == expected


def test_operations_of_a_recurrent_cell_are_those_of_its_gates(tmp_path):
    body, weights = "every, y = GRU<hidden_size=4>(x, w, r)", {"w": (1, 12, 6), "r": (1, 12, 4)}
    assert flops_of(tmp_path / "m.onnx", body, "5,n,6", weights) == 5 * 3 * 2 * 4 * (6 + 4)


def _outputs(status: str) -> dict[str, Any]:
    return {"rows": 10, "outputs": {"ctr": {"status": status, "delta_ne": [1e-5, -1e-5, 3e-5]}}}


def _run(selection: str = "within", certification: str = "within", **changes: Any) -> dict[str, Any]:
    plan = {"share": 0.5, "fp8_sites": 2} | {
        "selection": _outputs(selection),
        "certification": _outputs(certification),
    }
    return {
        "ranker": RANKERS[0].name,
        "seed": 0,
        "exit_code": 0,
        "wall_seconds": 9.0,
        "cpu_seconds": 8.0,
        "error": None,
        "able_flops": 80,
        "products": {"Gemm": 100, "Conv": 60},
        "plans": {"fp32": {"share": 0.0, "fp8_sites": 0}, "fp8-safe": plan},
        "emitted": [["fp32", "faster"]],
    } | changes


def test_shares_are_of_a_plan_that_was_certified():
    assert shares(_run()) == (0.5, 0.25)
    assert shares(_run(certification="undecided")) == (0.0, 0.0)
    assert shares({**_run(), "plans": {}}) == (0.0, 0.0)


def test_a_plan_that_selection_admits_and_certification_does_not_is_a_second_attempt():
    assert is_certified_at_once(_run())
    assert not is_certified_at_once(_run(certification="beyond"))
    both = _run(selection="undecided", certification="undecided")
    assert not is_certified_at_once(both)  # nothing was tried


def _few_rows(size: int = 6000) -> Rows:
    """Rows of a stated formula, with the columns of the real ones and smaller tables."""
    rng = np.random.default_rng(0)
    tables = {"user_id": 300, "gender": 2, "age_bucket": 7, "occupation": 21, "zip3": 40, "item_id": 90}
    tables |= {"year5": 18, "genre1": 19, "genre2": 19, "genre3": 19, "title_word": 30}
    numbers = ("log_user_cnt", "log_item_cnt", "year", "age")
    columns: dict[str, np.ndarray] = {name: rng.integers(0, rows, size) for name, rows in tables.items()}
    columns |= {name: rng.standard_normal(size).astype(np.float32) for name in numbers}
    score = columns["year"] + 0.5 * columns["age"] - 0.5 + 0.8 * (columns["gender"] > 0)
    columns["clicked"] = (rng.random(size) < 1 / (1 + np.exp(-score))).astype(np.float32)
    columns["bought"] = columns["clicked"] * (rng.random(size) < 0.4).astype(np.float32)
    columns["item"], columns["item_genre"] = columns["item_id"] + 1, columns["genre1"] + 1
    columns["history"] = histories(columns["user_id"], columns["item_id"], np.arange(size // 2), rng)
    columns["history_genre"] = np.where(columns["history"] > 0, columns["history"] % 19 + 1, 0)
    columns["ids"] = np.stack([columns[name] for name in tables], axis=1)
    half = size // 3
    parts = ({name: v[:half] for name, v in columns.items()}, {name: v[half:] for name, v in columns.items()})
    return Rows(*parts, tables, numbers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries and of what they import
@pytest.mark.parametrize("name", ["rechub-edcn", "deepctr-ccpm", "fuxictr-finalmlp"])
def test_a_public_ranker_runs_from_its_librarys_constructor(name, tmp_path):
    (ranker,) = (one for one in RANKERS if one.name == name)
    directory = os.environ.get(LIBRARIES_ENVIRONMENT)
    if not directory or not is_installed(ranker.library, Path(directory)):
        pytest.skip(f"needs {LIBRARIES_ENVIRONMENT}: a directory of libraries, as .ci/run makes one")
    prepare(ranker, tmp_path, Path(directory), _few_rows(), steps=3)
    found = run_one(ranker, tmp_path, 0, tmp_path / "runs", Path(__file__).parents[3])
    assert found["exit_code"] == 0, found["error"]
    assert found["able_flops"] > 0
    assert found["plans"]["fp8-all"]["selection"]["outputs"]
    assert found["cpu_seconds"] > 0
    assert not list((tmp_path / "runs").iterdir())

"""Runs with `data.request`: engines compute a user once, and answer requests in either form."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_text import parsed
from synthetic_runs import Workplace, write_rows

import loka_onnx
from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus, EngineSet
from loka_onnx.core.evaluation import EvaluationSet
from loka_onnx.core.rewrite import INDEX, Part, SharedUsers
from loka_onnx.errors import ConfigError, DataError
from loka_onnx.pipeline.run import RunResult, run

Array = np.ndarray[Any, Any]
USER, ITEMS, HIDDEN, ROWS = 8, 30, 512, 4000
CANDIDATES = 8
REQUEST = {"column": "request", "inputs": ["user"]}


def write_ranker(path: Path) -> None:
    """user (batch, 8) behind two wide layers, and item (batch,) → ctr (batch, 1)."""
    random = np.random.default_rng(0)
    shapes = {"w1": (USER, HIDDEN), "w2": (HIDDEN, HIDDEN), "table": (ITEMS, 8), "w3": (HIDDEN + 8, 16)}
    weights = {n: random.standard_normal(s) / np.sqrt(s[0]) for n, s in {**shapes, "w4": (16, 1)}.items()}
    body = """[fc1] h1 = MatMul(user, w1) a1 = Relu(h1) [fc2] h2 = MatMul(a1, w2) a2 = Relu(h2)
        looked_up = Gather(table, item) joined = Concat<axis=1>(a2, looked_up)
        [fc3] h3 = MatMul(joined, w3) a3 = Relu(h3) [head] ctr = MatMul(a3, w4)"""
    inputs = f"float[batch,{USER}] user, int64[batch] item"
    onnx.save(parsed(body, weights, inputs=inputs, outputs="float[batch,1] ctr"), path)


def workplace(path: Path, **request: Any) -> Workplace:
    place = Workplace(path)
    write_ranker(path / "ranker.onnx")
    random = np.random.default_rng(1)
    ids = np.arange(ROWS) // CANDIDATES
    users = random.standard_normal((ROWS // CANDIDATES, USER)).astype(np.float32)[ids]
    item = random.integers(0, ITEMS, ROWS)
    clicked = (random.random(ROWS) < 1 / (1 + np.exp(-users[:, 0] - item / ITEMS))).astype(np.float32)
    columns = {f"u{i}": users[:, i] for i in range(USER)}
    write_rows(
        path / "rows.parquet",
        {**columns, "item": item, "request": ids, "row": np.arange(ROWS), "clicked": clicked},
    )
    place.write_run_file(
        outputs=[{"name": "ctr", "kind": "logit", "label": "clicked", "budget": 0.01}],
        data={
            "inputs": {"user": [f"u{i}" for i in range(USER)]},
            "request": {**REQUEST, **request},
        },
        plan={"plans": ["fp32", "fp8-all"]},
        batch={"min": 1, "serve": [64], "max": 256},
    )
    return place


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Do not write into its directory."""
    return run(workplace(tmp_path_factory.mktemp("shared")).run_file)


def request_of(users: int, candidates: int) -> dict[str, Array]:
    random = np.random.default_rng(users)
    return {
        "user": random.standard_normal((users, USER)).astype(np.float32),
        "item": random.integers(0, ITEMS, candidates),
        INDEX: random.integers(0, users, candidates),
    }


def plain(request: dict[str, Array]) -> dict[str, Array]:
    return {"user": request["user"][request[INDEX]], "item": request["item"]}


@pytest.mark.slow
def test_every_engine_here_computes_a_user_once(shared):
    engines = serde.read(EngineSet, shared.directory / "engines.json").engines
    assert {(e.part, e.status) for e in engines} == {(Part.REQUEST, BuildStatus.READY)}
    users = serde.read(SharedUsers, shared.directory / "model/request.json")
    assert users.inputs == ("user",) and users.record.max_abs <= users.record.tolerance
    assert users.times_us[1] < users.times_us[0]
    assert users.note in json.loads((shared.directory / "report.json").read_text())["value"]["notes"]
    for engine in engines:
        graph = onnx.load(shared.directory / engine.path).graph
        assert [i.name for i in graph.input] == ["user", "item", INDEX]
        (gather,) = [node for node in graph.node if INDEX in node.input]
        assert gather.op_type == "Gather"


@pytest.mark.slow
def test_engines_are_judged_on_the_rows_of_the_splits(shared):
    judged = serde.read(EvaluationSet, shared.directory / "evaluation.json").evaluations
    exact = [e for e in judged if e.plan == "fp32" and e.engine != "reference"]
    assert {e.split for e in exact} == {"selection", "certification"}
    for each in exact:
        assert each.status == "measured" and each.outputs[0].difference.delta_max < 1e-5
        assert [latency.batch for latency in each.latencies] == [64]


@pytest.mark.slow
@pytest.mark.parametrize(("users", "candidates"), [(1, 1), (1, 20), (5, 20), (20, 5)])
def test_a_loaded_bundle_takes_both_forms(shared, users, candidates):
    request = request_of(users, candidates)
    exact = onnx.reference.ReferenceEvaluator(str(shared.bundle.parents[2] / "ranker.onnx"))
    with loka_onnx.load(shared.bundle) as engine:
        assert engine.shared == ("user",) and engine.entry.part is Part.REQUEST and engine.health().ready
        expected = exact.run(None, plain(request))[0]
        for asked in (request, {**request, INDEX: request[INDEX].astype(np.int32)}, plain(request)):
            got = engine.infer(asked)["ctr"]
            assert got.shape == (candidates, 1)
            np.testing.assert_allclose(got, expected, 1e-4, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {INDEX: np.array([0, 1, 2, 3])},
        {INDEX: np.array([0, 1, -1, 2])},
        {INDEX: np.array([0.0, 1.0, 0.0, 0.0])},
        {INDEX: np.array([[0, 1, 0, 0]])},
        {INDEX: np.array([0, 1, 2])},
        {"user": np.zeros((3, USER + 1), np.float32)},
        {"extra": np.zeros(4)},
        {"user": None},
    ],
)
def test_a_request_that_does_not_fit_is_refused(shared, wrong):
    request = {name: value for name, value in {**request_of(3, 4), **wrong}.items() if value is not None}
    with loka_onnx.load(shared.bundle) as engine, pytest.raises(DataError):
        engine.infer(request)


@pytest.mark.slow
def test_where_every_input_is_shared_engines_stay_plain_and_requests_work(tmp_path):
    result = run(workplace(tmp_path, column="row", inputs=["user", "item"]).run_file)
    users = serde.read(SharedUsers, result.directory / "model/request.json")
    assert not users.is_used and users.record.declined[0].reason in users.note
    assert serde.read(EngineSet, result.directory / "engines.json").engines[0].part is Part.WHOLE
    request = {**request_of(4, 9), "item": np.array([1, 2, 3, 4])}
    with loka_onnx.load(result.bundle) as engine:
        expected = engine.infer(
            {"user": request["user"][request[INDEX]], "item": request["item"][request[INDEX]]}
        )
        np.testing.assert_array_equal(engine.infer(request)["ctr"], expected["ctr"])


def test_an_unknown_input_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(ConfigError) as caught:
        run(workplace(tmp_path, inputs=["users"]).run_file)
    assert caught.value.code == "E1535" and "user" in caught.value.remedy


def test_an_input_that_differs_within_a_request_is_refused_with_both_values(tmp_path):
    with pytest.raises(DataError) as caught:
        run(workplace(tmp_path, inputs=["user", "item"]).run_file)
    assert caught.value.code == "E1536" and "request" in caught.value.evidence


def test_a_model_is_not_cut_at_its_embeddings_as_well(tmp_path):
    place = workplace(tmp_path)
    text = place.run_file.read_text().replace("ranker.onnx", "ranker.onnx\n  split_sparse: true")
    place.run_file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        run(place.run_file)
    assert "data.request" in str(caught.value)

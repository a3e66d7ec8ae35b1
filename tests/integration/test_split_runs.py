"""Runs that cut the model at its embeddings: engines take looked-up rows and answer like the whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from synthetic_runs import ITEMS, WIDTH, Workplace, make_workplace, weights, write_ranker, write_rows

import loka_onnx
from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus, EngineSet
from loka_onnx.core.evaluation import EvaluationSet
from loka_onnx.core.manifest import Manifest
from loka_onnx.core.rewrite import ModelSplit, Part
from loka_onnx.core.site import HIGH_ERROR
from loka_onnx.errors import BundleInvalid
from loka_onnx.graph import storage
from loka_onnx.pipeline.run import RunOptions, RunResult, Stage, run
from loka_onnx.sessions.model_files import data_locations

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
FP32 = {"plans": ["fp32"]}
CUT = {"split_sparse": True}


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Do not write into its directory."""
    place = make_workplace(tmp_path_factory.mktemp("cut"))
    place.write_run_file(model=CUT, plan=FP32)
    return run(place.run_file)


def requests(rows: int, seed: int = 5) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    dense = random.standard_normal((rows, WIDTH)).astype(np.float32)
    return {"dense": dense, "item": random.integers(0, ITEMS, rows)}


def manifest_of(result: RunResult) -> Manifest:
    return loka_onnx.verify_bundle(result.bundle)


def test_the_cut_is_recorded_and_its_check_counted(cut):
    split = serde.read(ModelSplit, cut.directory / "model/split.json")
    assert split.check is not None and split.check.equal and split.declined is None
    # The calibration split of this file, then one row alone.
    assert split.check.batches[1:] == (1,) and 1000 < split.check.batches[0] <= 2048
    assert [(t.dtype, t.shape) for t in split.halves.cut] == [("float32", (None, WIDTH))]
    (looked_up,) = (t.name for t in split.halves.cut)
    assert [t.name for t in split.halves.lookup.inputs] == ["item"]
    assert [t.name for t in split.halves.dense.inputs] == ["dense", looked_up]
    modified = json.loads((cut.directory / "model/modified.json").read_text())["value"]
    assert split.parent == modified["digest"]
    names = [site["name"] for site in modified["sites"]]
    assert [site.name for site in split.halves.dense.sites] == names
    assert [name for name in names if not name.endswith(HIGH_ERROR)] == ["fc1", "fc2", "heads"]


def test_engines_are_of_the_dense_half_and_hold_no_table(cut):
    (engine,) = serde.read(EngineSet, cut.directory / "engines.json").engines
    assert (engine.part, engine.status) == (Part.DENSE, BuildStatus.READY)
    graph = onnx.load(cut.directory / engine.path).graph
    assert "Gather" not in {node.op_type for node in graph.node}
    assert not [t.name for t in graph.initializer if tuple(t.dims) == (ITEMS, WIDTH)]


def test_a_bundle_of_halves_answers_bit_for_bit_like_a_whole_one(cut, finished):
    halves, whole = loka_onnx.load(cut.bundle), loka_onnx.load(finished.bundle)
    assert halves.entry.part is Part.DENSE and whole.entry.part is Part.WHOLE
    assert halves.entry.plan == whole.entry.plan == "fp32"
    assert halves.inputs == whole.inputs
    for rows in (1, 7, 256):
        expected, found = whole.infer(requests(rows)), halves.infer(requests(rows))
        assert {n: v.tobytes() for n, v in found.items()} == {n: v.tobytes() for n, v in expected.items()}


def test_accuracy_is_of_both_and_latency_of_the_engine_alone(cut, finished):
    found = serde.read(EvaluationSet, cut.directory / "evaluation.json")
    known = serde.read(EvaluationSet, finished.directory / "evaluation.json")
    engine = "cpu-onnxruntime-cpu-fp32"
    for split in ("selection", "certification"):
        here, there = found.of(engine, split), known.of(engine, split)
        assert here.outputs == there.outputs
        assert [latency.batch for latency in here.latencies] == [8, 64]
        assert all(latency.lookup_p50_us and latency.lookup_p50_us > 0 for latency in here.latencies)
        assert all(latency.lookup_p50_us is None for latency in there.latencies)
    assert "lookup" not in {evaluation.engine for evaluation in found.evaluations}
    text = " ".join((cut.directory / "report.md").read_text().split())
    assert "Latency is that of the engine alone, on rows that were looked up before" in text
    assert "Lookup p50, not in these" in text
    assert "Lookup p50" not in (finished.directory / "report.md").read_text()
    assert "split\\_sparse" in text or "split_sparse" in text


def test_the_manifest_says_where_the_cut_is(cut):
    manifest = manifest_of(cut)
    assert manifest.cut.lookup == "lookup/lookup.onnx"
    assert (manifest.cut.lookup_inputs, manifest.cut.passed) == (("item",), ("dense",))
    assert [entry.part for entry in manifest.candidates] == [Part.DENSE, Part.WHOLE]
    with np.load(cut.bundle / "sample.npz") as sample:
        rows, looked_up = sample["input/item"], sample[f"looked_up/{manifest.cut.tensors[0].name}"]
    np.testing.assert_array_equal(looked_up, weights()["table"][rows])


@pytest.mark.parametrize("harm", ["missing", "altered"])
def test_a_harmed_lookup_model_is_refused(cut, harm, tmp_path):
    bundle = Path(shutil.copytree(cut.bundle, tmp_path / "bundle"))
    lookup = bundle / "lookup/lookup.onnx"
    if harm == "missing":
        shutil.rmtree(lookup.parent)
    else:
        content = bytearray(lookup.read_bytes())
        content[len(content) // 2] ^= 1
        lookup.write_bytes(content)
    with pytest.raises(BundleInvalid, match=r"'lookup/lookup.onnx' (is missing|was altered)"):
        loka_onnx.load(bundle)


# Models that stay whole -----------------------------------------------------------------------------------


def test_a_model_that_cannot_be_cut_goes_on_whole_and_says_why(tmp_path, command):
    place = make_workplace(tmp_path / "work")
    write_ranker_that_reads_ids(place.path / "ranker.onnx")
    place.write_run_file(model=CUT, plan=FP32)
    done = command("transform", place.run_file, "--explain")
    assert done.code == 0, done.err
    reason = "it reads the ids 'item', and is no lookup"
    assert "split_sparse: 0 applied, 1 declined\n" in done.out
    # Site by site: what is named under its site, the rest at the end.
    explanation = done.out.partition("\n\n")[2]
    assert "\nheads\n  - pad-sites: N = 3 is under 16\n" in explanation
    assert f"\nelsewhere\n  - split_sparse at as_number/cast: {reason}\n" in explanation
    names = [line.partition(":")[0] for line in explanation.splitlines() if not line.startswith(" ")]
    sites = ["fc1", "fc2", "heads", "elsewhere"]
    assert [name for name in names if name in sites] == sites
    result = run(place.run_file, RunOptions(resume=True))
    assert not list((result.directory / "model").glob("lookup.onnx"))
    manifest = manifest_of(result)
    assert manifest.cut is None
    assert {entry.part for entry in manifest.candidates} == {Part.WHOLE}
    text = " ".join((result.directory / "report.md").read_text().replace("\\", "").split())
    assert "The run was asked to cut the model at its embeddings and went on whole" in text
    assert f"went on whole: 'as_number/cast': {reason}." in text


def write_ranker_that_reads_ids(path: Path) -> None:
    """The ranker with the id itself, as a number, added to its first feature."""
    write_ranker(path)
    model = onnx.load(path)
    nodes = [
        h.make_node("Cast", ["item"], ["item.f"], "as_number", to=T.FLOAT),
        h.make_node("Mul", ["item.f", "tiny"], ["item.s"], "scaled"),
        h.make_node("Unsqueeze", ["item.s", "one"], ["item.c"], "column"),
        h.make_node("Add", ["dense", "item.c"], ["shifted"], "shift"),
    ]
    graph = model.graph
    graph.initializer.append(nh.from_array(np.float32(1e-3), "tiny"))
    joined = next(node for node in graph.node if node.name == "concat")
    joined.input[0] = "shifted"
    kept = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *kept])
    onnx.save(model, path)


# Tables outside the model ---------------------------------------------------------------------------------


def test_tables_outside_the_model_are_in_the_bundle_once(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)
    place = make_workplace(tmp_path / "work")
    onnx.save(
        onnx.load(place.path / "ranker.onnx"),
        place.path / "ranker.onnx",
        save_as_external_data=True,
        location="tables.bin",
        size_threshold=1024,
    )
    place.write_run_file(model=CUT, plan=FP32)
    result = run(place.run_file)
    found = list(result.bundle.rglob("*.bin"))
    assert sorted(str(p.relative_to(result.bundle)) for p in found) == [
        "fallback/tables.bin",
        "lookup/tables.bin",
    ]
    assert found[0].samefile(found[1])
    tables = [path for path in (result.directory / "model").iterdir() if path.name == "tables.bin"]
    assert len(tables) == 1 and not tables[0].samefile(found[0]), "a bundle shares nothing with its run"
    for half in ("dense.onnx", "lookup.onnx"):
        proto = onnx.load(result.directory / "model" / half, load_external_data=False)
        assert data_locations(proto) == (("tables.bin",) if half == "lookup.onnx" else ())
    engine = loka_onnx.load(result.bundle)
    assert engine.entry.part is Part.DENSE
    # Carried to a system without links, the bundle is as good.
    copied = Path(shutil.copytree(result.bundle, tmp_path / "copied"))
    assert not (copied / "fallback/tables.bin").samefile(copied / "lookup/tables.bin")
    again = loka_onnx.load(copied).infer(requests(5))
    assert again["ctr"].tobytes() == engine.infer(requests(5))["ctr"].tobytes()


# The zoo, on both backends ---------------------------------------------------------------------------------

CATEGORIES, NUMBERS, ZOO_ROWS = 4, 5, 3000


def zoo_workplace(path: Path, is_cut: bool) -> Path:
    path.mkdir(parents=True)
    random = np.random.default_rng(0)
    columns: dict[str, Array] = {f"c{i}": random.integers(0, 20, ZOO_ROWS) for i in range(CATEGORIES)}
    columns |= {f"n{i}": random.standard_normal(ZOO_ROWS).astype(np.float32) for i in range(NUMBERS)}
    write_rows(path / "rows.parquet", {**columns, "y": (random.random(ZOO_ROWS) < 0.3).astype(np.float32)})
    arguments = {
        "architecture": "wukong",
        "size": "tiny",
        "categorical": {f"c{i}": 20 for i in range(CATEGORIES)},
        "numeric": [f"n{i}" for i in range(NUMBERS)],
    }
    inputs = {"dense": arguments["numeric"], "ids": list(arguments["categorical"])}
    builder = {"onnx": None, "torch": "loka_zoo.builders:build", "arguments": arguments}
    return Workplace(path).write_run_file(
        model={**builder, "split_sparse": is_cut},
        outputs=[{"name": "logit", "kind": "logit", "label": "y", "budget": 0.01}],
        data={"split": {"by": "order"}, "group": None, "inputs": inputs},
        batch={"serve": [8], "max": 64},
        plan={"plans": ["fp32", "fp8-all"]},
        targets=[
            {"device": "cpu", "backends": ["onnxruntime"]},
            {"device": "nvidia-rtx-ada", "backends": ["tensorrt_rtx"]},
        ],
    )


def test_the_zoo_is_cut_for_both_backends(tmp_path, command):
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    cut_run = run(zoo_workplace(tmp_path / "cut", True))
    whole = run(zoo_workplace(tmp_path / "whole", False), RunOptions(until=Stage.REPORT))
    split = serde.read(ModelSplit, cut_run.directory / "model/split.json")
    assert split.check is not None and split.check.equal and split.halves is not None
    assert "Gather" in {n.op_type for n in onnx.load(cut_run.directory / "model/lookup.onnx").graph.node}
    found = {e.id: e for e in serde.read(EngineSet, cut_run.directory / "engines.json").engines}
    known = {e.id: e for e in serde.read(EngineSet, whole.directory / "engines.json").engines}
    assert found.keys() == known.keys() and len(found) == 4
    for name, engine in found.items():
        assert engine.part is Part.DENSE and known[name].part is Part.WHOLE
        assert engine.is_built, engine.detail
        # The same sites in the same precision as in the engine of the whole.
        assert {s.site: s.engaged for s in engine.sites} == {s.site: s.engaged for s in known[name].sites}
    same = ("cpu-onnxruntime-cpu-fp32", "certification")
    ours = serde.read(EvaluationSet, cut_run.directory / "evaluation.json").of(*same)
    theirs = serde.read(EvaluationSet, whole.directory / "evaluation.json").of(*same)
    assert ours.outputs == theirs.outputs
    manifest = manifest_of(cut_run)
    assert {entry.backend for entry in manifest.engines} == {"onnxruntime", "tensorrt_rtx"}
    assert {entry.part for entry in manifest.engines} == {Part.DENSE}
    engine = loka_onnx.load(cut_run.bundle)
    assert engine.entry.backend == "onnxruntime" and engine.health().ready
    file = tmp_path / "cut" / "RUN.yaml"
    told = command("transform", file, "--explain", "--output", cut_run.directory).out
    merged = "layers.0.fmb.project+lcb.mix+residual.mix"
    assert f"\nlayers.0.lcb.mix → {merged}\n  + merge-parallel-linears at {merged}: " in told
    assert "\n  + split_sparse at embeddings." in told.partition("\nelsewhere\n")[2]

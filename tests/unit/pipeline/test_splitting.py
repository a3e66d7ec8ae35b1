"""The cut as a stage: what it leaves, what engines are built from, and how a run keeps its record."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact, TensorSpec
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet, PrecisionPlan, Wide
from loka_onnx.core.rewrite import Declined, ModelSplit, Part, SplitCheck
from loka_onnx.data import Batch
from loka_onnx.errors import InternalError, TransformError
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.graph.storage import model_digest
from loka_onnx.pipeline import splitting
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.splitting import cut_model, source_of
from loka_onnx.sessions.runner import Arrays, Runner

RANKER = """["items/gather"] e = Gather<axis=0>(table, item)
    c = Concat<axis=1>(x, e)
    [fc] ctr = MatMul(c, w)"""
TABLE = np.arange(40, dtype=np.float32).reshape(10, 4) / 7


class Rows:
    """Stands for a split of the data."""

    digest = "d" * 64

    def __init__(self, rows: int = 50) -> None:
        random = np.random.default_rng(0)
        self.inputs = {
            "x": random.standard_normal((rows, 3)).astype(np.float32),
            "item": random.integers(0, 10, rows),
        }

    def batches(self, size: int) -> Any:
        count = len(self.inputs["x"])
        yield Batch({name: value[:size] for name, value in self.inputs.items()}, {}, min(count, size))


def write_whole(directory: Path) -> ModelArtifact:
    constants = {"table": TABLE, "w": np.random.default_rng(1).standard_normal((7, 1))}
    model = parsed(
        RANKER, constants, inputs="float[batch,3] x, int64[batch] item", outputs="float[batch,1] ctr"
    )
    path = directory / "model/modified.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    inputs = (TensorSpec("x", "float32", (None, 3)), TensorSpec("item", "int64", (None,)))
    outputs = (TensorSpec("ctr", "float32", (None, 1)),)
    return ModelArtifact(
        path, model_digest(path), 21, inputs, outputs, find_sites(GraphModel.load(path)), "test"
    )


@pytest.fixture
def directory(tmp_path: Path) -> Any:
    with RunDirectory.create(tmp_path / "run", {}, {}, force=False, resume=True) as opened:
        yield opened


def context_of(directory: RunDirectory, asked_for: bool = True) -> Context:
    batch = SimpleNamespace(min=1)
    config: Any = SimpleNamespace(model=SimpleNamespace(split_sparse=asked_for), threads=1, batch=batch)
    context = Context(config, directory, exported=write_whole(directory.path))
    context.__dict__["splits"] = SimpleNamespace(calibration=Rows())
    return context


def judging_of(directory: RunDirectory, split: ModelSplit | None) -> Judging:
    return Judging(context_of(directory), split)


def cut(directory: RunDirectory, asked_for: bool = True) -> ModelSplit | None:
    context = context_of(directory, asked_for)
    return cut_model(context, context.exported)


def plan(digest: str) -> PlanSet:
    return PlanSet((PrecisionPlan("fp32", digest, Precision.FP32, (), {}, 0.0),))


def test_the_stage_leaves_the_halves_with_paths_of_the_run_and_is_reused(directory):
    split = cut(directory)
    assert split.check == SplitCheck((50, 1), True)
    assert split.check.rows == 51
    assert split.halves.dense.path == directory.path / "model/dense.onnx"
    stored = serde.read(ModelSplit, directory.path / "model/split.json")
    assert stored.halves is not None and stored.halves.lookup.path == Path("model/lookup.onnx")
    written = (directory.path / "model/dense.onnx").stat().st_mtime_ns
    assert cut(directory) == split
    assert (directory.path / "model/dense.onnx").stat().st_mtime_ns == written
    (record,) = directory.record.stages
    assert sorted(record.files) == ["model/dense.onnx", "model/lookup.onnx", "model/split.json"]
    assert "gave the bits of the whole on 51 rows" in split.note
    assert [(a.at, a.what) for r in split.log.records for a in r.applied] == [
        ("items", "cut here: float32 [rows, 4] goes from the lookup model to the engine")
    ]


@pytest.mark.parametrize("how", ["pattern", "data"])
def test_a_refused_cut_leaves_the_reason_and_no_halves(how, directory, monkeypatch):
    refused = Declined("ctr", "the halves move it by up to 0.5 in batch 0 of 2")
    if how == "data":
        kept = splitting.verify_split
        monkeypatch.setattr(splitting, "verify_split", lambda *given: kept(*given) or refused)
    else:
        monkeypatch.setattr(splitting, "split_sparse", lambda model: refused)
    split = cut(directory)
    assert split is not None and split.halves is None and split.declined == refused
    assert split.check == (SplitCheck((50, 1), False) if how == "data" else None)
    assert sorted(p.name for p in (directory.path / "model").iterdir()) == ["modified.onnx", "split.json"]
    assert split.note == (
        "The run was asked to cut the model at its embeddings and went on whole: 'ctr': the halves move it "
        "by up to 0.5 in batch 0 of 2."
    )
    model = write_whole(directory.path)
    assert source_of(model, plan(model.digest), split).part is Part.WHOLE
    inputs = Rows().inputs
    judging = judging_of(directory, split)
    assert judging.taken_by_engines(inputs) == inputs
    with pytest.raises(InternalError, match="an engine takes looked-up rows, and the model was not cut"):
        judging.open_lookup()


def test_a_cut_that_is_not_asked_for_any_more_is_forgotten(directory):
    for name in ("recalibrate", "plan"):
        directory.stage(name, {}, lambda: [], lambda: None)
    cut(directory)
    assert [r.stage for r in directory.record.stages] == ["recalibrate", "plan", "split"]
    assert cut(directory, asked_for=False) is None
    assert [r.stage for r in directory.record.stages] == ["recalibrate", "plan"]
    assert sorted(p.name for p in (directory.path / "model").iterdir()) == ["modified.onnx"]


def test_plans_are_handed_over_to_the_dense_half(directory):
    split = cut(directory)
    model = write_whole(directory.path)
    source = source_of(model, plan(model.digest), split)
    assert (source.model, source.part) == (split.halves.dense, Part.DENSE)
    assert source.plans == plan(split.halves.dense.digest)
    assert source_of(model, plan(model.digest), None).model == model
    with pytest.raises(TransformError, match="plan 'fp32' was made for another model"):
        source_of(model, plan("0" * 64), split)


def test_what_a_plan_keeps_wide_in_the_lookup_is_no_matter_of_the_engine(directory):
    """As the pooling of a first-order term, which a logit's protection names."""
    split, model = cut(directory), write_whole(directory.path)
    wide = (Wide("look_up", "in front of the logit"), Wide("fc", "named by the user"))
    (made,) = plan(model.digest).plans
    (handed,) = source_of(model, PlanSet((replace(made, wide=wide),)), split).plans.plans
    assert handed.wide == wide[1:]


class Watched(Runner):
    closed = False

    def run(self, inputs: Any) -> Arrays:
        return {"ctr": inputs["items"][:, :1]}

    def close(self) -> None:
        self.closed = True


def test_an_engine_with_its_lookup_takes_the_inputs_of_the_whole(directory, monkeypatch):
    runner, inputs = Watched(), Rows(6).inputs
    monkeypatch.setattr(Judging, "open_alone", lambda self, engine: runner)
    engine: Any = SimpleNamespace(part=Part.DENSE)
    with ExitStack() as stack:
        run = judging_of(directory, cut(directory)).open_engine(engine, stack)
        np.testing.assert_array_equal(run(inputs)["ctr"], TABLE[inputs["item"]][:, :1])
    assert runner.closed

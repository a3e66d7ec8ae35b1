"""Loading a bundle of a model that was cut at its embeddings: the whole, or the dense part alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cut_models import LOOKED_UP, TABLE, answer, cut_contents, request
from sample_run import SampleRun

from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.manifest import EngineEntry
from loka_onnx.core.rewrite import Part
from loka_onnx.errors import DataError, EngineError
from loka_onnx.runtime import Engine, load, loading
from loka_onnx.sessions import onnx_session
from loka_onnx.sessions.onnx_session import OnnxSession


@pytest.fixture(scope="module")
def bundle(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cut")
    return write_bundle(cut_contents(sample, root / "run"), root / "bundle")


def test_the_whole_takes_ids_and_answers_by_its_definition(bundle, sessions):
    engine = load(bundle)
    assert engine.part is Part.WHOLE and engine.entry.part is Part.DENSE
    assert [spec.name for spec in engine.inputs] == ["x", "item"]
    asked = request(5, seed=3)
    np.testing.assert_allclose(engine.infer(asked)["ctr"], answer(asked), rtol=1e-6)
    assert sorted(sessions.opened) == ["dense.onnx", "lookup.onnx"]
    assert engine.health().ready and engine.skipped == ()


def test_the_dense_part_takes_looked_up_rows_and_opens_no_table(bundle, sessions):
    engine = load(bundle, part="dense")
    assert sessions.opened == ["dense.onnx"]
    assert engine.part is Part.DENSE
    assert [(spec.name, spec.shape) for spec in engine.inputs] == [("x", (None, 3)), (LOOKED_UP, (None, 4))]
    asked = request(6, seed=4)
    # A parameter server may hold other rows than the model was exported with.
    for table in (TABLE, TABLE + 1):
        got = engine.infer({"x": asked["x"], LOOKED_UP: table[asked["item"]]})["ctr"]
        moved = (table - TABLE)[asked["item"]].astype(np.float64) @ [[0.25], [3.0], [-1.0], [0.125]]
        np.testing.assert_allclose(got, answer(asked) + moved, rtol=1e-5)
    assert engine.health().ready


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"does not hold the dense part's inputs\n.*missing \['embeddings.item'\]"),
        ({LOOKED_UP: np.zeros((2, 5), np.float32)}, r"float32\(2, 5\), the model takes float32\(None, 4\)"),
        ({LOOKED_UP: np.zeros((3, 4), np.float32)}, r"rows \{'x': 2, 'embeddings.item': 3\}"),
    ],
)
def test_looked_up_rows_are_checked_like_any_input(bundle, change, message):
    with pytest.raises(DataError, match=message):
        load(bundle, part=Part.DENSE).infer({"x": np.zeros((2, 3), np.float32), **change})


def test_a_bundle_without_a_cut_has_no_dense_part(sample, tmp_path):
    place = write_bundle(sample.contents, tmp_path / "bundle")
    with pytest.raises(EngineError, match=r"no engine of the bundle runs here") as caught:
        load(place, part="dense")
    assert str(caught.value).count("this engine takes ids, not looked-up rows") == len(
        (*sample.contents.engines, "fallback")
    )
    assert "build with `model.split_sparse: true`" in str(caught.value)


def test_a_lookup_that_does_not_open_frees_the_engine_and_the_whole_model_serves(bundle, monkeypatch):
    closed: list[str] = []

    class Watched(OnnxSession):
        def __init__(self, path: Path, options: Any = None) -> None:
            self.name = path.name
            if path.name == "lookup.onnx":
                raise EngineError("no memory for the tables")
            super().__init__(path, options)

        def close(self) -> None:
            closed.append(self.name)

    monkeypatch.setattr(onnx_session, "OnnxSession", Watched)
    engine = load(bundle)
    assert engine.health().is_fallback
    assert closed == ["dense.onnx"]
    assert "no memory for the tables" in engine.skipped[0].reason
    asked = request(3)
    np.testing.assert_allclose(engine.infer(asked)["ctr"], answer(asked), rtol=1e-6)


def test_a_lookup_lives_on_when_an_engine_behind_it_is_closed(bundle, sessions, monkeypatch):
    open_engine = loading._Opener._open

    def twice(opener: Any, entry: EngineEntry) -> Engine | None:
        first = open_engine(opener, entry)
        if first is not None:
            first.close()
        return open_engine(opener, entry)

    monkeypatch.setattr(loading._Opener, "_open", twice)
    with load(bundle) as engine:
        asked = request(3)
        np.testing.assert_allclose(engine.infer(asked)["ctr"], answer(asked), rtol=1e-6)
    assert sorted(sessions.opened) == ["dense.onnx", "dense.onnx", "lookup.onnx"]

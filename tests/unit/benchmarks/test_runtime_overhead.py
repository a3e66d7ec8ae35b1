"""The benchmark of `Engine.infer` measures what it says, and the engine stays cheap."""

from pathlib import Path

import pytest

from benchmarks.micro.runtime_overhead import MODELS, Watch, compare

pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'loka-onnx[cpu]'")


@pytest.mark.parametrize("name", list(MODELS))
def test_an_engine_costs_little_over_its_backend(name: str, tmp_path: Path) -> None:
    figures = compare(MODELS[name](), tmp_path, 8, 200)
    # The record has 3 to 12 µs; a busy machine is not to fail here, a check per row or a copy is.
    assert 0 < figures["around the call"]["median_us"] < 150
    assert figures["metrics on"]["median_us"] < 150
    assert figures["backend"]["median_us"] > 0
    assert set(figures) >= {"metrics on"}


def test_a_watched_session_notes_its_time() -> None:
    class Session:
        def run(self, names: object, feeds: object) -> str:
            return "answer"

    watch = Watch(Session())
    assert watch.run([], {}) == "answer"
    assert watch.took_ns > 0

"""A fleet host without the packages that a pipeline needs: an ONNX Runtime bundle loads and answers there."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sample_run import SampleRun

from loka_onnx.bundle.format.archive import pack_bundle
from loka_onnx.bundle.writer import write_bundle

ABSENT = (
    "torch", "pyarrow", "scipy", "onnx_graphsurgeon", "pandas", "plotly", "rich", "typer", "jinja2", "yaml",
    "prometheus_client", "cryptography", "tensorrt", "tensorrt_rtx", "migraphx", "triton",
)  # fmt: skip

PROGRAM = f"""
import json, sys, time

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)

sys.meta_path.insert(0, Absent())
began = time.perf_counter()
import loka_onnx.runtime
imported = time.perf_counter()
import numpy as np
engine = loka_onnx.runtime.load(sys.argv[1])
loaded = time.perf_counter()
answer = engine.infer({{"dense": np.full((3, 16), 0.5, np.float32)}})["ctr"]
health, now = engine.health(), engine.metrics.snapshot()
engine.close()
print(json.dumps({{
    "answer": answer.tolist(), "ready": health.ready, "requests": now.requests, "skipped": now.skipped,
    "import_ms": 1e3 * (imported - began), "load_ms": 1e3 * (loaded - imported),
    "found": sorted({{name.partition(".")[0] for name in sys.modules}} & {{*{ABSENT!r}}}),
}}))
"""


@pytest.mark.parametrize("form", ["directory", pytest.param("file", marks=pytest.mark.slow)])
def test_a_bundle_of_onnx_runtime_is_served(sample: SampleRun, tmp_path: Path, form: str) -> None:
    place = write_bundle(sample.contents, tmp_path / "bundle")
    if form == "file":
        place = pack_bundle(place, tmp_path / "bundle.loka")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(place)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    print(f"import {said['import_ms']:.0f} ms, load {said['load_ms']:.0f} ms")
    assert said["ready"]
    assert said["requests"] == 1
    assert said["found"] == []
    assert np.shape(said["answer"]) == (3, 1)
    assert said["skipped"]["untrusted"] == 1
    # Seen: 0.4 s on a busy machine, half of it ONNX. Torch alone takes longer than the limit.
    assert said["import_ms"] < 5000

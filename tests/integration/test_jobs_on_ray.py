"""Build jobs on a real local Ray cluster whose node offers a device as a resource."""

from collections.abc import Iterator

import pytest
from run_findings import resumed
from test_build_jobs import AWAY, JOB, PLAIN, Both, NotHere, engines_of, two_targets

from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus
from loka_onnx.core.evaluation import Choice
from loka_onnx.engines import registry
from loka_onnx.errors import EngineError
from loka_onnx.pipeline.job_execution import execute_on_cluster
from loka_onnx.pipeline.run import RunOptions, Stage, run

# Installed in CI, where this is no expected skip (tests/conftest.py).
ray = pytest.importorskip("ray", reason="needs ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=2, resources={AWAY: 1}, **quiet)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def not_here(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process only: the workers of the cluster can build."""
    monkeypatch.setattr(registry, "maker_of", {"onnxruntime": NotHere, "inductor": Both}.__getitem__)


def test_a_run_sends_its_jobs_to_the_node_with_the_device(place):
    two_targets(place, executor="ray", job_data=True)
    run(place.run_file)
    found = engines_of(place)
    assert [found[name][0] for name in (PLAIN, JOB)] == [BuildStatus.RUN_ELSEWHERE] * 2
    choice = serde.read(Choice, place.output / "choice.json")
    assert [target.target for target in choice.targets] == ["cpu", AWAY]
    assert resumed(place)["build"]


def test_a_device_that_no_node_has_leaves_its_job_waiting(place):
    NotHere.devices = {**NotHere.devices, "amd-mi355x": ("cpu",)}
    place.write_run_file(
        plan={"plans": ["fp32"]},
        targets=[{"device": "amd-mi355x", "backends": ["onnxruntime"]}],
        build={"executor": "ray"},
    )
    run(place.run_file, RunOptions(until=Stage.BUILD))
    ((status, detail),) = engines_of(place).values()
    assert status is BuildStatus.WAITING
    assert detail.endswith("the cluster: no node of the Ray cluster has the resource 'amd-mi355x'")
    # The next run asks again: a node may have joined.
    assert not resumed(place, Stage.BUILD)["build"]


def test_what_a_node_cannot_read_is_told(tmp_path):
    failures = execute_on_cluster({tmp_path: AWAY}, None, lambda task, done, total: None)
    assert failures[tmp_path].startswith(f"{tmp_path}: there is no build job here")


def test_a_cluster_that_does_not_answer_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(EngineError) as caught:
        execute_on_cluster({tmp_path: AWAY}, "127.0.0.1:1", lambda task, done, total: None)
    text = str(caught.value)
    assert text.startswith("no Ray cluster answers at '127.0.0.1:1'")
    assert "correct `build.ray_address`" in text

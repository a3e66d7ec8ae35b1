"""Build jobs on one tiny model: written, read, executed, held against their results, merged."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))
from tiny_models import MlpShape, mlp

from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes, BuildJob, JobRows
from loka_onnx.core.rewrite import Part
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend
from loka_onnx.engines.request import BuildLimits, BuildRequest
from loka_onnx.errors import ConfigError, EngineError, EvaluationError, ModelError
from loka_onnx.pipeline import job_execution
from loka_onnx.pipeline.job_execution import execute_job
from loka_onnx.pipeline.job_results import choosable, merge_result, read_result, replayed
from loka_onnx.pipeline.jobs import (
    JobOrigin,
    SplitRows,
    find_jobs,
    list_files,
    read_job,
    request_of,
    verify_files,
    write_job,
)
from loka_onnx.sessions.onnx_session import OnnxSession

pytestmark = pytest.mark.slow

NAME = "cpu-onnxruntime-cpu-fp32"
ROWS = np.random.default_rng(3).normal(size=(23, 64)).astype(np.float32)


def batches() -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, len(ROWS), 10):
        yield {"x": ROWS[start : start + 10]}


def written(
    folder: Path,
    *,
    data: bool = False,
    external: bool = False,
    timed: SplitRows | None = None,
    batch: BatchSizes = BatchSizes(1, 8, 16, (4, 8)),  # noqa: B008 - frozen
) -> tuple[Path, BuildRequest, BuildJob]:
    model = mlp(
        folder / "model", Precision.FP32, Precision.FP32, fp8=False, shape=MlpShape(external=external)
    )
    request = BuildRequest(
        model=model.path,
        plan=model.plan,
        sites=model.sites,
        target="cpu",
        architecture="cpu",
        batch=batch,
        output=folder / "unused",
        sample=model.sample,
        limits=BuildLimits(60.0, 2 << 30),
    )
    rows = [SplitRows(split, len(ROWS), 10, batches) for split in ("selection", "certification")]
    origin = JobOrigin("run", NAME, "onnxruntime", Part.WHOLE, ("out",), rows if data else (), timed)
    directory = folder / "jobs" / NAME
    return directory, request, write_job(directory, request, origin)


def test_a_job_says_everything_that_the_build_depends_on(tmp_path):
    directory, request, job = written(tmp_path, external=True)
    assert read_job(directory) == job
    again = request_of(job, directory, tmp_path / "result" / "engine")
    told = replace(again, model=request.model, sample=request.sample, output=request.output, relative_to=None)
    assert told == request
    # The weights beside the model went along, and are listed.
    assert sorted(job.files) == ["model/model.onnx", "model/model.onnx.data", "sample.npz"]
    assert find_jobs(tmp_path / "jobs") == [directory] == find_jobs(directory)
    # Written again it is the same, and what came back for it stays.
    (directory / "result").mkdir()
    again = write_job(directory, request, JobOrigin("run", NAME, "onnxruntime", Part.WHOLE, ("out",)))
    assert again.digest == job.digest
    assert (directory / "result").is_dir()
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == [NAME]


def test_outputs_come_back_row_by_row(tmp_path):
    """Against ONNX Runtime on the same rows at once."""
    directory, request, job = written(tmp_path, data=True)
    result = execute_job(directory)
    assert result.artifact.status is BuildStatus.READY and result.job == job.digest
    assert [latency.batch for latency in result.latencies] == [4, 8]
    assert read_result(directory, job) == result
    merged = merge_result(result, directory, tmp_path / "run" / "engines" / NAME, tmp_path / "run")
    assert merged.status is BuildStatus.RUN_ELSEWHERE
    assert merged.path == Path("engines") / NAME / "engine.onnx"
    assert (tmp_path / "run" / merged.path).read_bytes() == request.model.read_bytes()
    replay = replayed(directory / "result" / result.outputs["selection"])
    found = np.concatenate([replay({"x": ROWS[s : s + 9]})["out"] for s in range(0, 23, 9)])
    expected = OnnxSession(request.model).run({"x": ROWS})["out"]
    # Batches of another size may sum in another order.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(EvaluationError, match="23 rows came back, row 24 is wanted"):
        replay({"x": ROWS[:1]})


def test_latencies_are_measured_on_rows_of_their_own(tmp_path, monkeypatch):
    """Requests that repeat rows read embedding rows from the cache that a server's would not."""
    rows = np.arange(20 * 64, dtype=np.float32).reshape(20, 64)
    timed = SplitRows("timed", 20, 20, lambda: iter([{"x": rows}]))
    directory, _, job = written(tmp_path, timed=timed)
    assert job.timed == JobRows("timed", 20, 20, {"x": "data/timed-0.npy"})
    assert read_job(directory) == job
    asked: list[np.ndarray] = []
    measure = job_execution.measure_latency

    def watched(prepare, make_inputs, *others, **named):  # type: ignore[no-untyped-def]
        asked.extend(make_inputs(wanted)["x"] for wanted in (8, 20, 50))
        return measure(prepare, make_inputs, *others, **named)

    monkeypatch.setattr(job_execution, "measure_latency", watched)
    result = execute_job(directory)
    assert [latency.batch for latency in result.latencies] == [4, 8]
    assert {(x.device, x.counts_for_choice, x.inputs) for x in result.latencies} == {("cpu", True, "host")}
    # No row twice before every row once.
    known = rows[:, 0].tolist()
    times = [[request[:, 0].tolist().count(row) for row in known] for request in asked]
    assert [(min(each), max(each)) for each in times] == [(0, 1), (1, 1), (2, 3)]
    # The split's rows are not among what is judged.
    assert result.outputs == {}


def test_what_another_device_takes_comes_back_as_such(tmp_path, monkeypatch):
    directory, _, _ = written(tmp_path)
    monkeypatch.setattr(job_execution, "device_of_architecture", lambda architecture: "NVIDIA H200")
    monkeypatch.setattr(job_execution, "is_target", lambda target, architecture: False)
    found = execute_job(directory).latencies
    assert {(latency.device, latency.counts_for_choice) for latency in found} == {("NVIDIA H200", False)}


def test_a_result_of_another_job_is_refused(tmp_path):
    directory, _, job = written(tmp_path)
    assert read_result(directory, job) is None
    execute_job(directory)
    plan = replace(job.plan, id="bf16")
    for other, what in (
        (replace(job, candidate="cpu-other"), "candidate"),
        (replace(job, model_digest="0" * 64), "model"),
        (replace(job, plan=plan), "plan"),
        (replace(job, memory_bytes=1), "job"),
    ):
        with pytest.raises(ModelError) as caught:
            read_result(directory, other)
        assert f"the result of job '{other.candidate}' is of another {what}" in str(caught.value)
        assert "execute this job (`loka-onnx build --job`), or remove the result" in str(caught.value)
    # Beside what the documents list nothing is taken, and without its own a result is not whole.
    for place, read in ((directory, read_job), (directory / "result", lambda d: read_result(d.parent, job))):
        (place / "more").touch()
        with pytest.raises(ModelError, match="file 'more' is not listed in"):
            read(place)
        (place / "more").unlink()
    (directory / "result" / "result.json").unlink()
    with pytest.raises(ModelError, match="is not whole"):
        read_result(directory, job)
    assert serde.read(BuildJob, directory / "job.json") == job
    # What no request of this package could ask for is refused where it is read.
    text = (directory / "job.json").read_text()
    (directory / "job.json").write_text(text.replace('"serve": 8', '"serve": 32'))
    with pytest.raises(ConfigError, match="batch sizes are out of order"):
        read_job(directory)


def test_nothing_may_be_missing_extra_altered_or_elsewhere(tmp_path):
    place = tmp_path / "place"
    (place / "inner").mkdir(parents=True)
    (place / "inner" / "a").write_text("a")
    (place / "document").touch()
    (place / ".result.building-3").mkdir()
    (place / ".result.building-3" / "x").touch()
    files = {"inner/a": list_files(place / "inner", "document")["a"]}
    verify_files(place, files, "document", besides=("result",))

    def refused(said: str, listed: dict[str, str]) -> None:
        with pytest.raises(ModelError, match=said):
            verify_files(place, listed, "document", besides=("result",))

    refused("file 'inner/a' is not listed in 'document'", {})
    refused("file 'b' is missing", {**files, "b": "0"})
    refused("file 'inner/a' was altered", {"inner/a": "0" * 64})
    for path in ("../a", "/etc/passwd", "inner/../inner/a"):
        refused(f"file '{path}' is missing", {**files, path: "0"})
    (place / "link").symlink_to(place / "inner")
    refused("'link' is neither a file nor a directory", files)


def test_a_target_that_waits_is_left_out_of_the_choice(tmp_path):
    directory, _, _ = written(tmp_path)
    here = execute_job(directory).artifact
    waits = replace(here, target="amd-mi300x", status=BuildStatus.WAITING, detail="no device; its job waits")
    away = replace(here, target="nvidia-h100", status=BuildStatus.RUN_ELSEWHERE)
    found = choosable([here, waits, away])
    assert [engine.target for engine in found] == ["cpu", "nvidia-h100"]
    assert {engine.status for engine in found} == {BuildStatus.READY}
    # One that waits beside one that is there takes part: it loses.
    assert choosable([here, replace(waits, target="cpu")])[1].status is BuildStatus.WAITING
    with pytest.raises(EngineError, match=r"all wait for their build jobs\n  evidence: .*no device"):
        choosable([waits])


def test_an_engine_that_fails_on_its_host_is_no_candidate(tmp_path, monkeypatch):
    """It would otherwise be one that was built and never run, which may be chosen."""

    def died(*args: object, **named: object) -> None:
        raise EngineError("the worker died", evidence="signal 11")

    monkeypatch.setattr(job_execution, "measure_latency", died)
    directory, _, job = written(tmp_path)
    assert execute_job(directory).failure == "the worker died\n  evidence: signal 11"
    result = read_result(directory, job)
    merged = merge_result(result, directory, tmp_path / "run/engines" / NAME, tmp_path / "run")
    assert merged.status is BuildStatus.FAILED and not merged.is_built
    assert (merged.path, merged.digest, merged.bytes) == (None, "", 0)
    assert merged.detail.startswith(f"built on '{result.host}' (")
    assert merged.detail.endswith(
        "), where it failed behind its first batches: the worker died\n  evidence: signal 11"
    )
    assert not (tmp_path / "run").exists()


def test_a_short_last_batch_is_judged_elsewhere_as_well(tmp_path, monkeypatch):
    """23 rows in batches of 10 end with 3; the engine takes 8 or more."""
    directory, request, _ = written(tmp_path, data=True, batch=BatchSizes(8, 8, 16))
    opened = OnnxRuntimeBackend.open

    def strict(self, artifact, path):  # type: ignore[no-untyped-def]
        runner = opened(self, artifact, path)
        run = runner.run

        def run_strict(inputs):  # type: ignore[no-untyped-def]
            if len(inputs["x"]) < 8:
                raise EngineError(f"{len(inputs['x'])} rows; it takes 8 to 16")
            return run(inputs)

        runner.run = run_strict
        return runner

    monkeypatch.setattr(OnnxRuntimeBackend, "open", strict)
    result = execute_job(directory)
    assert result.failure == ""
    replay = replayed(directory / "result" / result.outputs["certification"])
    expected = OnnxSession(request.model).run({"x": ROWS})["out"]
    np.testing.assert_allclose(replay({"x": ROWS})["out"], expected, rtol=1e-6, atol=1e-6)

"""What this host cannot build: written as a job, executed in a process that can, merged and judged here."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from run_findings import resumed
from synthetic_runs import Workplace, make_workplace

import loka_onnx
from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus, EngineSet
from loka_onnx.core.evaluation import Choice, EvaluationSet
from loka_onnx.core.job import BuildJob
from loka_onnx.engines import registry
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend
from loka_onnx.engines.onnxruntime.providers import Provider, provider_for
from loka_onnx.errors import EngineError
from loka_onnx.pipeline.job_execution import execute_job
from loka_onnx.pipeline.run import RunOptions, Stage, run

pytestmark = pytest.mark.slow

AWAY = "amd-mi300x"


class NotHere(OnnxRuntimeBackend):
    """ONNX Runtime where it is not installed; what it is built for is on another host."""

    devices = {"cpu": ("cpu",), AWAY: ("cpu",)}  # noqa: RUF012 - as the class above

    def build_blocker(self, architecture: str) -> str:
        return f"no {AWAY} on this host"

    def why_not_run(self, architecture: str) -> str:
        return f"no {AWAY} on this host"


class Both(OnnxRuntimeBackend):
    """A second maker, which can build for the CPU of this host."""

    name = "inductor"
    devices = {"cpu": ("cpu",)}  # noqa: RUF012

    def provider(self, architecture: str) -> Provider:
        return provider_for(OnnxRuntimeBackend.spec.name, architecture)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This process cannot build for the device; those that it starts, and it after `undo`, can."""
    monkeypatch.setattr(registry, "maker_of", {"onnxruntime": NotHere, "inductor": Both}.__getitem__)
    yield monkeypatch


def two_targets(place: Workplace, **build: object) -> None:
    place.write_run_file(
        plan={"plans": ["fp32", "fp8-all"]},
        targets=[{"device": "cpu", "backends": ["inductor"]}, {"device": AWAY, "backends": ["onnxruntime"]}],
        build=build,
    )


def engines_of(place: Workplace) -> dict[str, tuple[BuildStatus, str]]:
    engines = serde.read(EngineSet, place.output / "engines.json").engines
    return {engine.id: (engine.status, engine.detail) for engine in engines}


JOB = f"{AWAY}-onnxruntime-cpu-fp8-all"
PLAIN = f"{AWAY}-onnxruntime-cpu-fp32"


def test_a_run_writes_jobs_and_goes_on_with_what_it_has(place, elsewhere):
    two_targets(place)
    result = run(place.run_file)
    status, detail = engines_of(place)[JOB]
    assert status is BuildStatus.WAITING
    assert detail == (
        f"no {AWAY} on this host; `loka-onnx build --job jobs/{JOB}` builds it on a host with {AWAY}"
    )
    assert result.choice is not None and [t.target for t in result.choice.targets] == ["cpu"]
    assert "waiting for its build job" in (place.output / "report.md").read_text()
    loka_onnx.verify_bundle(place.output / "bundle")
    # No row of the user's data goes along unless that is asked for.
    directory = place.output / "jobs" / JOB
    job = serde.read(BuildJob, directory / "job.json")
    assert sorted(job.files) == ["data/timed-0.npy", "data/timed-1.npy", "model/model.onnx", "sample.npz"]
    assert job.rows == ()
    # Latencies there are measured on generated rows, four times as many as the largest request has.
    assert job.timed is not None and (job.timed.rows, set(job.timed.inputs)) == (4 * 64, {"dense", "item"})
    carried = np.load(directory / job.timed.inputs["dense"])
    assert len(np.unique(carried, axis=0)) == 4 * 64
    record = json.loads((place.output / "run.json").read_text())["value"]
    built = next(stage for stage in record["stages"] if stage["stage"] == "build")
    assert f"jobs/{JOB}/job.json" in built["files"]


def test_a_job_is_executed_on_another_host_and_its_result_merged(place, elsewhere, command, tmp_path):
    two_targets(place, job_data=True)
    run(place.run_file, RunOptions(until=Stage.BUILD))
    jobs = place.output / "jobs"
    assert sorted(path.name for path in jobs.iterdir()) == [PLAIN, JOB]
    refused = command("build", "--job", jobs / JOB)
    assert refused.code == 1 and f"this host cannot execute the job '{JOB}'" in refused.err

    elsewhere.undo()  # from here on: the other host
    away = shutil.copytree(jobs, tmp_path / "away")
    done = command("build", "--job", away, "--quiet")
    assert done.code == 0, done.err
    assert f"{JOB}: built and run here\n  batch 8: " in done.out
    # The run's own inputs are gone there: labels never left.
    for name in (JOB, PLAIN):
        job = serde.read(BuildJob, away / name / "job.json")
        assert [rows.split for rows in job.rows] == ["selection", "certification"]
        assert {i for rows in job.rows for i in rows.inputs} == {"dense", "item"}
        shutil.copytree(away / name / "result", jobs / name / "result")

    elsewhere.setattr(registry, "maker_of", {"onnxruntime": NotHere, "inductor": Both}.__getitem__)
    result = run(place.run_file, RunOptions(resume=True))
    status, detail = engines_of(place)[JOB]
    assert status is BuildStatus.RUN_ELSEWHERE and detail.startswith("built and run on '")
    assert [t.target for t in result.choice.targets] == ["cpu", AWAY]
    assert result.choice.targets[1].engine == PLAIN
    assert (place.output / "engines" / JOB / "engine.onnx").is_file()
    loka_onnx.verify_bundle(place.output / "bundle")

    # Judged on the outputs that came back: as the same engines of this host are, to the last bit.
    evaluations = serde.read(EvaluationSet, place.output / "evaluation.json")
    for split in ("selection", "certification"):
        for plan in ("fp32", "fp8-all"):
            here = evaluations.of(f"cpu-inductor-cpu-{plan}", split)
            there = evaluations.of(f"{AWAY}-onnxruntime-cpu-{plan}", split)
            assert there.status == "measured" and there.outputs == here.outputs
    timed = evaluations.of(PLAIN, "selection").latencies
    assert [latency.batch for latency in timed] == [8, 64]
    # The device is that of the host that timed it, by its own name.
    assert all(latency.device == "cpu" and latency.counts_for_choice for latency in timed)
    # It was timed in a job of its own, not in turns with others.
    assert {latency.job for latency in timed} == {PLAIN}
    assert {loser.times for loser in result.choice.targets[1].losers} == {None}
    # Nothing is left to do.
    assert all(resumed(place).values())


@pytest.fixture(scope="module")
def jobs_done(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Jobs without data, with their results, in a run that has not taken them in yet."""
    place = make_workplace(tmp_path_factory.mktemp("jobs") / "work")
    two_targets(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "maker_of", {"onnxruntime": NotHere, "inductor": Both}.__getitem__)
        run(place.run_file, RunOptions(until=Stage.BUILD))
    execute_job(place.output / "jobs" / PLAIN)
    execute_job(place.output / "jobs" / JOB)
    return place


@pytest.fixture
def executed(jobs_done: Workplace, place: Workplace, elsewhere) -> Path:
    """A copy of it."""
    two_targets(place)
    shutil.copytree(jobs_done.output, place.output)
    return place.output / "jobs"


def test_without_data_the_engine_is_built_and_its_accuracy_not_measured(place, executed):
    run(place.run_file, RunOptions(resume=True))
    status, detail = engines_of(place)[PLAIN]
    assert status is BuildStatus.BUILT_NOT_RUN
    assert "where its first batches ran; its job carried no rows (`build.job_data`)" in detail
    evaluations = serde.read(EvaluationSet, place.output / "evaluation.json")
    assert evaluations.of(PLAIN, "selection").outputs == ()
    choice = serde.read(Choice, place.output / "choice.json")
    assert "provisional" in choice.targets[1].basis


def test_a_job_that_asks_for_something_else_loses_its_result(place, executed):
    run(place.run_file, RunOptions(resume=True, until=Stage.BUILD))
    assert engines_of(place)[PLAIN][0] is BuildStatus.BUILT_NOT_RUN
    two_targets(place)
    values = place.run_file.read_text().replace("max: 256", "max: 128")
    place.run_file.write_text(values)
    run(place.run_file, RunOptions(resume=True, until=Stage.BUILD))
    assert engines_of(place)[PLAIN][0] is BuildStatus.WAITING
    assert not (executed / PLAIN / "result").exists()


def test_a_run_in_which_everything_waits_says_what_to_do(place, elsewhere):
    place.write_run_file(plan={"plans": ["fp32"]}, targets=[{"device": AWAY, "backends": ["onnxruntime"]}])
    with pytest.raises(EngineError) as caught:
        run(place.run_file)
    text = str(caught.value)
    assert "there is no engine to choose from yet: all wait for their build jobs" in text
    assert "bring each `result/` back into its job, and go on with `run --resume`" in text
    assert (place.output / "jobs" / PLAIN / "job.json").is_file()


def test_jobs_may_be_refused(place, elsewhere):
    two_targets(place, jobs=False)
    with pytest.raises(Exception, match="no engine could be built for 'amd-mi300x'"):
        run(place.run_file)
    assert engines_of(place)[PLAIN] == (BuildStatus.DECLINED, f"no {AWAY} on this host")
    assert not (place.output / "jobs").exists()

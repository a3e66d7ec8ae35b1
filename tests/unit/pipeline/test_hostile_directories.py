"""Run directories and results of jobs that lead out of themselves, by their documents or by links."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from test_jobs import written

import loka_onnx
from loka_onnx.bundle.format.archive import pack_bundle, verify_path
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineSet
from loka_onnx.core.job import BuildJob, JobResult
from loka_onnx.core.lineage import RunRecord, StageRecord
from loka_onnx.errors import InternalError, LokaError, ModelError, OutputError, UserError
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.pipeline.directory import OWNED, RECORD, RunDirectory
from loka_onnx.pipeline.job_execution import execute_job
from loka_onnx.pipeline.job_results import merge_result, read_result
from loka_onnx.pipeline.jobs import read_job

OUTSIDE = (
    "/etc/passwd",
    "../precious",
    "model/../../precious",
    "..",
    ".",
    "",
    "x" * 256,
    "a\0b",
    "a/" * 3000,
)
"""What no path of a document may be: absolute, up, nothing, and no name of a file."""


def opened(path: Path, *, resume: bool = True) -> RunDirectory:
    return RunDirectory.create(path, {}, {"python": "3"}, force=False, resume=resume)


def a_run(path: Path, files: dict[str, str]) -> Path:
    stages = (StageRecord("refine", "0" * 64, {}, files, 1.0),)
    serde.write(RunRecord({}, {"python": "3"}, stages, path), path / RECORD)
    return path


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_record_that_lists_a_file_elsewhere_is_refused_before_anything_is_removed(tmp_path, name):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    run = a_run(tmp_path / "run", {})
    text = (run / RECORD).read_text().replace('"files": {}', f'"files": {{{json.dumps(name)}: "0"}}')
    (run / RECORD).write_text(text)
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(UserError) as caught:
        opened(run)
    assert caught.value.where == str(run / RECORD)
    assert precious.read_text() == "kept"
    assert sorted(path.name for path in run.iterdir()) == before


def test_an_absolute_path_of_the_run_itself_is_no_exception(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(UserError):
        opened(a_run(run, {str(run / "plan.json"): "0"}))


@pytest.mark.parametrize("place", ["model", "engines/a", "plan.json", ".earlier-run", ".discarded-run"])
@pytest.mark.parametrize("resume", [True, False])
def test_a_link_out_of_a_run_directory_is_refused_and_not_followed(tmp_path, place, resume):
    precious = tmp_path / "elsewhere"
    precious.mkdir()
    for name in OWNED:
        (precious / name).write_text("kept")
    run = a_run(tmp_path / "run", {"model/plan.json": "0"})
    (run / place).parent.mkdir(exist_ok=True)
    (run / place).symlink_to(precious)
    with pytest.raises(OutputError) as caught:
        RunDirectory.create(run, {}, {}, force=not resume, resume=resume)
    assert caught.value.where == place
    assert {path.name for path in precious.iterdir()} == set(OWNED)


def test_links_that_stay_inside_and_one_to_the_run_itself_are_followed(tmp_path):
    run = a_run(tmp_path / "run", {"model/plan.json": "0"})
    (run / "model").mkdir()
    (run / "model" / "plan.json").write_text("{}")
    (run / "plan.json").symlink_to("model/plan.json")
    (tmp_path / "by-link").symlink_to(run)
    with opened(tmp_path / "by-link") as directory:
        directory.forget("refine")
    assert not (run / "model" / "plan.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (EngineSet, lambda value, name: value["engines"][0].update(path=name)),
        (JobResult, lambda value, name: value["artifact"].update(path=name)),
        (JobResult, lambda value, name: value.update(outputs={"selection": name})),
        (JobResult, lambda value, name: value["files"].update({name: "0"})),
        (BuildJob, lambda value, name: value.update(model=name)),
        (BuildJob, lambda value, name: value.update(sample=name)),
        (BuildJob, lambda value, name: value["rows"][0]["inputs"].update(x=name)),
    ],
)
def test_every_path_of_every_document_is_held_inside(tmp_path, kind, change):
    directory, _, job = written(tmp_path, data=True)
    result = execute_job(directory)
    document = {EngineSet: EngineSet((result.artifact,)), JobResult: result, BuildJob: job}[kind]
    assert serde.loads(kind, serde.dumps(document)) == document
    for name in OUTSIDE:
        plain = json.loads(serde.dumps(document))
        change(plain["value"], name)
        with pytest.raises(UserError):
            serde.loads(kind, json.dumps(plain))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["target", "backend", "architecture", "plan"])
def test_what_directories_are_named_after_is_one_name(tmp_path, part):
    directory, _, _ = written(tmp_path)
    artifact = execute_job(directory).artifact
    for name in (*OUTSIDE, "a/b"):
        with pytest.raises(UserError):
            serde.loads(EngineSet, serde.dumps(EngineSet((replace(artifact, **{part: name}),))))


def test_what_is_copied_of_a_result_is_what_it_lists(tmp_path):
    """`engine` of a result is copied as a whole: its path decides what."""
    directory, _, job = written(tmp_path, data=True)
    result = execute_job(directory)
    document = directory / "result" / "result.json"
    for path in (Path("engine.onnx"), Path("other/engine.onnx"), Path("engine"), Path("result.json")):
        serde.write(replace(result, artifact=replace(result.artifact, path=path)), document)
        with pytest.raises(ModelError) as caught:
            read_result(directory, job)
        assert caught.value.where == str(document)
    serde.write(replace(result, outputs={"selection": "elsewhere.npz"}), document)
    with pytest.raises(ModelError):
        read_result(directory, job)
    serde.write(replace(result, artifact=replace(result.artifact, target="amd")), document)
    with pytest.raises(ModelError):
        read_result(directory, job)
    serde.write(result, document)
    found = read_result(directory, job)
    assert found == result
    merged = merge_result(found, directory, tmp_path / "run" / "engines" / "a", tmp_path / "run")
    assert merged.path == Path("engines/a/engine.onnx")


def test_a_document_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(UserError):
        serde.read(EngineSet, tmp_path / "plan.json")
    directory, _, _ = written(tmp_path)
    (directory / "job.json").unlink()
    os.mkfifo(directory / "job.json")
    with pytest.raises(ModelError):
        read_job(directory)
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / RECORD)
    with pytest.raises(OutputError) as caught:
        opened(tmp_path / "run")
    assert caught.value.code == "E1504"


@pytest.mark.parametrize("value", ["123", 123.0, True, None, [123]])
def test_a_number_of_a_document_is_a_number(tmp_path, value):
    """Another reader of the same document must not see another value."""
    directory, _, job = written(tmp_path)
    for at in (("batch", "serve"), ("memory_bytes",)):
        plain = json.loads(serde.dumps(job))
        holder = plain["value"]
        for key in at[:-1]:
            holder = holder[key]
        holder[at[-1]] = value
        (directory / "job.json").write_text(json.dumps(plain))
        with pytest.raises(UserError):
            read_job(directory)


def test_a_model_of_a_document_is_placed_inside(tmp_path):
    for name in OUTSIDE:
        with pytest.raises(UserError):
            ModelArtifact(Path(name), "0" * 64, 21, (), (), (), "").placed(tmp_path)
    inside = ModelArtifact(Path("model/a.onnx"), "0" * 64, 21, (), (), (), "").placed(tmp_path)
    assert inside.path == tmp_path / "model/a.onnx"


def test_a_circle_of_links_is_refused_whatever_it_stands_for(tmp_path):
    """`Path.resolve` raises RuntimeError there before Python 3.13."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    circle = tmp_path / "a"
    for refused in (
        lambda: opened(circle),
        lambda: opened(circle / "below", resume=False),
        lambda: loka_onnx.load(circle),
        lambda: verify_path(circle),
        lambda: pack_bundle(circle, tmp_path / "packed"),
        lambda: pack_bundle(tmp_path, circle),
        lambda: import_onnx(circle, tmp_path / "taken.onnx", ()),
    ):
        with pytest.raises(LokaError) as caught:
            refused()
        assert not isinstance(caught.value, InternalError)

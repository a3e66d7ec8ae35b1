"""Hostile run directories: documents, jobs, results and bundles, altered with digests and seals mended."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from loka_onnx.bundle.format.files import read_sample, verify_directory
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.digests import UNSEALED, digest_file, seal
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet
from loka_onnx.errors import CheckFailed, LokaError
from loka_onnx.operations.drift.run import open_run
from loka_onnx.operations.refresh.earlier import EarlierRun
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.job_results import merge_result, read_result
from loka_onnx.pipeline.jobs import find_jobs, read_job
from loka_onnx.pipeline.run import RunOptions, run
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from tests.fuzz.values import HOSTILE, OUTSIDE, as_json, changed

SKIPPED = ("instrumented", "*.html", "*.md")


def attempt(random: Random, place: Path) -> None:
    """Alter a run directory, and read it in each of the ways that there are."""
    directory = _altered(random, place)
    readers = [_read_record, _read_earlier, _read_profile, _read_jobs, _read_bundle, _apply_plans]
    random.shuffle(readers)
    refused: LokaError | None = None
    for reader in readers:
        try:
            reader(directory)
        except LokaError as error:
            refused = error
    if refused is not None:
        raise refused


def attempt_resume(random: Random, place: Path) -> None:
    """Alter a run directory, and go on with the run."""
    _altered(random, place)
    run(place / "RUN.yaml", RunOptions(resume=True))


def _altered(random: Random, place: Path) -> Path:
    directory = place / "runs" / "RUN"
    shutil.copytree(place / "prepared", directory, ignore=shutil.ignore_patterns(*SKIPPED), symlinks=True)
    documents = sorted(path for path in directory.rglob("*.json") if "report" not in path.name)
    document = random.choice([*documents, *([directory / "run.json"] * 3), *directory.rglob("result.json")])
    if random.random() < 0.12:
        _replaced(random, place, random.choice([document, document.parent, *directory.rglob("*.onnx")]))
        return directory
    plain = json.loads(document.read_text(encoding="utf-8"))
    value = plain["value"]
    if document.name == "run.json" and random.random() < 0.6:
        stage = random.choice(value["stages"])
        stage["files"][_path(random, place)] = "0" * 64
        if random.random() < 0.7:
            stage["stage"] = "refine"
    elif document.name == "result.json" and random.random() < 0.6:
        value["artifact"]["path"] = random.choice(
            (_path(random, place), "engine", "result.json", "nothing/x")
        )
    else:
        plain = changed(random, plain)
    text = as_json(random, plain)
    if document.name == "manifest.json":
        text = json.dumps(plain)
        with suppress(Exception):
            plain["value"]["seal"] = UNSEALED
            text = seal(json.dumps(plain))
    document.write_text(text, encoding="utf-8", errors="surrogatepass")
    _mend(directory, document)
    return directory


def _path(random: Random, place: Path) -> str:
    outside = place.parent / OUTSIDE / "kept"
    return random.choice((str(outside), os.path.relpath(outside, place / "runs" / "RUN"), *PATHS))


PATHS = tuple(value for value in HOSTILE if isinstance(value, str))


def _mend(directory: Path, document: Path) -> None:
    """Write the digest of a document where the record lists it, so that it is read and not made anew."""
    record = directory / "run.json"
    if document == record or not record.is_file():
        return
    plain: Any = json.loads(record.read_text(encoding="utf-8"))
    name = document.relative_to(directory).as_posix()
    for stage in plain["value"]["stages"]:
        if name in stage["files"]:
            stage["files"][name] = digest_file(document)
    record.write_text(json.dumps(plain), encoding="utf-8")


def _replaced(random: Random, place: Path, path: Path) -> None:
    """Put a link, a pipe or a directory in the place of a file or directory."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if not path.parent.is_dir():
        return
    match random.randrange(4):
        case 0:
            path.symlink_to(place.parent / OUTSIDE)
        case 1:
            path.symlink_to(random.choice(("/dev/zero", path.name, place.parent / OUTSIDE / "kept")))
        case 2:
            os.mkfifo(path)
        case _:
            path.mkdir()


def _read_record(directory: Path) -> None:
    with RunDirectory.create(directory, {}, {}, force=False, resume=True) as opened:
        for record in opened.record.stages:
            if record.stage == "refine":
                opened.forget(record.stage)


def _read_earlier(directory: Path) -> None:
    earlier = EarlierRun.read(directory)
    _ = earlier.config, earlier.base, earlier.wanted_plans, earlier.high_error_channels, earlier.seconds


def _read_profile(directory: Path) -> None:
    open_run(directory / "profile.json")


def _read_jobs(directory: Path) -> None:
    for place in find_jobs(directory / "jobs"):
        job = read_job(place)
        result = read_result(place, job)
        if result is not None:
            merge_result(result, place, directory / "engines" / "merged", directory)


def _read_bundle(directory: Path) -> None:
    bundle = directory / "bundle"
    manifest = verify_directory(bundle).manifest
    for entry in manifest.candidates:
        with suppress(CheckFailed):
            read_sample(bundle, manifest, entry)


def _apply_plans(directory: Path) -> None:
    plans = serde.read(PlanSet, directory / "plan.json").plans
    model = serde.read(ModelArtifact, directory / "model" / "modified.json")
    for plan in plans:
        source = ModelArtifact(**{**model.__dict__, "path": directory / model.path})
        apply_plan(source, plan, PlanForm(Precision.FP32), directory / "planned" / "again.onnx")

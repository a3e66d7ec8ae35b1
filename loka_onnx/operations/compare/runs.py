"""Difference of two runs, from their reports: nothing is run, nothing is measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loka_onnx.core import serde
from loka_onnx.core.digests import digest_bytes
from loka_onnx.core.lineage import RunRecord
from loka_onnx.errors import UserError
from loka_onnx.operations.compare import run_differences as differences
from loka_onnx.operations.compare.run_document import ComparedRun, RunComparison
from loka_onnx.pipeline.directory import RECORD
from loka_onnx.pipeline.run import GIVEN
from loka_onnx.report import JSON_NAME, ReportData

_OF_A_REPORT = re.compile(r"loka-onnx/report/(\d+)")
_NO_SETTINGS = ("output", "name", GIVEN)
"""Entries of a run's record that name the run, and say nothing of what it did."""


@dataclass(frozen=True)
class ReadRun:
    """One side: its report with the SHA-256 of that, and its record, None for a report.json by itself."""

    path: str
    digest: str
    data: ReportData
    record: RunRecord | None


def read_run(path: Path) -> ReadRun:
    """Read the report of a run: a run directory, or a report.json.

    Raises:
        UserError: There is no report, it is no report, or it was written by another version of this package.
    """
    file = path / JSON_NAME if path.is_dir() else path
    if not file.is_file():
        evidence = f"it has no '{JSON_NAME}'" if path.is_dir() else "there is no such file"
        raise UserError(
            "there is no report of a run",
            where=str(path),
            evidence=evidence,
            remedy="name a run directory or a report.json; `loka-onnx report RUN.yaml` writes one",
        )
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("cannot read the report", where=str(file), evidence=str(error)) from error
    _refuse_others(file, text)
    record = file.parent / RECORD
    return ReadRun(
        str(path),
        digest_bytes(text.encode()),
        serde.loads(ReportData, text, where=str(file)),
        serde.read(RunRecord, record) if path.is_dir() and record.is_file() else None,
    )


def _refuse_others(file: Path, text: str) -> None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    schema = document.get("schema") if isinstance(document, dict) else None
    expected = serde.schema_id(ReportData)
    if schema == expected:
        return
    found = _OF_A_REPORT.fullmatch(schema) if isinstance(schema, str) else None
    if found is None:
        raise UserError(
            "this is no report of a run",
            where=str(file),
            evidence="it is no JSON document" if document is None else f"its schema is {schema!r}",
            remedy=f"name a run directory or its {JSON_NAME}; `loka-onnx compare` is for bundles and models",
        )
    is_older = int(found.group(1)) < int(expected.rpartition("/")[2])
    # Versions are part of the key of every stage (`RunDirectory.stage`): in its own directory the run would
    # be measured anew, and its old figures would be gone.
    older = (
        "compare with the version that wrote it; or copy its run directory and write the report again there: "
        "`loka-onnx report RUN.yaml --output COPY`, which runs every stage once more, and measures anew, "
        "where the version of loka-onnx or of a library has changed"
    )
    raise UserError(
        f"the report was written by {'an older' if is_older else 'a newer'} version of loka-onnx",
        where=str(file),
        evidence=f"schema is {schema!r}, this version reads {expected!r}",
        remedy=older if is_older else "compare with that version, or write both reports with this one",
    )


def compare_runs(old: Path, new: Path) -> RunComparison:
    """The difference of two runs, each a run directory or a report.json.

    Raises:
        UserError: One of them is no report that this version reads.
    """
    return differences_of(read_run(old), read_run(new))


def differences_of(old: ReadRun, new: ReadRun) -> RunComparison:
    """The difference of two runs that were read."""
    a, b = old.data, new.data
    return RunComparison(
        old=_described(old),
        new=_described(new),
        targets=tuple(differences.targets(a, b)),
        accuracy=tuple(differences.accuracy(a, b)),
        latency=tuple(differences.latency(a, b)),
        gains=tuple(differences.gains(a, b)),
        sites=tuple(differences.sites(a, b)),
        presence=tuple(differences.presence(a, b)),
        reshaped=tuple(differences.reshaped(a, b)),
        plans=tuple(differences.plans(a, b)),
        rewrites=tuple(differences.rewrites(a, b)),
        splits=tuple(differences.splits(a, b)),
        versions=tuple(differences.values(a.versions, b.versions)),
        settings=tuple(differences.values(_settings(old), _settings(new)))
        if old.record is not None and new.record is not None
        else None,
        notes=tuple(_notes(old, new)),
    )


def _described(run: ReadRun) -> ComparedRun:
    data = run.data
    return ComparedRun(
        path=run.path,
        title=data.title,
        digest=run.digest,
        model_digest=data.exported.digest,
        modified_digest=data.modified.digest,
        label_rule=data.data.label_rule,
        synthetic=data.is_synthetic,
        candidates=len(data.engines),
        sites=len(data.modified.sites),
    )


def _settings(run: ReadRun) -> dict[str, str]:
    return {} if run.record is None else differences.flat(run.record.config, _NO_SETTINGS)


def _notes(old: ReadRun, new: ReadRun) -> Iterator[str]:
    a, b = old.data, new.data
    if old.digest == new.digest:
        yield "Both are the same report"
    if a.exported.digest != b.exported.digest:
        yield "The runs are of different exported models: costs are relative to different FP32 losses"
    if a.is_synthetic != b.is_synthetic:
        which = "old" if a.is_synthetic else "new"
        yield f"The data of the {which} run is synthetic, that of the other is not"
    if a.data.label_rule != b.data.label_rule:
        yield f"The labels differ: '{a.data.label_rule}' in the old run, '{b.data.label_rule}' in the new one"
    without = [name for name, run in (("old", old), ("new", new)) if run.record is None]
    if without:
        yield (
            f"Settings are not compared: of the {' and the '.join(without)} run only its report was given, "
            f"and settings stand in the '{RECORD}' of a run directory"
        )

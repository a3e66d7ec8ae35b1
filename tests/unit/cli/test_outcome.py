"""What a run ends with, in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka_onnx.cli.outcome import first_line
from loka_onnx.core.engine import BuildStatus, EngineArtifact

WAITS = "no nvidia-h100 on this host; `loka-onnx build --job jobs/x` builds it on a host with nvidia-h100"


def waiting(detail: str) -> EngineArtifact:
    status = BuildStatus.WAITING
    return EngineArtifact(
        "tensorrt", "fp8-all", "nvidia-h100", "sm90", status, False, None, 0, "", "", (), 0.0, detail=detail
    )


@pytest.mark.parametrize(
    ("here", "place"), [("", "runs/a/jobs/x"), ("runs", "a/jobs/x"), ("elsewhere", "{root}/runs/a/jobs/x")]
)
def test_a_job_is_named_as_seen_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, place: str
) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / here)
    told = first_line(waiting(f"{WAITS}\nmore"), tmp_path / "runs" / "a")
    assert told == WAITS.replace("jobs/x", place.format(root=tmp_path))


def test_other_details_are_told_as_they_are(tmp_path: Path) -> None:
    assert first_line(waiting("  declined: jobs/x\nmore"), tmp_path) == "declined: jobs/x"

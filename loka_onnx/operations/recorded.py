"""Settings that a run recorded, as far as an operation needs them: the rest may be of another version."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from loka_onnx.core import serde
from loka_onnx.core.lineage import RunRecord
from loka_onnx.errors import UserError

T = TypeVar("T")


def recorded_settings(kind: type[T], record: Path, remedy: str) -> T:
    """Read a part of the run file, a dataclass of `kind`, from a run's record; a UserError if it lacks it."""
    try:
        return TypeAdapter(kind).validate_python(serde.read(RunRecord, record).config)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            "E1632 the run was recorded by another version of loka-onnx",
            where=str(record),
            evidence=f"at config.{'.'.join(map(str, first['loc']))}: {first['msg']}",
            remedy=remedy,
        ) from error

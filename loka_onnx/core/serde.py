"""Versioned JSON for the values that stages exchange.

A document is ``{"schema": "loka-onnx/<kind>/<version>", "value": {...}}``. Reading is strict: an unknown
schema, key or type is refused. Writing is atomic, and equal values give equal bytes, so that digests can be
cache keys. Documents travel between hosts: a field of type `InsidePath`, `InsideFile` or `Component` is
refused where it would leave its directory; links inside are checked where it is opened
(`pipeline.directory.refuse_links`).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from loka_onnx.errors import OutputError, UserError

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", ser_json_inf_nan="constants")
"""Assign to `__pydantic_config__` of a document dataclass."""

MOST_NAME_BYTES, MOST_PATH_BYTES = 255, 4096
"""Longest file name and path of Linux; system calls refuse more, each in its own way."""


def _inside(value: Path) -> Path:
    _inside_file(str(value))
    return value


def _inside_file(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"the path {value[:80]!r} leads out of the directory of its document")
    if "\0" in value or len(os.fsencode(value)) > MOST_PATH_BYTES:
        raise ValueError(f"the path {value[:80]!r} is no name of a file")
    for part in path.parts:
        if len(os.fsencode(part)) > MOST_NAME_BYTES:
            raise ValueError(f"the file name {part[:80]!r} has more than {MOST_NAME_BYTES} bytes")
    return value


def is_inside(path: Path) -> bool:
    """Return whether a path is relative and does not leave its directory."""
    try:
        _inside(path)
    except ValueError:
        return False
    return True


def _component(value: str) -> str:
    if "/" in value or _inside_file(value) == ".":
        raise ValueError(f"{value[:80]!r} is no name of a file")
    return value


InsidePath = Annotated[Path, AfterValidator(_inside)]
"""A path that stays in the directory of a document (of a run, a job, a result)."""
InsideFile = Annotated[str, AfterValidator(_inside_file)]
"""The same as text, ``/`` between components; `list_files` writes it."""
Component = Annotated[str, AfterValidator(_component)]
"""A name for files and directories."""


_adapter = cast("Callable[[Any], TypeAdapter[Any]]", cache(TypeAdapter))


def schema_id(kind: type[Any]) -> str:
    """Return ``loka-onnx/<kind>/<version>`` of a document type, from its `SCHEMA` attribute."""
    return f"loka-onnx/{kind.SCHEMA}"


def json_schema(kind: type[Any]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a document type, self-contained."""
    value = _adapter(kind).json_schema()
    definitions = value.pop("$defs", {})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": schema_id(kind),
        "type": "object",
        "required": ["schema", "value"],
        "additionalProperties": False,
        "properties": {"schema": {"const": schema_id(kind)}, "value": value},
        "$defs": definitions,
    }


def dumps(value: Any) -> str:
    """Serialize a document; equal values give equal text."""
    kind = type(value)
    body = _adapter(kind).dump_python(value, mode="json")
    return json.dumps({"schema": schema_id(kind), "value": body}, indent=1, sort_keys=True) + "\n"


def loads(kind: type[T], text: str, *, where: str = "document") -> T:
    """Parse a document of the given type.

    Raises UserError if it is not JSON, or has another schema, an unknown key, or a value of the wrong type.
    """
    expected = schema_id(kind)
    with UserError("E1805 not a JSON document", where=where).in_place_of(ValueError, RecursionError):
        document = json.loads(text)
    stated = document.get("schema") if isinstance(document, dict) else None
    if stated != expected or set(document) != {"schema", "value"}:
        raise UserError(
            "E1806 unknown schema",
            where=where,
            evidence=f"schema is {stated!r}, this version reads {expected!r}",
            remedy="write the file again with this version of loka-onnx",
        )
    try:
        return cast(T, _adapter(kind).validate_json(json.dumps(document["value"]), strict=True))
    except RecursionError as error:
        # `json.loads` reads deeper nesting than `json.dumps` writes.
        raise UserError("E1807 not a JSON document", where=where, evidence=str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"E1808 not a valid {expected} document",
            where=where,
            evidence=f"at {at or 'the top'}: {first['msg']}",
        ) from error


def write(value: Any, path: Path) -> None:
    """Write a document atomically."""
    write_text(dumps(value), path)


def read(kind: type[T], path: Path) -> T:
    """Read a document of the given type; `UserError` if it is missing or no such document."""
    with UserError(f"E1809 cannot read the {schema_id(kind)} document", where=str(path)).in_place_of(
        OSError, UnicodeDecodeError
    ):
        text = read_text(path)
    return loads(kind, text, where=str(path))


def read_text(path: Path) -> str:
    """Read a file; OSError if it is a pipe or a device, whose reading may never end."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    return path.read_text(encoding="utf-8")


def write_text(text: str, path: Path) -> None:
    """Write text so that a reader sees the old file or the whole new one (`OutputError` if writing fails)."""
    with OutputError(f"E1810 cannot write '{path}'").in_place_of(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def to_plain(value: Any) -> Any:
    """Return the value as dicts, lists, strings and numbers."""
    return cast(Any, _adapter(type(value)).dump_python(value, mode="json"))

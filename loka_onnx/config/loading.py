"""Check a run file, or a mapping, and return a `RunConfig`."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from loka_onnx.config.explain import explain, key_path
from loka_onnx.config.schema import RunConfig
from loka_onnx.config.yaml_tree import Document, Loc, read_yaml
from loka_onnx.errors import Collected, ConfigError, nearest

_INDEX = re.compile(r"\[(\d+)\]")
"""An entry of a list in messages: `outputs[0].budget` is `outputs.0.budget`."""
_FILE_KEYS: tuple[Loc, ...] = (
    ("model", "onnx"),
    ("model", "checkpoint"),
    ("data", "calibration"),
    ("data", "selection"),
    ("data", "certification"),
    ("data", "path"),
)


def load_run_file(path: str | Path, overrides: Mapping[str, object] | None = None) -> RunConfig:
    """Read and check a YAML run file; relative paths in it start at its directory.

    `overrides` replace values by dotted key (``batch.max``; an entry of a list as ``outputs.0.budget`` or
    ``outputs[0].budget``); see `parse_overrides` for a command line.

    Raises:
        ConfigError: The file is missing, is not YAML, does not fit the schema, or names a missing file.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "E0101 cannot read the run file",
            where=str(path),
            evidence=error.strerror or str(error),
            remedy="give the path of a YAML file; `loka-onnx demo` writes one to start from",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            "E0102 the run file is not UTF-8 text",
            where=str(path),
            evidence=str(error),
            remedy="save it as UTF-8",
        ) from error
    document = read_yaml(text, str(path))
    if document.data is None:
        raise ConfigError(
            "E0103 the run file is empty",
            where=str(path),
            evidence="it holds no keys",
            remedy="a run file needs at least `model`, `outputs`, `data` and `targets`",
        )
    name = re.sub(r"[^\w.-]", "-", path.stem).lstrip(".-") or "run"
    return _check(_overridden(document, overrides or {}), path.parent, name)


def build_run_config(
    values: Mapping[str, object],
    directory: str | Path,
    *,
    source: str = "run configuration",
    overrides: Mapping[str, object] | None = None,
) -> RunConfig:
    """Check a run configuration made in memory, with `Path` values allowed for text; `directory` starts
    relative paths.

    `source` names the values in messages; `overrides` and errors as for `load_run_file`.
    """
    document = _overridden(Document(source, _plain(values)), overrides or {})
    return _check(document, Path(directory), "run")


def parse_overrides(assignments: Sequence[str]) -> dict[str, object]:
    """Parse overrides ``key=value`` of a command line; the value is YAML, for example ``rows=null`` or
    ``serve=[1, 8]``.

    Raises:
        ConfigError: No ``=``, an empty key, a repeated key, or a value that is not YAML.
    """
    result: dict[str, object] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        key = key.strip()
        if not equals or not key or key in result:
            raise ConfigError(
                f"E0117 the override '{key}' is given twice"
                if key in result
                else "E0118 an override is `key=value`",
                where=f"override '{assignment}'",
                evidence=f"the earlier value is {result[key]!r}" if key in result else "no key or no '='",
                remedy="write for example `calibration.rows=4096`",
            )
        result[key] = read_yaml(value, f"override '{key}'").data
    return result


def _overridden(document: Document, overrides: Mapping[str, object]) -> Document:
    data, places = copy.deepcopy(document.data), dict(document.places)
    for key, value in overrides.items():
        place, node = f"override '{key}'", data
        loc: Loc = ()
        parts = _INDEX.sub(r".\1", key).split(".")
        for place_in_key, part in enumerate(parts, start=1):
            step: Any = int(part) if isinstance(node, list) and part.isdecimal() else part
            loc = (*loc, step)
            if not isinstance(node, dict) and not (isinstance(step, int) and step < len(node)):
                raise _no_such_place(place, loc, node)
            if place_in_key == len(parts):
                node[step] = _plain(value)
            elif isinstance(node, dict) and node.get(step) is None:
                node[step] = {}
                places[loc] = place
            node = node[step]
        places = {known: at for known, at in places.items() if known[: len(loc)] != loc} | {loc: place}
    return Document(document.source, data, places)


def _no_such_place(place: str, loc: Loc, node: Any) -> ConfigError:
    holds = f"`{key_path(loc[:-1])}` holds " + (
        f"a list of {len(node)}" if isinstance(node, list) else f"{node!r}"
    )
    return ConfigError(
        f"E0104 there is no `{key_path(loc)}` to override",
        where=place,
        evidence=holds if loc[:-1] else "the run file is not a mapping",
        remedy="name a key of the run file; entries of a list are counted from 0, as in `outputs.0.budget`",
    )


def _plain(value: Any) -> Any:
    """Return data as in YAML: paths become text, tuples lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _check(document: Document, directory: Path, default_name: str) -> RunConfig:
    directory = directory.absolute()
    data = document.data
    if isinstance(data, dict):
        name = data.get("name", default_name)
        data = {"name": name, "output": f"runs/{name}", **data}
    try:
        # Strict validation of JSON refuses coercions but takes lists for tuples and text for paths.
        config = RunConfig.model_validate_json(
            json.dumps(data, default=str), context={"directory": directory}
        )
    except ValidationError as error:
        raise explain(error, document) from error
    missing = Collected()
    for loc in _FILE_KEYS:
        file = getattr(getattr(config, str(loc[0])), str(loc[1]))
        if file is None or file.is_file():
            continue
        with missing.check():
            beside = file.parent.iterdir() if file.parent.is_dir() else ()
            suggestion = nearest(file.name, sorted({entry.name for entry in beside} - {file.name}))
            raise ConfigError(
                f"E0105 `{key_path(loc)}` names a file that does not exist",
                where=document.place(loc),
                evidence=f"'{file}' is a directory" if file.is_dir() else f"looked for '{file}'",
                remedy=f"{suggestion} a relative path starts at '{directory}'".lstrip(),
            )
    missing.raise_any()
    return config

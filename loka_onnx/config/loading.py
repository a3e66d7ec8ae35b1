"""Check a run file, or a mapping, and return a `RunConfig`, or an error for each key that does not fit."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from loka_onnx.config.fields import FAULT
from loka_onnx.config.schema import RunConfig, run_file_schema
from loka_onnx.config.yaml_tree import Loc, YamlDocument, read_yaml
from loka_onnx.errors import Collected, ConfigError, SeveralErrors, UserError, nearest

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
    """Read and check a YAML run file; its directory starts all relative paths.

    `overrides` set values by dotted key, ``batch.max`` or ``outputs[0].budget``; paths in them too.
    Raises ConfigError if either is unreadable or does not fit the schema, or a model or data file is missing.
    """
    path = Path(path)
    remedy = "give the path of a YAML file; `loka-onnx demo` writes one to start from"
    unreadable = ConfigError("E0101 cannot read the run file", where=str(path), remedy=remedy)
    remedy = "save it as UTF-8; it is YAML, and for a model `loka-onnx init` writes one"
    garbled = ConfigError("E0102 the run file is not UTF-8 text", where=str(path), remedy=remedy)
    with (
        unreadable.in_place_of(OSError, words=lambda error: getattr(error, "strerror", "") or str(error)),
        garbled.in_place_of(UnicodeDecodeError),
    ):
        text = path.read_text(encoding="utf-8")
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
    """Check a run configuration in memory, `Path` values allowed; `directory` starts relative paths.

    `source` names the values in messages; `overrides` and errors as for `load_run_file`.
    """
    document = _overridden(YamlDocument(source, _plain(values)), overrides or {})
    return _check(document, Path(directory), "run")


def parse_overrides(assignments: Sequence[str]) -> dict[str, object]:
    """Parse overrides ``key=value`` of a command line, values in YAML: ``serve=[1, 8]``; ``rows=`` is null.

    Raises ConfigError without ``=``, for an empty or repeated key, or bad YAML; no schema is read.
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


def _overridden(document: YamlDocument, overrides: Mapping[str, object]) -> YamlDocument:
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
    return YamlDocument(document.source, data, places)


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


def _check(document: YamlDocument, directory: Path, default_name: str) -> RunConfig:
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


_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
    "path_type": "a path",
    "string_too_short": "text that is not empty",
    "too_short": "a list with at least one entry",
}
_ENUMS = ("enum", "literal_error")
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def explain(error: ValidationError, document: YamlDocument) -> UserError:
    """Return what does not fit the schema in a run file: one error for each key, in the file's order.

    Unknown keys come first, and then none is missing: they are often the misspelt forms of these.
    """
    errors = error.errors()
    unknown = [item for item in errors if item["type"] == "extra_forbidden"]
    if unknown:
        errors = unknown + [item for item in errors if item["type"] not in {"extra_forbidden", "missing"}]
    places = [item["loc"] for item in errors]
    # A list of one wrong entry is told to be empty as well.
    told = [
        _explain_one(item, document)
        for index, item in enumerate(errors)
        if item["loc"] not in places[:index]
        and not any(place[: len(item["loc"])] == item["loc"] != place for place in places)
    ]
    return told[0] if len(told) == 1 else SeveralErrors(told)


def key_path(loc: Loc) -> str:
    """Return ``outputs[0].kind`` for the path ("outputs", 0, "kind")."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def describe(value: Any) -> str:
    """Return a value of a run file in words."""
    match value:
        case bool() | None:
            return {True: "true", False: "false", None: "nothing (null)"}[value]
        case str():
            return f"the text {value!r}"
        case int() | float():
            return f"the number {value!r}"
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            return f"a mapping with the keys {', '.join(map(str, value)) or '(none)'}"
    return repr(value)


def _explain_one(item: ErrorDetails, document: YamlDocument) -> ConfigError:
    loc, kind, context = tuple(item["loc"]), item["type"], item.get("ctx", {})
    if kind == FAULT:
        return ConfigError(
            f"E0115 {context['what']}",
            where=document.place((*loc, *context["at"])),
            evidence=context["evidence"],
            remedy=context["remedy"],
        )
    if kind == "extra_forbidden":
        return _unknown_key(loc, document)
    if kind == "missing":
        parent, given = key_path(loc[:-1]), describe(reduce(getitem, loc[:-1], document.data))
        return ConfigError(
            f"E0116 {f'`{parent}`' if parent else 'the run file'} lacks the key '{loc[-1]}'",
            where=document.place(loc[:-1]),
            evidence=f"it has {given.removeprefix('a mapping with ')}",
            remedy=f"add `{loc[-1]}`: {_schema_at(loc).get('description', '')}",
        )
    wanted = f"`{key_path(loc)}` {_wanted(kind, loc, context)}"
    pattern = f"; the pattern is {context['pattern']}" if "pattern" in context else ""
    return ConfigError(
        f"E0113 {wanted if loc else 'a run file is a mapping of keys to values'}",
        where=document.place(loc),
        evidence=f"found {describe(item['input'])}{pattern}",
        remedy=_remedy(item, loc),
    )


def _wanted(kind: str, loc: Loc, context: dict[str, Any]) -> str:
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}"
    if kind in _ENUMS:
        return f"must be one of {', '.join(_schema_at(loc).get('enum', []))}"
    if kind == "string_pattern_mismatch":
        return "has the wrong form"
    return f"must be {_WANTED.get(kind, 'valid: ' + kind.replace('_', ' '))}"


def _remedy(item: ErrorDetails, loc: Loc) -> str:
    if item["type"] in _ENUMS and isinstance(item["input"], str):
        suggestion = nearest(item["input"], _schema_at(loc).get("enum", []))
        if suggestion:
            return suggestion
    # An entry of a list has no description of its own; the list has.
    for end in range(len(loc), 0, -1):
        if description := _schema_at(loc[:end]).get("description"):
            return f"`{key_path(loc[:end])}`: {description}"
    return f"the keys are {', '.join(_keys(()))}"


def _unknown_key(loc: Loc, document: YamlDocument) -> ConfigError:
    key, choices, parent = str(loc[-1]), _keys(loc[:-1]), key_path(loc[:-1])
    homes = [f"`{top}`" for top in _keys(()) if key in (_keys((top,)) or _keys((top, 0)))]
    suggestion = nearest(key, choices)
    if not suggestion and homes:
        suggestion = f"'{key}' belongs under {' or '.join(homes)}"
    return ConfigError(
        f"E0114 unknown key '{key}'" + (f" in `{parent}`" if parent else ""),
        where=document.place(loc),
        evidence=f"the keys here are {', '.join(choices)}",
        remedy=suggestion or "remove it, or correct its spelling",
    )


@cache
def _schema() -> dict[str, Any]:
    return run_file_schema()


def _deref(node: dict[str, Any]) -> dict[str, Any]:
    """Return the schema behind a reference or an optional, described by the field and not by its type."""
    outer = {key: node[key] for key in ("description",) if key in node}
    for choice in node.get("anyOf", []):
        if choice.get("type") != "null":
            return {**_deref(choice), **outer}
    if "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[1]
        target = {key: value for key, value in _schema()["$defs"][name].items() if key != "description"}
        return {**_deref(target), **outer}
    return node


def _schema_at(loc: Loc) -> dict[str, Any]:
    """Return the JSON Schema of the value at a path; empty for none."""
    node = _schema()
    for part in loc:
        node = _deref(node)
        if isinstance(part, int):
            node = node.get("items", {})
        else:
            extra = node.get("additionalProperties")
            node = node.get("properties", {}).get(part) or (extra if isinstance(extra, dict) else {})
    return _deref(node)


def _keys(loc: Loc) -> list[str]:
    return list(_schema_at(loc).get("properties", {}))

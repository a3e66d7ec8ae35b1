"""Turn pydantic errors into one message: what, where, evidence, remedy."""

from __future__ import annotations

from functools import cache, reduce
from operator import getitem
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from loka_onnx.config.fields import FAULT
from loka_onnx.config.schema import run_file_schema
from loka_onnx.config.yaml_tree import Document, Loc
from loka_onnx.errors import ConfigError, SeveralErrors, UserError, nearest

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


def explain(error: ValidationError, document: Document) -> UserError:
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


def _explain_one(item: ErrorDetails, document: Document) -> ConfigError:
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
        parent, found = key_path(loc[:-1]), describe(reduce(getitem, loc[:-1], document.data))
        return ConfigError(
            f"E0116 {f'`{parent}`' if parent else 'the run file'} lacks the key '{loc[-1]}'",
            where=document.place(loc[:-1]),
            evidence=f"it has {found.removeprefix('a mapping with ')}",
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


def _unknown_key(loc: Loc, document: Document) -> ConfigError:
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

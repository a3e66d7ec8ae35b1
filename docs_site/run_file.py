"""The page of the run file: every key with its type, default and meaning, from its types."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from docs_site.markdown import code, table
from docs_site.root_files import ROOT
from loka_onnx.config import run_file_schema

DEFINITIONS = "#/$defs/"
NAMES = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
}
BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}
FILLED_IN = {"name": "the file's own name", "output": "`runs/<name>`"}
"""Defaults that reading the file fills in (`loka_onnx.config.loading`)."""


@dataclass(frozen=True)
class Section:
    """One mapping of the run file.

    Attributes:
        path: Where it stands; a list of them ends in ``[]``.
        description: What it is.
        properties: Key → JSON Schema.
        required: Keys without a default.
    """

    path: str
    description: str
    properties: Mapping[str, Any]
    required: frozenset[str]


def run_file_page() -> str:
    """The page, as Markdown."""
    whole = run_file_schema()
    definitions: Mapping[str, Any] = whole["$defs"]
    parts = [
        "# Run file",
        "YAML. Unknown keys fail, values are never coerced, and relative paths start at the file's "
        "directory. "
        "`loka-onnx run RUN.yaml --set batch.max=512` replaces a value. The same as "
        "[JSON Schema](run-file-schema.json), for editors: `loka-onnx schema`.",
        "Keys in **bold** have no default and must be given.",
    ]
    for section in sections(whole, definitions):
        depth = "##" if section.path.count(".") == 0 else "###"
        parts += [f"{depth} {section.path or 'The file'}", section.description]
        rows = [
            (
                f"**{code(key)}**" if key in section.required else code(key),
                type_of(value, definitions, f"{section.path}.{key}".strip(".")),
                default_of(section, key),
                as_text(value.get("description", "")),
            )
            for key, value in section.properties.items()
        ]
        parts.append(table(("Key", "Type", "Default", "Meaning"), rows))
    parts += ["## An annotated file", _example()]
    return "\n\n".join(part for part in parts if part) + "\n"


def sections(whole: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Section]:
    """Every mapping, outer ones first, in the order of the keys."""
    descriptions = {name: value.get("description", "") for name, value in definitions.items()}
    yield Section("", "", whole["properties"], frozenset(whole["required"]))

    def walk(path: str, properties: Mapping[str, Any]) -> Iterator[Section]:
        for key, value in properties.items():
            for name, is_list in _held(value):
                held = definitions[name]
                if "properties" not in held:
                    continue
                below = f"{path}.{key}".strip(".") + ("[]" if is_list else "")
                yield Section(
                    below, descriptions[name], held["properties"], frozenset(held.get("required", ()))
                )
                yield from walk(below, held["properties"])

    yield from walk("", whole["properties"])


def _held(value: Mapping[str, Any], is_list: bool = False) -> Iterator[tuple[str, bool]]:
    if "$ref" in value:
        yield value["$ref"].removeprefix(DEFINITIONS), is_list
    for option in value.get("anyOf", ()):
        yield from _held(option, is_list)
    if isinstance(value.get("items"), dict):
        yield from _held(value["items"], True)


def type_of(value: Mapping[str, Any], definitions: Mapping[str, Any], path: str = "") -> str:
    """A JSON Schema in words; a mapping that has a section of its own is a link to it."""
    if "$ref" in value:
        held = definitions[value["$ref"].removeprefix(DEFINITIONS)]
        return f"[mapping](#{anchor(path)})" if "properties" in held else type_of(held, definitions, path)
    if "enum" in value or "const" in value:
        return ", ".join(code(str(choice)) for choice in value.get("enum", [value.get("const")]))
    if "anyOf" in value:
        return " or ".join(type_of(option, definitions, path) for option in value["anyOf"])
    if value.get("type") == "array":
        inner = value.get("items", {})
        return f"list of {type_of(inner, definitions, f'{path}[]')}" if inner else "list"
    if value.get("type") == "object":
        inner = value.get("additionalProperties")
        return f"mapping to {type_of(inner, definitions, path)}" if isinstance(inner, dict) else "mapping"
    return _single(value)


def _single(value: Mapping[str, Any]) -> str:
    name = "path" if value.get("format") == "path" else NAMES.get(str(value.get("type")), "any value")
    # A type's own bound beside the stricter one of a key says nothing.
    shown = [
        key for key in BOUNDS if key in value and value[key] != value.get(f"exclusive{key.capitalize()}")
    ]
    bounds = ", ".join(BOUNDS[key].format(f"{value[key]:,}") for key in shown)
    return f"{name} {bounds}".strip()


def anchor(path: str) -> str:
    """The id that a heading of this text gets."""
    return "".join(character for character in path.lower() if character.isalnum() or character in "_-")


def default_of(section: Section, key: str) -> str:
    """The default as YAML writes it; empty where the key must be given."""
    if not section.path and key in FILLED_IN:
        return FILLED_IN[key]
    value = section.properties[key]
    if key in section.required:
        return ""
    if "default" not in value:
        return "as below" if any(True for _ in _held(value)) else "empty"
    return code(json.dumps(value["default"], ensure_ascii=False))


def as_text(description: str) -> str:
    """A description of a field as it stands in the table, its placeholders kept from being read as HTML."""
    return re.sub(r"[\w/]*<\w+>[\w/]*", lambda match: code(match[0]), description)


def _example() -> str:
    return f"```yaml\n{(ROOT / 'examples' / 'every-key.yaml').read_text(encoding='utf-8')}```"

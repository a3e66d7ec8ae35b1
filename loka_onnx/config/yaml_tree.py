"""Read YAML into plain data with the line of every key and item.

Scalars follow the YAML 1.2 core schema, not PyYAML's 1.1: `no` is a word and not False, `2e-4` is a number
and not a string, `12:30` is not 750 and a date stays text. A repeated key is refused; PyYAML would silently
keep the last one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from loka_onnx.errors import ConfigError

Loc = tuple[str | int, ...]
"""Path of a value from the top of the document: keys and list indices."""

MAX_NODES = 100_000
"""Aliases of aliases grow exponentially; no run file written by a person comes near this."""


_CORE = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of the YAML 1.2 core schema."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    # More digits become a float, which no integer key takes; int() refuses thousands of digits.
    ("int", r"[-+]?[0-9]{1,18}", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"{_CORE}{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


@dataclass(frozen=True)
class YamlDocument:
    """Plain data of the file `source`, with ``file:line`` (`places`) of the key or list item at each path."""

    source: str
    data: Any
    places: dict[Loc, str] = field(default_factory=dict)

    def place(self, loc: Loc) -> str:
        """Return the line of a value; for a missing one, that of the nearest thing around it."""
        for end in range(len(loc), 0, -1):
            if loc[:end] in self.places:
                return self.places[loc[:end]]
        return self.source


def read_yaml(text: str, source: str) -> YamlDocument:
    """Parse one YAML document.

    Raises ConfigError if it is not YAML, repeats a key, has a key that is no string or a tag of a Python
    type, or contains itself.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            reader = _Reader(loader, source)
            data = None if node is None else reader.value(node, ())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            "E0106 the run file is not valid YAML",
            where=f"{source}:{mark.line + 1}" if mark else source,
            evidence=" ".join(part for part in (error.context, error.problem) if part),
            remedy="indent with spaces, and quote a text that holds ': ', ' #' or starts with one of *&!%@{[",
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            "E0107 the run file is not valid YAML",
            where=source,
            evidence=str(error).splitlines()[0],
            remedy="save it as plain UTF-8 text, nested no deeper than the schema asks",
        ) from error
    return YamlDocument(source, data, reader.places)


class _Reader:
    """Turns a node tree into plain data and collects the lines."""

    def __init__(self, loader: _Loader, source: str) -> None:
        self.places: dict[Loc, str] = {}
        self._resolve: Callable[..., str] = loader.resolve
        self._source = source
        self._nodes = 0
        self._open: set[int] = set()

    def _place(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, loc: Loc) -> Any:
        """The plain value of a node at a path."""
        self._nodes += 1
        if id(node) in self._open or self._nodes > MAX_NODES:
            raise ConfigError(
                "E0108 the run file repeats itself without end",
                where=self._place(node),
                evidence="an alias contains itself"
                if id(node) in self._open
                else f"more than {MAX_NODES} values",
                remedy="write the values out instead of using anchors and aliases",
            )
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in (f"{_CORE}map", f"{_CORE}seq"):
            raise self._bad_tag(node)
        self._open.add(id(node))
        result = self._mapping(node, loc) if isinstance(node, yaml.MappingNode) else self._items(node, loc)
        self._open.discard(id(node))
        return result

    def _items(self, node: yaml.Node, loc: Loc) -> list[Any]:
        for index, item in enumerate(node.value):
            self.places[(*loc, index)] = self._place(item)
        return [self.value(item, (*loc, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise ConfigError(
                    "E0109 a key must be a word",
                    where=self._place(key_node),
                    evidence=f"found {key_node.value!r}" if key is not None else "found a list or a mapping",
                    remedy="quote the key if it is meant as text",
                )
            here = (*loc, key)
            if key in result:
                raise ConfigError(
                    f"E0110 the key '{key}' is given twice",
                    where=self._place(key_node),
                    evidence=f"it already stands at {self.places[here]}",
                    remedy="keep one of the two",
                )
            self.places[here] = self._place(key_node)
            result[key] = self.value(value_node, here)
        return result

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        plain = node.style is None
        kind = self._resolve(yaml.ScalarNode, node.value, (plain, not plain))
        if node.tag not in (kind, f"{_CORE}str"):
            raise self._bad_tag(node)
        match node.tag.removeprefix(_CORE):
            case "null":
                return None
            case "bool":
                return node.value.lower() == "true"
            case "int":
                return int(node.value)
            case "float":
                return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise ConfigError(
                "E0111 the text is not Unicode",
                where=self._place(node),
                evidence=f"it holds half of a surrogate pair: {node.value!r}",
                remedy="write the character itself instead of its \\u escapes",
            )
        return node.value

    def _bad_tag(self, node: yaml.Node) -> ConfigError:
        return ConfigError(
            f"E0112 the tag '{node.tag}' does not fit or is not allowed here",
            where=self._place(node),
            evidence=f"it stands before {repr(node.value) if isinstance(node.value, str) else 'a group'}",
            remedy="a run file holds plain text, numbers, true, false and null; remove the tag",
        )

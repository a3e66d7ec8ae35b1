"""Protocol buffer text format, as far as model configurations need it.

Source: protobuf.dev, "Text Format Language Specification". Triton's messages themselves come with its client,
which a host that exports a bundle need not have; tests parse what is written here with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Union

_SPACES = 2


class Symbol(str):
    """Name of an enumerator, written without quotes."""

    __slots__ = ()


Value = Union[str, int, "Fields"]
"""A string, an enumerator (`Symbol`), a number, a flag, or the fields of a message."""
Fields = tuple[tuple[str, Value], ...]
"""A message: names and values; a repeated field stands several times."""


def entries(field: str, values: Mapping[str, Value]) -> Fields:
    """A field of type `map`, sorted by key."""
    return tuple((field, (("key", key), ("value", values[key]))) for key in sorted(values))


def render(fields: Fields) -> str:
    """A message as text, ending with a newline unless it is empty."""
    return "".join(f"{line}\n" for line in _lines(fields, 0))


def _lines(fields: Fields, depth: int) -> Iterator[str]:
    indent = " " * (_SPACES * depth)
    for name, group in itertools.groupby(fields, key=lambda field: field[0]):
        values = [value for _, value in group]
        if len(values) > 1 and not any(isinstance(value, tuple) for value in values):
            yield f"{indent}{name}: [{', '.join(map(_scalar, values))}]"
            continue
        for value in values:
            if not isinstance(value, tuple):
                yield f"{indent}{name}: {_scalar(value)}"
            elif not value:
                yield f"{indent}{name} {{}}"
            else:
                yield f"{indent}{name} {{"
                yield from _lines(value, depth + 1)
                yield f"{indent}}}"


def _scalar(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | Symbol):
        return str(value)
    return f'"{"".join(map(_escaped, str(value).encode()))}"'


def _escaped(byte: int) -> str:
    plain = chr(byte)
    if plain in {'"', "\\"}:
        return f"\\{plain}"
    return plain if plain.isascii() and plain.isprintable() else f"\\{byte:03o}"

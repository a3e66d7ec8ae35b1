"""Hostile values, and how one takes its place in a document."""

import copy
import json
from random import Random
from typing import Any

OUTSIDE = "outside"
"""Directory beside every input; nothing may read, write or remove what is in it."""

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 1000000, 100000000, 2**31, 2**63, 10**400, -(2**63) - 1),
    *(0.0, -0.0, 0.5, 1.0, 123.0, 1e300, 5e-324, -1e300, 0.9999999999999999, float("nan"), float("inf")),
    *("", "123", "x" * 300, "x" * 20000, "a\0b", "\ud800", "\u202eabc", "é" * 200, "/", ".", "..", "a/b"),
    *(
        f"../{OUTSIDE}/kept",
        f"../../{OUTSIDE}/kept",
        f"../../../{OUTSIDE}/kept",
        "/etc/hostname",
        "/dev/zero",
    ),
    *([], {}, [[]], [1, "a"], {"a": 1}, {"": {}}, ["x"] * 100),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of nested mappings and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [] if not at else [at]
    for key, inner in items:
        found += places(inner, (*at, key))
    return found


def put(document: Any, at: tuple[Any, ...], value: Any) -> None:
    """Give a key another value."""
    for key in at[:-1]:
        document = document[key]
    document[at[-1]] = value


def changed(random: Random, document: Any) -> Any:
    """A copy with one to three keys removed, added, exchanged, or given a hostile value."""
    document = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        known = places(document)
        if not known:
            return document
        at = random.choice(known)
        holder = document
        for key in at[:-1]:
            holder = holder[key]
        how = random.random()
        if how < 0.1:
            del holder[at[-1]]
        elif how < 0.2 and isinstance(holder, dict):
            key = random.choice([text for text in HOSTILE if isinstance(text, str)])
            holder[key] = holder.pop(at[-1]) if random.random() < 0.5 else random.choice(HOSTILE)
        elif how < 0.3 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[at[-1]]))
        elif how < 0.45:
            other = document
            for key in random.choice(known):
                try:
                    other = other[key]
                except (KeyError, IndexError, TypeError):
                    break
            holder[at[-1]] = copy.deepcopy(other)
        elif how < 0.6 and isinstance(holder[at[-1]], int | float) and not isinstance(holder[at[-1]], bool):
            holder[at[-1]] = random.choice((-1, 2, 0.5, 1e30)) * holder[at[-1]]
        else:
            holder[at[-1]] = copy.deepcopy(random.choice(HOSTILE))
    return document


def damaged(random: Random, data: bytes) -> bytes:
    """Bytes that are cut off, or of which some are changed, doubled or removed."""
    edited = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(edited)) if edited else 0
        match random.randrange(5):
            case 0:
                del edited[at:]
            case 1:
                edited[at : at + 1] = bytes([random.randrange(256)])
            case 2:
                edited[at:at] = edited[at : at + random.randrange(1, 200)]
            case 3:
                del edited[at : at + random.randrange(1, 200)]
            case _:
                edited[at : at + 8] = random.choice((b"\xff", b"\x00", b"\x7f")) * 8
    return bytes(edited)


def as_json(random: Random, document: Any) -> str:
    """The document as text; now and then damaged, nested without end, or with a key that stands twice."""
    text = json.dumps(document)
    match random.randrange(24):
        case 0:
            return damaged(random, text.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
        case 1:
            depth = random.choice((50, 900, 100000))
            return text[: len(text) // 2] + "[" * depth + "]" * depth + text[len(text) // 2 :]
        case 2:
            depth = random.choice((900, 100000))
            return '{"schema": "loka-onnx/run/1", "value": ' + "[" * depth + "]" * depth + "}"
        case 3:
            return text.replace("{", '{"schema": 1, ', 2)
    return text

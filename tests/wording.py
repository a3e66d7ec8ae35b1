"""Wording of errors, by room: ``python tests/wording.py`` writes the snapshots that the tests compare.

Each line is a code, the class and the sentence as its source has it. A changed sentence is reviewed in the
snapshot; tests of behaviour hold errors by class, code and `where`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from loka_onnx import errors

ROOT = Path(__file__).parents[1]
SNAPSHOTS = Path(__file__).parent / "wording"


@cache
def raised() -> tuple[tuple[str, str, str], ...]:
    """Return room, class and sentence of every error whose sentence stands where it is made."""
    return tuple(_raised())


def _raised() -> Iterator[tuple[str, str, str]]:
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type)} - {"InternalError"}
    for path in sorted((ROOT / "loka_onnx").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            what = node.args[0]
            is_text = isinstance(what, ast.JoinedStr) or isinstance(getattr(what, "value", None), str)
            if node.func.id in classes and is_text:
                room = path.relative_to(ROOT / "loka_onnx").parts[0].removesuffix(".py")
                yield room, node.func.id, ast.unparse(what).removeprefix("f")[1:-1]


def snapshots() -> dict[str, str]:
    """Return the text of each room's snapshot."""
    lines: dict[str, list[str]] = {}
    for room, kind, sentence in raised():
        code, _, rest = sentence.partition(" ")
        lines.setdefault(room, []).append(f"{code} {kind}: {rest}\n")
    return {room: "".join(sorted(texts)) for room, texts in lines.items()}


def repeated() -> list[str]:
    """Return codes that two places share, and sentences without a code."""
    sentences = [sentence for _, _, sentence in raised()]
    counts = Counter(sentence.split(" ")[0] for sentence in sentences)
    return [code for code, count in counts.items() if count > 1 or not errors.CODE.match(f"{code} ")]


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for old in SNAPSHOTS.glob("*.txt"):
        old.unlink()
    for room_name, text in snapshots().items():
        (SNAPSHOTS / f"{room_name}.txt").write_text(text, encoding="utf-8")

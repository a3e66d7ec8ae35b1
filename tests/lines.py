"""Count lines of the library by package, of docstrings, tests and docs: ``python tests/lines.py [ROOT]``."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_lines(source: str) -> int:
    """Return how many lines the docstrings of a module take."""
    bodies = (node.body for node in ast.walk(ast.parse(source)) if isinstance(node, NODES))
    docs = (body[0] for body in bodies if body and isinstance(body[0], ast.Expr))
    values = (
        doc.value for doc in docs if isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    )
    return sum((value.end_lineno or 0) - value.lineno + 1 for value in values)


def main(root: Path) -> None:
    """Print a table."""
    lines, docs, files = Counter[str](), Counter[str](), Counter[str]()
    for path in sorted((root / "loka_onnx").rglob("*.py")):
        source, parts = path.read_text("utf-8"), path.relative_to(root / "loka_onnx").parts
        name = parts[0] if len(parts) > 1 else "(top)"
        lines[name] += len(source.splitlines())
        docs[name] += docstring_lines(source)
        files[name] += 1
    for counter, rows in ((lines, lines.most_common()), (docs, []), (files, [])):
        counter["library"] = counter.total()
        for name, count in rows:
            print(f"{count:7} {docs[name]:7} {files[name]:5}  {name}")
    print(f"{lines['library']:7} {docs['library']:7} {files['library']:5}  library")
    for name, pattern in (
        ("tests", "tests/**/*.py"),
        ("docs", "docs/**/*.md"),
        ("loka_zoo", "loka_zoo/*.py"),
    ):
        found = list(root.glob(pattern))
        print(f"{sum(len(p.read_text('utf-8').splitlines()) for p in found):7} {'':7} {len(found):5}  {name}")


if __name__ == "__main__":
    print("  lines docstr files")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])

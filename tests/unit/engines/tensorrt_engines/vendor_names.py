"""Finds, without running it, every name that a source file takes of TensorRT's values.

A value is the vendor's when it is a parameter or a field annotated `Any`, what `load_library` of the spec
returns, or what is taken of or returned by such a value; the files that talk to TensorRT annotate nothing
else `Any`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Names:
    """What a file takes.

    Attributes:
        used: Every name.
        unguarded: Those taken somewhere in a function that does not ask for them first, by `hasattr` or by
            `getattr` with a default.
    """

    used: set[str] = field(default_factory=set)
    unguarded: set[str] = field(default_factory=set)


def names_in(source: str) -> Names:
    """What a file takes of vendor values."""
    tree = ast.parse(source)
    found = Names()
    attributes = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_any(node.annotation)
    }
    # Twice: a method may use what a later one assigns to `self`.
    for _ in range(2):
        for function in (node for node in tree.body if isinstance(node, FUNCTIONS)):
            _Function(function, attributes, set(), found)
        for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for function in (node for node in owner.body if isinstance(node, FUNCTIONS)):
                _Function(function, attributes, set(), found)
    return found


def _is_any(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


class _Function(ast.NodeVisitor):
    def __init__(self, node: FUNCTIONS, attributes: set[str], outer: set[str], found: Names) -> None:
        self.attributes, self.found = attributes, found
        arguments = [*node.args.args, *node.args.kwonlyargs]
        self.values = outer | {argument.arg for argument in arguments if _is_any(argument.annotation)}
        self.guarded = {name for name, is_safe in _asked(node) if is_safe}
        for statement in node.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        _Function(node, self.attributes, set(self.values), self.found)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            self.visit(base)
        for function in (child for child in node.body if isinstance(child, FUNCTIONS)):
            _Function(function, self.attributes, set(self.values), self.found)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._assign(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._assign(node.target, node.iter)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._is_vendor(node.value) and not node.attr.startswith("__"):
            self._take(node.attr, is_guarded=node.attr in self.guarded)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for name, is_safe in _asked(node, deep=False):
            if self._is_vendor(node.args[0]) and not name.startswith("__"):
                self._take(name, is_guarded=is_safe)
        self.generic_visit(node)

    def _take(self, name: str, *, is_guarded: bool) -> None:
        self.found.used.add(name)
        if not is_guarded:
            self.found.unguarded.add(name)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            several = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for one, its in zip(target.elts, several, strict=True):
                self._assign(one, its)
        elif self._is_vendor(value):
            if isinstance(target, ast.Name):
                self.values.add(target.id)
            elif isinstance(target, ast.Attribute):
                self.attributes.add(target.attr)

    def _is_vendor(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self.values
            case ast.Attribute(attr=name, value=value):
                return name in self.attributes or self._is_vendor(value)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, *_]) | ast.Subscript(value=value):
                return self._is_vendor(value)
            case ast.Call(func=ast.Attribute(attr="load_library")):
                return True
            case ast.Call(func=value):
                return self._is_vendor(value)
        branches = (node.body, node.orelse) if isinstance(node, ast.IfExp) else ()
        return any(self._is_vendor(branch) for branch in branches)


def _asked(node: ast.AST, *, deep: bool = True) -> Iterator[tuple[str, bool]]:
    """Names that `hasattr` and `getattr` are called with, and whether their absence is provided for."""
    for call in ast.walk(node) if deep else [node]:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and len(call.args) > 1:
            name = call.args[1]
            if call.func.id in {"hasattr", "getattr"} and isinstance(name, ast.Constant):
                yield str(name.value), call.func.id == "hasattr" or len(call.args) > 2

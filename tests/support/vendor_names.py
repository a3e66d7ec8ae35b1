"""Names of a vendor's library that a module uses."""

import ast
from collections.abc import Set


def attributes(tree: ast.AST, values: Set[str]) -> set[str]:
    """Attributes of variables that hold a vendor's value, or of what such an attribute is or returns."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not node.attr.startswith("_"):
            root = node.value
            while isinstance(root, ast.Attribute | ast.Call) and getattr(root, "attr", "") not in values:
                root = root.func if isinstance(root, ast.Call) else root.value
            if getattr(root, "id", getattr(root, "attr", "")) in values:
                found.add(node.attr)
    return found

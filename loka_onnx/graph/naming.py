"""Stable site names.

The exporter's own node names (`node_linear_3`) shift whenever the model changes. Stable are the module path
that PyTorch's exporter writes into each node's metadata (`pkg.torch.onnx.name_scopes`) or, for other
producers, a node name with a path, or the name of the weight.

A name is the path of the innermost module. Where one module holds several products, the name of the weight
(`interaction.left`) or the product's ordinal in that module (`interaction.matmul_1`) is added: an edit
elsewhere in the model moves neither.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, count

import onnx

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
CLASS_HIERARCHY = "pkg.torch.onnx.class_hierarchy"

_WEIGHT_SUFFIX = re.compile(r"[./](weight|kernel|W)(:0)?$")
_MOST_NAMED = 4
_MOST_METADATA = 10_000
_GENERATED = re.compile(r"^(onnx::|node_)?[A-Za-z]+(_\d+)+$|^n\d+$|^\d+$")


def name_sites(graph: onnx.GraphProto, sites: Iterable[int]) -> dict[int, str]:
    """Return a unique, stable name for each site node, by node index."""
    initializers = {tensor.name for tensor in graph.initializer}
    bases = {index: module_path(graph.node[index]) for index in sites}
    counts = Counter(bases.values())
    names: dict[int, str] = {}
    taken: set[str] = set()
    ordinals: defaultdict[str, int] = defaultdict(int)
    for index, base in bases.items():
        node, name = graph.node[index], base
        if not base or counts[base] > 1 or _is_container(node):
            leaf = _weight_leaf(node, initializers, base)
            if not leaf:
                kind = node.op_type.lower()
                key = f"{base}/{kind}"
                leaf = kind if ordinals[key] == 0 else f"{kind}_{ordinals[key]}"
                ordinals[key] += 1
            name = f"{base}.{leaf}" if base else leaf
        names[index] = unused(name, taken)
        taken.add(names[index])
    return names


def module_path(node: onnx.NodeProto) -> str:
    """Return the path of the node's innermost module; empty when unknown."""
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    scopes = _listed(metadata.get(NAME_SCOPES, ""))
    if scopes is not None:
        return scopes[-2] if len(scopes) > 1 else ""
    # The name may be a path, such as ``/over_arch/fc2/MatMul`` or ``model/dense/MatMul``.
    parts = [part for part in node.name.split("/") if part]
    if len(parts) > 1:
        return ".".join(parts[:-1])
    return "" if not parts or _GENERATED.match(parts[0]) else parts[0]


def merged_name(names: Sequence[str]) -> str:
    """Return the name of a merged site: the common prefix, then the rest of each, counted beyond four, as
    ``attention.query+key+value`` and ``experts.0.fc1+63_more``.
    """
    parts = [name.split(".") for name in dict.fromkeys(names)]
    shared = 0
    while all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    leaves = [".".join(part[shared:]) for part in parts]
    if len(leaves) > _MOST_NAMED:
        leaves = [leaves[0], f"{len(leaves) - 1}_more"]
    return ".".join([*parts[0][:shared], "+".join(leaves)])


def _is_container(node: onnx.NodeProto) -> bool:
    """True if the node's innermost module is not itself a linear or a norm layer. Then the weight's name is
    added, so that a second product added later does not rename the first.
    """
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    classes = _listed(metadata.get(CLASS_HIERARCHY, ""))
    if classes is None:
        return False
    innermost = classes[-2] if len(classes) > 1 else ""
    return not innermost.startswith("torch.nn.modules.")


def _listed(text: str) -> list[str] | None:
    """Return the list of texts that PyTorch's exporter writes as Python; None for anything else."""
    try:
        names = ast.literal_eval(text[:_MOST_METADATA])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _weight_leaf(node: onnx.NodeProto, initializers: set[str], base: str) -> str:
    """Return the constant operand's name relative to the module, without ``.weight``."""
    for name in node.input[:2]:
        if name in initializers:
            leaf = _WEIGHT_SUFFIX.sub("", name)
            if base and leaf.startswith(f"{base}."):
                return leaf[len(base) + 1 :]
            if leaf == base or _GENERATED.match(leaf):
                return ""
            return leaf if not base else leaf.rsplit(".", 1)[-1]
    return ""


def unused(base: str, taken: Collection[str]) -> str:
    """Return a name that is not taken: `base`, or with an ordinal."""
    return next(name for name in chain([base], (f"{base}_{n}" for n in count(1))) if name not in taken)

"""Cut a model at its embeddings into a lookup model and a dense model.

    model(ids, numeric)   =   dense(lookup(ids), numeric)

A lookup is a Gather of rows from a constant table. The nodes that compute its ids go with it, and so does the
pooling of a bag of ids: a reduction of looked-up rows, with masks and weights that only ids decide. No
computation changes, so the halves give the bits of the whole; `verify_split` checks that on data.

Where the dense part needs the number of rows, it reads it off a cut tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.core.artifact import ModelArtifact, TensorSpec
from loka_onnx.core.rewrite import Declined, Halves
from loka_onnx.errors import InternalError
from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type, is_constant, shape_of
from loka_onnx.graph.products import other_products
from loka_onnx.graph.shape_values import tensor_spec
from loka_onnx.graph.sites import find_sites, is_site
from loka_onnx.graph.storage import model_digest
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.linears.pattern import constant_at

Arrays = Mapping[str, npt.NDArray[Any]]

LOOKUP_FILE, DENSE_FILE = "lookup.onnx", "dense.onnx"
"""Files of the halves in the directory of `verify_split`."""

_T = onnx.TensorProto
_FLOATS = frozenset({_T.FLOAT, _T.FLOAT16, _T.BFLOAT16, _T.DOUBLE})
_POOLS = frozenset({"ReduceSum", "ReduceMean", "ReduceMax"})
_MASKS = frozenset(
    {"Mul", "Div", "Add", "Sub", "Where", "Max", "Clip", "Cast", "Unsqueeze"}
    | {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not"}
)
"""Operators allowed between a lookup, or the ids, and the pooling."""


@dataclass(frozen=True)
class SparseSplit:
    """The two halves of a model, and the tensors between them, named after the modules that look them up.

    `lookup` takes the ids; `dense` takes the numeric inputs, then the cut tensors.
    """

    lookup: GraphModel
    dense: GraphModel
    cut: tuple[TensorSpec, ...]


class _Whole(Exception):
    """The model cannot be cut; arguments: where, and why."""


def split_sparse(model: GraphModel) -> SparseSplit | Declined:
    """Cut a copy of a canonical graph, its types and shapes inferred, at its lookups; or say why it stays."""
    try:
        return _split(model.copy())
    except _Whole as reason:
        return Declined(*reason.args)


def verify_split(split: SparseSplit, whole: Path, rows: Sequence[Arrays], directory: Path) -> Declined | None:
    """Write both halves and run them in sequence; None if outputs have the bits of the whole, else why."""
    options = SessionOptions(optimize=False)
    split.lookup.save(directory / LOOKUP_FILE)
    split.dense.save(directory / DENSE_FILE)
    lookup, dense = (OnnxSession(directory / name, options) for name in (LOOKUP_FILE, DENSE_FILE))
    reference = OnnxSession(whole, options)
    for number, batch in enumerate(rows):
        looked_up = lookup.run(batch)
        size = len(next(iter(batch.values())))
        for name, values in looked_up.items():
            if len(values) != size:
                return Declined(name, f"it has {len(values)} rows for a batch of {size}")
        before = reference.run(batch)
        after = dense.run({**batch, **looked_up})
        for name, values in before.items():
            if values.tobytes() != after[name].tobytes():
                moved = np.abs(values.astype(np.float64) - after[name].astype(np.float64)).max()
                reason = f"the halves move it by up to {moved:.3g} in batch {number} of {len(rows)}"
                return Declined(name, reason)
    return None


def describe_halves(split: SparseSplit, whole: ModelArtifact, directory: Path) -> Halves:
    """Return the halves that `verify_split` has written; InternalError if sites of the whole are lost."""
    specs = {spec.name: spec for spec in (*whole.inputs, *split.cut)}

    merged = {site.name: site.merged_from for site in whole.sites}

    def half(graph: GraphModel, name: str, outputs: tuple[TensorSpec, ...]) -> ModelArtifact:
        path, written = directory / name, GraphModel.read_back(graph.export())
        inputs = tuple(specs[tensor.name] for tensor in graph.inputs)
        sites, others = find_sites(written, merged), other_products(written)
        made = replace(whole, path=path, digest=model_digest(path), sites=sites, other_products=others)
        return replace(made, inputs=inputs, outputs=outputs)

    dense = half(split.dense, DENSE_FILE, whole.outputs)
    lost = {site.name for site in whole.sites} ^ {site.name for site in dense.sites}
    if lost:
        raise InternalError("the dense half has other sites than the whole", evidence=", ".join(sorted(lost)))
    return Halves(half(split.lookup, LOOKUP_FILE, split.cut), dense, split.cut)


def _split(model: GraphModel) -> SparseSplit:
    sparse = _sparse_nodes(model)
    cut = _cut_tensors(model, sparse)
    _count_rows_in(model, sparse, cut)
    taken_in = [t for t in model.inputs if any(id(node) in sparse for node in t.outputs)]
    for tensor in filter(_is_integer, taken_in):
        for node in tensor.outputs:
            if id(node) not in sparse:
                raise _Whole(node.name, f"it reads the ids '{tensor.name}', and is no lookup")
    for tensor in cut:
        module = str(tensor.inputs[0].name)
        tensor.name = model.fresh_name(module.rpartition("/")[0] or module)
    specs = tuple(tensor_spec(tensor) for tensor in cut)
    numeric = [t for t in model.inputs if any(id(node) not in sparse for node in t.outputs)]
    return SparseSplit(model.extract(taken_in, cut), model.extract([*numeric, *cut], model.outputs), specs)


def _sparse_nodes(model: GraphModel) -> dict[int, Node]:
    """Return lookups, the nodes of their ids and the pooling behind them, by identity."""
    lookups = [node for node in model.nodes if _is_lookup(model, node)]
    if not lookups:
        raise _Whole("model", "it has no lookup: no Gather reads rows of a constant table by ids")
    for lookup in lookups:
        table = lookup.inputs[0]
        for reader in table.outputs:
            if not _is_lookup(model, reader) or reader.inputs[0] is not table:
                raise _Whole(reader.name, f"it reads the table '{table.name}', and is no lookup")
    sparse = _with_makers(lookups)
    for node in filter(is_site, sparse.values()):
        raise _Whole(node.name, "ids of a lookup come out of this layer")
    return sparse | _pooling(model, sparse)


def _with_makers(nodes: Iterable[Node], within: Mapping[int, Node] | None = None) -> dict[int, Node]:
    """Return nodes and those that make their inputs, directly or not, by identity; of some nodes only."""
    kept: dict[int, Node] = {}
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if id(node) not in kept:
            kept[id(node)] = node
            makers = (maker for tensor in node.inputs for maker in tensor.inputs)
            pending += [maker for maker in makers if within is None or id(maker) in within]
    return kept


def _is_lookup(model: GraphModel, node: Node) -> bool:
    if node.op != "Gather" or int(node.attrs.get("axis", 0)) != 0 or is_constant(node.inputs[1]):
        return False
    table = node.inputs[0]
    is_table = model.is_table(table) or (is_constant(table) and element_type(table.dtype) in _FLOATS)
    return bool(is_table and len(table.shape or ()) == 2)


def _pooling(model: GraphModel, sparse: Mapping[int, Node]) -> dict[int, Node]:
    """Return reductions of looked-up rows by masks and weights of ids, and the nodes between."""
    known = {id(tensor) for node in sparse.values() for tensor in node.outputs}
    known |= {id(t) for t in model.inputs if any(id(node) in sparse for node in t.outputs)}
    joined: dict[int, Node] = {}
    for node in model.sorted_nodes():
        if id(node) in sparse or node.op not in _POOLS | _MASKS:
            continue
        if all(id(t) in known or is_constant(t) or not t.name for t in node.inputs):
            joined[id(node)] = node
            known |= {id(tensor) for tensor in node.outputs}
    return _with_makers((node for node in joined.values() if node.op in _POOLS), joined)


def _cut_tensors(model: GraphModel, sparse: Mapping[int, Node]) -> list[Tensor]:
    """Return tensors of the lookup part that the dense part reads, in the order of the nodes."""
    cut: list[Tensor] = []
    for node in (node for node in model.sorted_nodes() if id(node) in sparse):
        for tensor in node.outputs:
            if model.is_output(tensor):
                raise _Whole(node.name, f"its result '{tensor.name}' leaves the graph")
            readers = [n for n in tensor.outputs if id(n) not in sparse and not _counts_rows(n)]
            if not readers:
                continue
            if not _is_lookup(model, node) and node.op not in _POOLS:
                what = f"it reads '{tensor.name}', which is made of ids, and is no lookup"
                raise _Whole(readers[0].name, what)
            if tensor.dtype is None or tensor.shape is None:
                raise _Whole(node.name, f"type or shape of its result '{tensor.name}' is not known")
            shape = tensor_spec(tensor).shape
            if not shape or shape[0] is not None or None in shape[1:]:
                raise _Whole(
                    node.name,
                    f"its result '{tensor.name}' has shape {list(tensor.shape)}: an engine takes the batch "
                    "on axis 0 and fixed sizes on the others",
                )
            cut.append(tensor)
    if not cut:
        raise _Whole("model", "nothing but lookups reads what is looked up")
    return cut


def _counts_rows(node: Node) -> bool:
    """Return whether a Shape is read for the length of axis 0 alone."""
    if node.op != "Shape" or int(node.attrs.get("start", 0)) != 0:
        return False
    if int(node.attrs.get("end", 0)) == 1:
        return True
    readers = node.outputs[0].outputs
    positions = [constant_at(reader, 1) if reader.op == "Gather" else None for reader in readers]
    return bool(readers) and all(each is not None and not each.any() for each in positions)


def _count_rows_in(model: GraphModel, sparse: Mapping[int, Node], cut: Sequence[Tensor]) -> None:
    """Let the dense part count the rows of a cut tensor instead of those of the ids."""
    of_ids = [t for t in model.inputs if any(id(node) in sparse for node in t.outputs) and _is_integer(t)]
    of_ids += [t for node in sparse.values() for t in node.outputs]
    held = {id(tensor) for tensor in cut}
    for tensor in of_ids:
        for node in list(tensor.outputs):
            has_rows = tensor.shape is not None and shape_of(tensor)[:1] == shape_of(cut[0])[:1]
            if id(node) not in sparse and id(tensor) not in held and _counts_rows(node) and has_rows:
                node.inputs[0] = cut[0]


def _is_integer(tensor: Tensor) -> bool:
    return element_type(tensor.dtype) not in _FLOATS

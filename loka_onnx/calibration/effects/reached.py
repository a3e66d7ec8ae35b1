"""A switchable model in parts, of which a switch runs again only those that it reaches.

Nodes behind the same set of switches are one part, a file and a session of its own. Along an edge sets only
grow, so parts have an order. A batch runs exact once, and its tensors are kept: under a switch, parts that it
does not reach would repeat them. Of parallel towers a site reruns its own, and what is behind all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import onnx

from loka_onnx.calibration.effects.switchable import SWITCHES, Arrays, SwitchableFile
from loka_onnx.graph.detached import add_inferred_shapes
from loka_onnx.sessions.model_files import FLOAT8_TYPES, read_model, reads_of
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions, holds_float8

_CROSSING = {onnx.TensorProto.UNDEFINED, onnx.TensorProto.BFLOAT16, *FLOAT8_TYPES}
"""Types of tensors that do not pass between sessions."""


@dataclass(frozen=True)
class Part:
    """Nodes of a switchable model that the same `switches` reach, in a file; `outputs` are read elsewhere."""

    path: Path
    switches: frozenset[int]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """Parts of a switchable model in the order that they run in, picklable."""

    file: SwitchableFile
    parts: tuple[Part, ...]
    optimize: bool

    def open(self) -> PartedModel:
        """Load the parts."""
        return PartedModel(self)


class PartedModel:
    """Sessions of the parts, each of one thread."""

    def __init__(self, whole: Parts) -> None:
        options = SessionOptions(threads=1, optimize=whole.optimize)
        self._switches = len(whole.file.sites)
        self._sessions = [(part, OnnxSession(part.path, options)) for part in whole.parts]

    def run_each(
        self, inputs: Arrays, units: Sequence[Collection[int]], outputs: Sequence[str]
    ) -> Iterator[Arrays]:
        """Yield outputs of the exact model, then with the switches of each unit on, by their positions."""
        exact: Arrays = inputs
        for on in ((), *units):
            vector = np.zeros(self._switches, dtype=np.bool_)
            vector[[*on]] = True
            values = {**exact, SWITCHES: vector}
            for part, session in self._sessions:
                if exact is inputs or not part.switches.isdisjoint(on):
                    values |= session.run(values, part.outputs)
            exact = values if exact is inputs else exact
            yield {name: values[name] for name in outputs}


def write_parts(file: SwitchableFile, outputs: Collection[str]) -> Parts:
    """Write the parts that compute `outputs` beside a switchable model; one, the model itself, where a tensor
    between parts could not pass.
    """
    model = read_model(file.path)
    optimize = not holds_float8(model)
    # ONNX Runtime fuses by shapes, and a part alone tells less of them.
    add_inferred_shapes(model)
    graph = model.graph
    groups = _groups(graph, file.conditions, outputs)
    types = {info.name: info for info in (*graph.value_info, *graph.input, *graph.output)}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    reads = {switches: {*reads_of(nodes)} for switches, nodes in groups.items()}
    readers = Counter(chain(outputs, *reads.values()))
    parts = []
    for number, (switches, nodes) in enumerate(sorted(groups.items(), key=lambda group: len(group[0]))):
        made = [name for node in nodes for name in node.output]
        read = sorted(reads[switches] - {*made, ""})
        given = [name for name in read if name in types and name not in weights]
        left = [name for name in made if readers[name] > (name in reads[switches])]
        if any(n not in types or types[n].type.tensor_type.elem_type in _CROSSING for n in (*given, *left)):
            whole = Part(file.path, frozenset(range(len(file.sites))), tuple(outputs))
            return Parts(file, (whole,), optimize)
        part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
        part.functions.extend(model.functions)
        part.graph.name = "part"
        part.graph.node.extend(nodes)
        part.graph.initializer.extend(weights[name] for name in read if name in weights)
        part.graph.input.extend(types[name] for name in given)
        part.graph.output.extend(types[name] for name in left)
        part.graph.value_info.extend(types[name] for name in made if name in types and name not in left)
        path = file.path.with_suffix(f".{number}.onnx")
        path.write_bytes(part.SerializeToString())
        parts.append(Part(path, switches, tuple(left)))
    return Parts(file, tuple(parts), optimize)


def _groups(
    graph: onnx.GraphProto, conditions: Sequence[str], outputs: Collection[str]
) -> dict[frozenset[int], list[onnx.NodeProto]]:
    """Return the nodes that outputs need, by the switches that reach them; a condition is with its reader."""
    needed, nodes = {*outputs}, list[onnx.NodeProto]()
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed |= {*reads_of([node])}
            nodes.append(node)
    reach = {name: frozenset({position}) for position, name in enumerate(conditions)}
    makers = {node.output[0]: node for node in nodes if node.output[0] in reach}
    groups: dict[frozenset[int], list[onnx.NodeProto]] = {}
    for node in reversed(nodes):
        if node.output[0] not in makers:
            reads = dict.fromkeys(reads_of([node]))
            switches = frozenset[int]().union(*(reach[name] for name in reads if name in reach))
            reach |= dict.fromkeys(node.output, switches)
            groups.setdefault(switches, []).extend((*(makers[n] for n in reads if n in makers), node))
    return groups

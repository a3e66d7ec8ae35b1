"""A switchable model in parts, of which a switch runs again only those that it reaches.

Nodes behind the same set of switches are one part, a file and a session of its own. Along an edge sets only
grow, so parts have an order. A batch runs exact once, and its tensors are kept: under a switch, parts that it
does not reach would repeat them. Of parallel towers a site reruns its own, and what is behind all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
import onnx

from loka_onnx.calibration.effects.switchable import SWITCHES, Arrays, SwitchableFile
from loka_onnx.graph.detached import add_inferred_shapes
from loka_onnx.sessions.model_files import FLOAT8_TYPES, read_model, reads_of
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

Units = Sequence[Collection[int]]
"""Positions of switches that are on together."""
_NOT_PASSED = {onnx.TensorProto.UNDEFINED, onnx.TensorProto.BFLOAT16, *FLOAT8_TYPES}
"""Types of tensors that do not pass between sessions."""
_MOST_PASSED = 1 << 18
"""Most elements per row that pass between parts, which keep them: 2 GiB for 2,048 rows in FP32."""


@dataclass(frozen=True)
class Parts:
    """Files of parts in the order that they run in, with the switches of `whole` that reach their nodes."""

    whole: SwitchableFile
    reached_by: Mapping[Path, frozenset[int]]

    def open(self) -> Callable[[Arrays, Units, Sequence[str]], Iterator[Arrays]]:
        """Load the parts. The function yields outputs, exact and then with each unit of switches on."""
        sessions = [
            (OnnxSession(path, SessionOptions(threads=1)), on) for path, on in self.reached_by.items()
        ]
        positions = np.arange(len(self.whole.sites))

        def run_each(inputs: Arrays, units: Units, outputs: Sequence[str]) -> Iterator[Arrays]:
            exact: Arrays = {}
            for on in ((), *units):
                values = {**inputs, **exact, SWITCHES: np.isin(positions, [*on])}
                for session, switches in sessions:
                    if not exact or not switches.isdisjoint(on):
                        values |= session.run(values)
                exact = exact or values
                yield {name: values[name] for name in outputs}

        return run_each


def write_parts(whole: SwitchableFile) -> Parts:
    """Write the parts beside the model; one, the model itself, where tensors could not pass."""
    model = read_model(whole.path)
    # ONNX Runtime fuses by shapes, and a part alone tells less of them.
    add_inferred_shapes(model)
    types = {info.name: info for info in (*model.graph.value_info, *model.graph.input, *model.graph.output)}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    groups = _groups(model.graph, whole.conditions)
    reads = {switches: {*reads_of(nodes)} for switches, nodes in groups.items()}
    readers = Counter(chain(whole.outputs, *reads.values()))
    files: dict[Path, frozenset[int]] = {}
    elements = 0
    for switches in sorted(groups, key=len):
        made = [name for node in groups[switches] for name in node.output]
        read = sorted(reads[switches] - {*made})
        given = [types[name] for name in read if name in types and name not in weights]
        left = [name for name in made if readers[name] > (name in reads[switches])]
        passed = [types.get(name, onnx.ValueInfoProto()) for name in left]
        elements += sum(prod(d.dim_value or 1 for d in info.type.tensor_type.shape.dim) for info in passed)
        is_passed = all(info.type.tensor_type.elem_type not in _NOT_PASSED for info in (*given, *passed))
        if not is_passed or elements > _MOST_PASSED:
            return Parts(whole, {whole.path: frozenset(range(len(whole.sites)))})
        constants = [weights[name] for name in read if name in weights]
        inner = [types[name] for name in made if name in types and name not in left]
        graph = onnx.helper.make_graph(groups[switches], "part", given, passed, constants, value_info=inner)
        known = {"opset_imports": model.opset_import, "functions": model.functions}
        part = onnx.helper.make_model(graph, ir_version=model.ir_version, **known)
        path = whole.path.with_suffix(f".{len(files)}.onnx")
        path.write_bytes(part.SerializeToString())
        files[path] = switches
    return Parts(whole, files)


def _groups(graph: onnx.GraphProto, conditions: Sequence[str]) -> dict[frozenset[int], list[onnx.NodeProto]]:
    """Return the nodes by the switches that reach them; a condition is with its reader."""
    reach = {name: frozenset({position}) for position, name in enumerate(conditions)}
    makers = {node.output[0]: node for node in graph.node if node.output[0] in reach}
    groups: dict[frozenset[int], list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.output[0] not in makers:
            reads = dict.fromkeys(reads_of([node]))
            switches = frozenset[int]().union(*(reach[name] for name in reads if name in reach))
            reach |= dict.fromkeys(node.output, switches)
            groups.setdefault(switches, []).extend((*(makers[n] for n in reads if n in makers), node))
    return groups

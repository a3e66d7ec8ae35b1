"""INT8 products that take longer here than in FP32, which an engine of the CPU provider then has in FP32.

A QuantizeLinear may cost more than its product saves: with few columns, or behind a wide activation that
nothing else reads in INT8. Both forms are timed on the sample, at the served batch sizes, with the threads
that an engine has by default.

A unit is a model of its own: products that are connected by quantized tensors, with their Q/DQ, biases and
ReLUs. ONNX Runtime fuses a Q into the INT8 product in front of it, so that a chain is one unit. Products that
read one tensor are in INT8 together, or not at all. First each variant of a unit has one such tensor less;
then those that were faster are left out together, and so are all of them.

Weights keep their INT8 values, which ONNX Runtime multiplies by their scales when it loads the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from loka_onnx.engines.draft import attribute
from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.engines.onnxruntime.cpu_form import IntegerProducts
from loka_onnx.sessions.model_files import reads_of
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Arrays

ROUNDS, SECONDS = 20, 0.5
"""Calls of each variant at each batch size, in turns, of which the fastest counts, as other work only adds to
it; seconds after which a batch size gets no further round."""
MARGIN = 0.02
"""Relative difference of times that counts for nothing: the products stay in INT8."""

Names = frozenset[str]
Times = dict[int, float]
"""Microseconds of a call by batch size."""
Rows = Mapping[int, Arrays]
"""Inputs of a unit by batch size."""


class FasterProducts:
    """INT8 products of a model that is `engine` on disk, before `IntegerProducts`."""

    def __init__(self, model: onnx.ModelProto, engine: Path) -> None:
        self._model, self._engine, self._reader = model, engine, OperandReader(engine)
        self._nodes = list(model.graph.node)
        self._stored = {tensor.name for tensor in model.graph.initializer}
        self._timed: dict[str, list[Times]] = {}

    def slower(self, sample: Arrays, sizes: Sequence[int]) -> dict[str, str]:
        """Return the products that are slower than in FP32, with their times in words."""
        slower: dict[str, str] = {}
        units = self._units()
        read = Names().union(*(self._read(nodes) for nodes, _ in units))
        rows = {size: self._values(read - sample.keys(), sample, size) for size in sizes}
        for nodes, by_tensor in units:
            times = self._race(nodes, rows, by_tensor.values())
            if len(by_tensor) > 1:
                wins = (sites for sites, each in times.items() if _is_faster(each, times[Names()]))
                times = self._race(nodes, rows, [Names().union(*wins), Names().union(*by_tensor.values())])
            best = min(times, key=lambda sites: _per_row(times[sites]))
            if _is_faster(times[best], times[Names()]):
                note = f"{_in_words(times[Names()])} with it in INT8, {_in_words(times[best])} without"
                slower |= dict.fromkeys(sorted(best), note)
        return slower

    def _units(self) -> list[tuple[Names, dict[str, Names]]]:
        """Return outputs of the nodes of each unit, and its products by the quantized tensor."""
        products = IntegerProducts(self._model, self._reader)
        units: list[tuple[Names, dict[str, Names]]] = []
        for node in self._nodes:
            region = products.region(node)
            if not region:
                continue
            outputs = Names(part.output[0] for part in region)
            by_tensor = {region[0].output[0]: Names({node.name})}
            for unit in [unit for unit in units if unit[0] & {*outputs, region[0].input[0]}]:
                units.remove(unit)
                outputs |= unit[0]
                for tensor, sites in unit[1].items():
                    by_tensor[tensor] = sites | by_tensor.get(tensor, Names())
            units.append((outputs, by_tensor))
        return units

    def _read(self, nodes: Names) -> Names:
        """Return inputs of a group of nodes that come from other nodes, without constants."""
        inside = [node for node in self._nodes if node.output[0] in nodes]
        outputs = {name for node in inside for name in node.output}
        return Names(reads_of(inside)) - outputs - self._stored - {""}

    def _values(self, names: Names, sample: Arrays, size: int) -> Arrays:
        """Run the model on a batch of the sample's rows, repeated; return its inputs and these tensors."""
        exposed = onnx.ModelProto.FromString(self._model.SerializeToString())
        hidden = sorted(names - {value.name for value in exposed.graph.output})
        exposed.graph.output.extend(map(helper.make_empty_tensor_value_info, hidden))
        rows = {name: np.resize(values, (size, *values.shape[1:])) for name, values in sample.items()}
        path = self._engine.with_name("exposed.onnx")
        onnx.save(exposed, os.fspath(path))
        try:
            with OnnxSession(path, SessionOptions(optimize=False)) as session:
                return rows | (session.run(rows, sorted(names)) if names else {})
        finally:
            path.unlink()

    def _race(self, nodes: Names, rows: Rows, variants: Collection[Names]) -> dict[Names, Times]:
        """Time a unit in INT8, and with each group of products in FP32, in turns; one of a structure once."""
        groups = [*dict.fromkeys((Names(), *variants))]
        models = [self._model_of(nodes, next(iter(rows.values())), products) for products in groups]
        structure = str([_structure(model, rows) for model in models])
        if structure not in self._timed:
            times = self._timed[structure] = [Times() for _ in models]
            sessions = [OnnxSession.in_memory(model, {}, self._engine) for model in models]
            for size, arrays in rows.items():
                for session in sessions:
                    session.run(arrays)
                ended, rounds = time.perf_counter() + SECONDS, 0
                while rounds < ROUNDS and (time.perf_counter() < ended or not rounds):
                    rounds += 1
                    for session, best in zip(sessions, times, strict=True):
                        began = time.perf_counter()
                        session.run(arrays)
                        best[size] = min(best.get(size, np.inf), (time.perf_counter() - began) * 1e6)
        return dict(zip(groups, self._timed[structure], strict=True))

    def _model_of(self, unit: Names, inputs: Arrays, products: Names) -> onnx.ModelProto:
        nodes = [node for node in self._nodes if node.output[0] in unit]
        others = (node for node in self._nodes if node.output[0] not in unit)
        outputs = unit & {*reads_of(others), *(output.name for output in self._model.graph.output)}
        types = {name: helper.np_dtype_to_tensor_dtype(values.dtype) for name, values in inputs.items()}
        read = sorted(self._read(unit))
        stored = sorted(self._stored & {*reads_of(nodes)})
        graph = helper.make_graph(
            nodes,
            "unit",
            [helper.make_tensor_value_info(name, types[name], [None] * inputs[name].ndim) for name in read],
            list(map(helper.make_empty_tensor_value_info, sorted(outputs))),
            [numpy_helper.from_array(self._reader.values(name), name) for name in stored],
        )
        opsets = list(self._model.opset_import)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=self._model.ir_version)
        write_fp32(model, products, self._reader)
        IntegerProducts(model, self._reader).write()
        return model


def _structure(model: onnx.ModelProto, rows: Rows) -> str:
    """Text that is the same for models that differ in names and values alone, on rows of equal shapes."""
    graph, number = model.graph, {name: n for n, name in enumerate(dict.fromkeys(reads_of(model.graph.node)))}
    shapes: dict[str, object] = {t.name: (t.data_type, *t.dims) for t in graph.initializer}
    shapes |= {i.name: [(a[i.name].dtype, a[i.name].shape) for a in rows.values()] for i in graph.input}
    nodes = [
        (n.op_type, [*map(number.get, n.input)], [*map(number.get, n.output)], [*map(str, n.attribute)])
        for n in graph.node
    ]
    return str((nodes, [*map(shapes.get, number)], {number.get(output.name) for output in graph.output}))


def write_fp32(model: onnx.ModelProto, products: Collection[str], reader: OperandReader) -> None:
    """Rewrite INT8 products of these names to FP32, in place; weights have zero point 0."""
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    nodes: list[NodeProto] = []
    for node in graph.node:
        for index, factor in enumerate(node.input[:2] if node.name in products else ()):
            integers, step = makers[factor].input[:2]
            if integers in makers and makers[integers].op_type == "QuantizeLinear":
                node.input[index] = makers[integers].input[0]
                continue
            cast, scale, node.input[index] = (f"{node.name}/{part}" for part in ("cast", "scale", "fp32"))
            values = reader.values(step)
            shape = (-1, 1) if values.ndim and attribute(makers[factor], "axis", 1) == 0 else values.shape
            graph.initializer.append(numpy_helper.from_array(values.reshape(shape), scale))
            nodes.append(helper.make_node("Cast", [integers], [cast], name=cast, to=TensorProto.FLOAT))
            nodes.append(helper.make_node("Mul", [cast, scale], [node.input[index]], name=node.input[index]))
        nodes.append(node)
    kept: list[NodeProto] = []
    while len(kept) != len(nodes):
        read = {*reads_of(nodes), *(output.name for output in graph.output)}
        nodes, kept = [node for node in nodes if read & {*node.output}], nodes
    del graph.node[:]
    graph.node.extend(nodes)


def _is_faster(times: Times, others: Times) -> bool:
    return _per_row(times) < (1.0 - MARGIN) * _per_row(others)


def _per_row(times: Times) -> float:
    return fmean(us / batch for batch, us in times.items())


def _in_words(times: Times) -> str:
    return ", ".join(f"{us:.3g} µs at batch {batch}" for batch, us in times.items())

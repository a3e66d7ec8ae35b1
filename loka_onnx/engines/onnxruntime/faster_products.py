"""INT8 products that take longer here than in FP32, which an engine of the CPU provider then has in FP32.

A product saves time in INT8, and its QuantizeLinear costs some: with few columns, or behind a wide activation
that nothing else reads in INT8, more than it saves. Both forms are timed: on the sample, at the served batch
sizes, and with as many threads as an engine is loaded with by default.

A unit is a model of its own, and is timed in turns with its variants: the products that are connected by
quantized tensors, with their Q/DQ, biases and ReLUs. ONNX Runtime fuses a Q into the INT8 product in front of
it, so that a chain is one unit. Products that read one tensor are in INT8 together, or not at all. First each
variant has one tensor less; then those that were faster are left out together, and so is the whole unit.

Weights keep their INT8 values, which ONNX Runtime multiplies by their scales when it loads the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from loka_onnx.engines.onnx_operands import OperandReader, attribute
from loka_onnx.engines.onnxruntime.cpu_form import IntegerProducts
from loka_onnx.sessions.model_files import reads_of
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Arrays

ROUNDS, SECONDS = 30, 1.0
"""Calls of each variant at each batch size, of which the fastest counts: other work on the host only adds to
its time; seconds after which a batch size gets no further round."""
MARGIN = 0.02
"""Relative difference of times that counts for nothing: the products stay in INT8."""

Names = frozenset[str]
Times = dict[int, float]
"""Microseconds of a call by batch size."""


@dataclass(frozen=True)
class Unit:
    """Connected INT8 products: their nodes, and the products by the quantized tensor that they read."""

    nodes: dict[str, NodeProto]
    tensors: dict[str, Names]

    def joined(self, other: Unit) -> Unit:
        """Both as one unit."""
        names = {**self.tensors, **other.tensors}
        tensors = {t: self.tensors.get(t, Names()) | other.tensors.get(t, Names()) for t in names}
        return Unit(self.nodes | other.nodes, tensors)

    def touches(self, other: Unit) -> bool:
        """True if they share a node, or one quantizes what the other makes."""
        pairs = ((self, other), (other, self))
        return not self.nodes.keys().isdisjoint(other.nodes) or any(
            not {name for node in left.nodes.values() for name in node.output}.isdisjoint(right.entries)
            for left, right in pairs
        )

    @property
    def entries(self) -> Names:
        """Tensors that its nodes read and do not make, constants included."""
        nodes = self.nodes.values()
        return Names(reads_of(nodes)) - {name for node in nodes for name in node.output}


class FasterProducts:
    """INT8 products of a model that is `engine` on disk, before `IntegerProducts`."""

    def __init__(self, model: onnx.ModelProto, engine: Path) -> None:
        self._model, self._engine, self._reader = model, engine, OperandReader(engine)
        self._stored = {tensor.name for tensor in model.graph.initializer}

    def slower(self, sample: Arrays, sizes: Sequence[int]) -> dict[str, str]:
        """Return the products that are slower than in FP32, with their times in words."""
        slower: dict[str, str] = {}
        units = self._units()
        entries = [self._entries(units, sample, size) for size in sizes]
        for unit in units:
            inputs = dict(zip(sizes, entries, strict=True))
            whole = Names().union(*unit.tensors.values())
            planned, *others = self._race(unit, inputs, [Names(), *unit.tensors.values()])
            pairs = zip(unit.tensors.values(), others, strict=True)
            wins = [sites for sites, times in pairs if _per_row(times) < (1.0 - MARGIN) * _per_row(planned)]
            parts = list(dict.fromkeys([Names(), Names().union(*wins), whole]))
            raced = dict(zip(parts, self._race(unit, inputs, parts), strict=True))
            planned = raced.pop(Names())
            best = min(raced, key=lambda sites: _per_row(raced[sites]))
            if _per_row(raced[best]) < (1.0 - MARGIN) * _per_row(planned):
                slower |= dict.fromkeys(sorted(best), f"{_in_words(planned)} with it in INT8, {_in_words(raced[best])} without")
        return slower

    def _units(self) -> list[Unit]:
        products = IntegerProducts(self._model, self._reader)
        units: list[Unit] = []
        for node in self._model.graph.node:
            region = products.region(node)
            if region:
                unit = Unit({part.output[0]: part for part in region}, {region[0].output[0]: Names({node.name})})
                for other in [other for other in units if other.touches(unit)]:
                    units.remove(other)
                    unit = other.joined(unit)
                units.append(unit)
        return units

    def _entries(self, units: Sequence[Unit], sample: Arrays, size: int) -> Arrays:
        """Return what the units read in one batch: that many rows of the sample, which is repeated."""
        graph, exposed = self._model.graph, onnx.ModelProto.FromString(self._model.SerializeToString())
        given = {value.name for value in (*graph.input, *graph.output)}
        wanted = sorted(Names().union(*(unit.entries for unit in units)) - self._stored - {""})
        rows = {name: np.resize(values, (size, *values.shape[1:])) for name, values in sample.items()}
        values = map(helper.make_empty_tensor_value_info, (name for name in wanted if name not in given))
        exposed.graph.output.extend(values)
        path = self._engine.with_name("exposed.onnx")
        onnx.save(exposed, os.fspath(path))
        try:
            with OnnxSession(path, SessionOptions(optimize=False)) as session:
                return rows | session.run(rows, [name for name in wanted if name not in rows])
        finally:
            path.unlink()

    def _race(self, unit: Unit, inputs: dict[int, Arrays], variants: Sequence[Names]) -> list[Times]:
        """Time a unit with these products in FP32, in turns."""
        some = next(iter(inputs.values()))
        models = [self._model_of(unit, some, products) for products in variants]
        sessions = [OnnxSession.in_memory(model, {}, self._engine) for model in models]
        times: list[Times] = [{} for _ in variants]
        for size, arrays in inputs.items():
            for session in sessions:
                session.run(arrays)
            ended, rounds = time.perf_counter() + SECONDS, 0
            while rounds < ROUNDS and (time.perf_counter() < ended or not rounds):
                rounds += 1
                for session, best in zip(sessions, times, strict=True):
                    began = time.perf_counter()
                    session.run(arrays)
                    best[size] = min(best.get(size, np.inf), (time.perf_counter() - began) * 1e6)
        return times

    def _model_of(self, unit: Unit, inputs: Arrays, products: Names) -> onnx.ModelProto:
        nodes = [node for node in self._model.graph.node if node.output[0] in unit.nodes]
        made = {name for node in nodes for name in node.output}
        others = [node for node in self._model.graph.node if node.output[0] not in unit.nodes]
        left = {*reads_of(others), *(output.name for output in self._model.graph.output)}
        outputs = [helper.make_empty_tensor_value_info(name) for name in sorted(made & left)]
        entries = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(inputs[name].dtype), [None] * inputs[name].ndim
            )
            for name in sorted(unit.entries - self._stored - {""})
        ]
        constants = [
            numpy_helper.from_array(self._reader.constant(name), name)
            for name in sorted(unit.entries & self._stored)
        ]
        graph = helper.make_graph(nodes, "unit", entries, outputs, constants)
        opsets = list(self._model.opset_import)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=self._model.ir_version)
        write_fp32(model, products, self._reader)
        IntegerProducts(model, self._reader).write()
        return model


def write_fp32(model: onnx.ModelProto, products: Collection[str], reader: OperandReader) -> None:
    """Rewrite INT8 products of these names to FP32, in place; weights have zero point 0."""
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    nodes: list[NodeProto] = []
    for node in graph.node:
        for index, factor in enumerate(node.input[:2] if node.name in products else ()):
            dequantize = makers[factor]
            maker = makers.get(dequantize.input[0])
            if maker is not None and maker.op_type == "QuantizeLinear":
                node.input[index] = maker.input[0]
                continue
            names = [f"{node.name}/{part}" for part in ("wide", "scale", "fp32")]
            scale = reader.constant(dequantize.input[1])
            shape = (-1, 1) if scale.ndim and attribute(dequantize, "axis", 1) == 0 else scale.shape
            graph.initializer.append(numpy_helper.from_array(scale.reshape(shape), names[1]))
            cast = helper.make_node("Cast", [dequantize.input[0]], names[:1], name=names[0], to=TensorProto.FLOAT)
            nodes += [cast, helper.make_node("Mul", names[:2], names[2:], name=names[2])]
            node.input[index] = names[2]
        nodes.append(node)
    kept = {*reads_of(nodes), *(output.name for output in graph.output)}
    while len(left := [node for node in nodes if kept & {*node.output}]) < len(nodes):
        nodes, kept = left, {*reads_of(left), *(output.name for output in graph.output)}
    del graph.node[:]
    graph.node.extend(nodes)


def _per_row(times: Times) -> float:
    return fmean(us / batch for batch, us in times.items())


def _in_words(times: Times) -> str:
    return ", ".join(f"{us:.3g} µs at batch {batch}" for batch, us in times.items())

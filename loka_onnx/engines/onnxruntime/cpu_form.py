"""Form of a planned model that ONNX Runtime's CPU provider runs fastest (1.31): rewrites of its main graph.

**A product with the weight on the left** becomes a convolution of kernel size 1, with the same sums::

    W · X + b = Conv(X, W, b)        W (O, C), X (batch, C, P), b (O, 1)

The provider fuses bias and ReLU into a Conv, but not into such a product, as `conv_to_matmul` leaves it: a
layer in FP32 would be slower than its original Conv.

**A product and the Split of its channels**, as `merge_parallel_linears` writes them, become a product for
each part: together they take the time of one, nothing is copied, and the ReLU and the Q behind are fused. So
do steps of each channel alone in between, as an activation::

    Split(f(x · W + b)) = (f(x · W₁ + b₁), …, f(x · Wₘ + bₘ))  (W₁, …, Wₘ) = Split(W), once, when it is loaded

**A column times a row**, as `outer_to_mul` writes it, becomes a product again, with its bias in one kernel
(b 1024, N 16: 37 µs, where Mul and Add take 100)::

    x ⊙ w + b = x · W + b        x (…, M, 1), w (N), W (1, N)

**A sum in front of a LayerNormalization** becomes a Sum: the optimizer fuses an Add of three axes and the
norm to a SkipLayerNormalization, which is 4 to 8 times slower (FP32, widths 32 to 2048).

**INT8 products** take the form that is fused to integer kernels. Biases become INT32::

    x · W + b ≈ sx·sw[c] · (Σ (qx − zx)·qw + b₃₂)        b₃₂ = round(b / (sx·sw[c]))

A product whose float bias becomes a Gemm's, as that of a MatMul and an Add does, runs in FP32 otherwise. The
bias moves by half a unit of the sum at most. One that is too large for INT32, which the bias of a Gemm or an
Add would clip without a word, is added by a Sum, which is not fused; so is an addend that is no constant. A
Relu behind a product stays only where a single Q with zero point 0 reads it, which clips alike; another
becomes Max(y, 0), because no product is fused before a Relu.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from loka_onnx.engines.draft import attribute
from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.graph.protected import UNARY
from loka_onnx.sessions.model_files import reads_of

MOST = 2.0**30
"""Largest magnitude of a bias: the sum of the products has the other half of INT32's range."""
MATRIX = 2
"""Axes of the result of a product that becomes a Gemm."""
_OF_A_CHANNEL = UNARY | {"Add", "Div", "Mul", "Sub"}
"""Operators whose results in a channel depend on that channel alone."""
_INTEGERS = {TensorProto.INT8, TensorProto.UINT8}
_ZERO = "loka/integer/zero"


def write_convolutions(model: onnx.ModelProto) -> int:
    """Rewrite a model in place and return the number of convolutions; external weights only change shape.
    Products in FP8, and those whose constants have other readers, are left alone.
    """
    graph = model.graph
    ranks = {name: len(shape) for name, shape in _shapes(model).items()}
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    reads = Counter([*reads_of(graph.node), *(output.name for output in graph.output)])
    readers = {name: node for node in graph.node for name in node.input}
    makers = {name: node for node in graph.node for name in node.output}
    written, gone = 0, []
    for node in graph.node:
        if node.op_type != "MatMul" or node.domain:
            continue
        weight, source = constants.get(node.input[0]), node.input[1]
        if weight is None or len(weight.dims) != 2 or reads[weight.name] != 1 or ranks.get(source) != 3:
            continue
        if source in makers and makers[source].op_type == "DequantizeLinear":
            continue
        weight.dims.append(1)
        node.op_type = "Conv"
        node.input[:] = [source, weight.name]
        add = readers.get(node.output[0])
        if add is not None and reads[node.output[0]] == 1 and add.op_type == "Add":
            bias = constants.get(next(name for name in add.input if name != node.output[0]))
            if bias is not None and list(bias.dims) == [weight.dims[0], 1] and reads[bias.name] == 1:
                del bias.dims[1]
                node.input.append(bias.name)
                node.output[:] = add.output
                gone.append(add)
        written += 1
    for add in gone:
        graph.node.remove(add)
    return written


def _shapes(model: onnx.ModelProto) -> dict[str, list[int]]:
    """Shapes of FP32 tensors that are no constants, as far as they are known; 0 for an open axis."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    typed = (*inferred.input, *inferred.value_info, *inferred.output)
    kinds = {value.name: value.type.tensor_type for value in typed}
    return {
        name: [axis.dim_value for axis in kind.shape.dim]
        for name, kind in kinds.items()
        if kind.elem_type == TensorProto.FLOAT and kind.HasField("shape")
    }


def write_outer_products(model: onnx.ModelProto) -> int:
    """Rewrite columns times rows in place and return their number; external constants only change shape.
    Rows that have other readers are left alone.
    """
    graph, written = model.graph, 0
    columns = {name for name, shape in _shapes(model).items() if shape[1:][-1:] == [1]}
    rows = {t.name: t for t in graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) == 1}
    reads = Counter([*reads_of(graph.node), *(output.name for output in graph.output)])
    for node in graph.node:
        column, row = sorted(node.input, key=rows.keys().__contains__) if node.op_type == "Mul" else ("", "")
        if column in columns and row in rows and rows[row].dims[0] > 1 and reads[row] == 1:
            rows[row].dims.insert(0, 1)
            node.op_type, node.input[:] = "MatMul", [column, row]
            written += 1
    return written


def write_norm_sums(model: onnx.ModelProto) -> int:
    """Rewrite the Adds in front of norms in place, and return their number."""
    normed = {node.input[0] for node in model.graph.node if node.op_type == "LayerNormalization"}
    adds = [node for node in model.graph.node if node.op_type == "Add" and node.output[0] in normed]
    for node in adds:
        node.op_type = "Sum"
    return len(adds)


def part_name(name: str, number: int) -> str:
    """Name of a part of a product; the first one has that of the whole."""
    return f"{name}-part-{number}" if number else name


def _column_axis(product: NodeProto) -> int:
    """Axis of the columns of a product's weight."""
    return 0 if attribute(product, "transB", 0) else 1


class SplitProducts:
    """Products of a model in FP32 or INT8 whose channels a Split parts; `reader` gives its constants."""

    def __init__(self, model: onnx.ModelProto, reader: OperandReader) -> None:
        self._graph, self._reader = model.graph, reader
        self._makers = {name: node for node in self._graph.node for name in node.output}
        self._reads = Counter([*reads_of(self._graph.node), *(output.name for output in self._graph.output)])
        self._stored = {tensor.name: tensor for tensor in self._graph.initializer}

    def write(self) -> int:
        """Rewrite them in place and return their number."""
        chains = {node.output[0]: self._chain(node) for node in self._graph.node if node.op_type == "Split"}
        gone = {each.output[0] for chain in chains.values() for each in chain}
        # ONNX Runtime would run the DQ of a weight, though nothing reads it any more.
        weights = {chain[0].input[1] for chain in chains.values() if chain}
        gone |= {weight for weight in weights if self._reads[weight] == 1}
        nodes: list[NodeProto] = []
        for node in self._graph.node:
            chain = chains.get(node.output[0])
            nodes += self._parts(chain, node) if chain else [node]
        del self._graph.node[:]
        self._graph.node.extend(node for node in nodes if node.output[0] not in gone)
        return sum(map(bool, chains.values()))

    def _chain(self, split: NodeProto) -> list[NodeProto]:
        """Return the product whose channels are parted and the steps behind it, if all constants can be."""
        chain = [split]
        while len(chain) == 1 or chain[0].op_type in _OF_A_CHANNEL:
            maker = next((self._makers[name] for name in chain[0].input if name in self._makers), None)
            if maker is None:
                return []
            chain.insert(0, maker)
        *chain, _ = chain
        if chain[0].op_type not in {"Gemm", "MatMul"} or len(split.input) != MATRIX:
            return []
        weight, *names = [*self._weight(chain[0]), *self._constants(chain), split.input[1]]
        if not {weight, *names} <= self._stored.keys() or any(self._reads[n.output[0]] != 1 for n in chain):
            return []
        kind = TensorProto.INT8 if chain[0].input[1] in self._makers else TensorProto.FLOAT
        is_last = attribute(split, "axis", 0) in ({-1, 1} if chain[0].op_type == "Gemm" else {-1})
        flat = all(max([*self._stored[name].dims[:-1], 1]) == 1 for name in names)
        stored = self._stored[weight]
        # A constant may repeat the one column of a product.
        columns, parted = stored.dims[_column_axis(chain[0]) :][:1], self._reader.values(split.input[1])
        matrix = len(stored.dims) == MATRIX and stored.data_type == kind and [*columns] == [parted.sum()]
        return chain if is_last and flat and matrix else []

    def _weight(self, product: NodeProto) -> list[str]:
        """Return the constant of the weight and, of an INT8 one, its scale and zero point."""
        maker = self._makers.get(product.input[1])
        return [product.input[1]] if maker is None else list(maker.input)

    def _constants(self, chain: Sequence[NodeProto]) -> list[str]:
        """Return the bias of a Gemm, and what the steps behind a product read beside its result."""
        read = (name for last, step in pairwise(chain) for name in step.input if name != last.output[0])
        return [*filter(None, [*chain[0].input[2:], *read])]

    def _parts(self, chain: Sequence[NodeProto], split: NodeProto) -> Iterator[NodeProto]:
        product = chain[0]
        axis = _column_axis(product)
        weight, *scales = self._weight(product)
        names = [part_name(product.name, number) for number in range(len(split.output))]
        parts = [f"{name}/columns" for name in names]
        yield helper.make_node("Split", [weight, split.input[1]], parts, name=parts[0], axis=axis)
        cuts = np.cumsum(self._reader.values(split.input[1]))[:-1]
        cut = {
            name: self._cut(name, cuts, names) for name in dict.fromkeys([*scales, *self._constants(chain)])
        }
        for number, (name, part, result) in enumerate(zip(names, parts, split.output, strict=True)):
            own = {vector: each[number] for vector, each in cut.items()}
            own[product.input[1]] = f"{part}/dq" if scales else part
            if scales:
                inputs, factor = [part, *(own[scale] for scale in scales)], f"{part}/dq"
                yield helper.make_node("DequantizeLinear", inputs, [factor], name=factor, axis=axis)
            for node in chain:
                made = NodeProto.FromString(node.SerializeToString())
                made.name = name if node is product else f"{name}/{node.output[0]}"
                made.input[:] = [own.get(read, read) for read in node.input]
                made.output[0] = result if node is chain[-1] else f"{name}/{node.output[0]}"
                own[node.output[0]] = made.output[0]
                yield made

    def _cut(self, vector: str, cuts: npt.NDArray[np.int64], names: Sequence[str]) -> list[str]:
        """Store the parts of a vector and return their names; a single value is the same for each."""
        values = self._reader.values(vector)
        if values.size == 1:
            return [vector] * len(names)
        stored = [f"{name}/{vector}" for name in names]
        parts = zip(np.split(values, cuts, axis=-1), stored, strict=True)
        self._graph.initializer.extend(numpy_helper.from_array(part, name) for part, name in parts)
        return stored


class IntegerProducts:
    """INT8 products of a model; `reader` gives its constants."""

    def __init__(self, model: onnx.ModelProto, reader: OperandReader) -> None:
        self._graph, self._reader = model.graph, reader
        self._makers = {name: node for node in self._graph.node for name in node.output}
        self._readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self._graph.node:
            for name in node.input:
                self._readers[name].append(node)
        inferred = onnx.shape_inference.infer_shapes(model).graph
        typed = (*inferred.value_info, *inferred.output)
        self._ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in typed}
        self._outputs = {value.name for value in self._graph.output}
        self._stored = {tensor.name: tensor.data_type for tensor in self._graph.initializer}

    def write(self) -> None:
        """Rewrite their biases and Relus in place."""
        nodes, biases, needs_zero = [], [], False
        for node in self._graph.node:
            nodes.append(node)
            factors = self._factors(node)
            if not factors:
                continue
            last = self._sum_of(node)
            bias = self._bias(node, last, factors)
            if bias is not None and bias.op_type == "Sum":
                nodes.append(bias)
                needs_zero = True
            elif bias is not None:
                biases.append(bias)
            for reader in self._readers[node.output[0]]:
                if node.op_type == "MatMul" and reader.op_type == "Add" and reader is not last:
                    reader.op_type = "Sum"
            for relu in self._readers[last.output[0]]:
                if relu.op_type == "Relu" and not self._is_clipped(relu):
                    relu.op_type, needs_zero = "Max", True
                    relu.input.append(_ZERO)
        if needs_zero:
            self._graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), _ZERO))
        del self._graph.node[:]
        self._graph.node.extend([*biases, *nodes])

    def region(self, product: NodeProto) -> list[NodeProto]:
        """Return the Q, DQs, product, bias sum (else the product) and ReLU of an INT8 product, or nothing."""
        factors = self._factors(product)
        makers = [self._makers[dq.input[0]] for dq in factors if dq.input[0] in self._makers]
        if not makers or makers[0].op_type != "QuantizeLinear":
            return []
        last = self._sum_of(product)
        readers = self._readers[last.output[0]]
        relus = readers if [reader.op_type for reader in readers] == ["Relu"] else []
        return [*makers, *factors, product, last, *relus]

    def _factors(self, product: NodeProto) -> list[NodeProto]:
        """Return the DQ of both factors of an INT8 product; nothing of another node."""
        if product.op_type not in {"Gemm", "MatMul"} or attribute(product, "transA", 0):
            return []
        if any(attribute(product, name, 1.0) != 1.0 for name in ("alpha", "beta")):
            return []
        makers = [self._makers.get(name) for name in product.input[:2]]
        factors = [maker for maker in makers if maker is not None and self._is_integer(maker)]
        return factors if len(factors) == len(makers) else []

    def _is_integer(self, node: NodeProto) -> bool:
        kinds = {self._stored.get(name) for name in node.input[2:]}
        return node.op_type == "DequantizeLinear" and bool(kinds & _INTEGERS)

    def _sum_of(self, product: NodeProto) -> NodeProto:
        """Return the Add of a constant that alone reads a MatMul, or else the product itself."""
        readers = self._readers[product.output[0]]
        if product.op_type == "MatMul" and len(readers) == 1 and readers[0].op_type == "Add":
            return readers[0] if {*readers[0].input} & self._stored.keys() else product
        return product

    def _bias(self, product: NodeProto, holder: NodeProto, factors: list[NodeProto]) -> NodeProto | None:
        """Replace a float bias; return its node, to be added: a DQ, or the Sum of a Gemm; None for none."""
        at = next((i for i, n in enumerate(holder.input) if self._stored.get(n) == TensorProto.FLOAT), None)
        if at is None or self._ranks.get(product.output[0]) != MATRIX:
            return None
        bias = self._reader.values(holder.input[at])
        steps = [self._reader.values(factor.input[1]).astype(np.float32) for factor in factors]
        unit = np.asarray(steps[0] * steps[1], np.float32)
        rounded = np.rint(bias.astype(np.float64) / unit)
        if bias.ndim != 1 or not (np.abs(rounded) <= MOST).all():
            return self._summed(product, holder)
        dequantize = self._dequantize(f"{product.name}/bias", rounded.astype(np.int32), unit)
        holder.input[at] = dequantize.output[0]
        return dequantize

    def _summed(self, product: NodeProto, holder: NodeProto) -> NodeProto | None:
        """Keep a bias in FP32; return the Sum behind a Gemm, None where the Add becomes one. ONNX Runtime
        would join a Sum of two with its Gemm, and the bias would saturate in INT32: the Sum also gets a 0.
        """
        if holder is not product:
            holder.op_type = "Sum"
            return None
        bias = product.input.pop()
        result, product.output[0] = product.output[0], f"{product.name}/product"
        added = [product.output[0], bias, _ZERO]
        return helper.make_node("Sum", added, [result], name=f"{product.name}/bias")

    def _dequantize(
        self, name: str, values: npt.NDArray[np.int32], unit: npt.NDArray[np.float32]
    ) -> NodeProto:
        inputs = {"q": values, "scale": unit, "zero": np.zeros(unit.shape, np.int32)}
        names = [f"{name}/{part}" for part in inputs]
        stored = (numpy_helper.from_array(a, n) for n, a in zip(names, inputs.values(), strict=True))
        self._graph.initializer.extend(stored)
        return helper.make_node("DequantizeLinear", names, [f"{name}/dq"], name=f"{name}/dq", axis=0)

    def _is_clipped(self, relu: NodeProto) -> bool:
        """True if a single Q reads a Relu, and its smallest value stands for 0."""
        readers = self._readers[relu.output[0]]
        if len(readers) != 1 or readers[0].op_type != "QuantizeLinear" or relu.output[0] in self._outputs:
            return False
        zero = readers[0].input[2] if len(readers[0].input) > MATRIX else ""
        return self._stored.get(zero) == TensorProto.UINT8 and not self._reader.values(zero).any()

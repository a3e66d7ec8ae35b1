"""Random rankers: blocks that the mods rewrite, one behind the other, with constants that survive folding.

Every constant is a multiple of 1/8 (or is chosen so that what a mod folds into it is exact in FP32). So a
graph and its rewritten form agree to 1e-9 when both are evaluated in float64, and a constant that a mod had
rounded again would show at 1e-8.
"""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from shape_models import IDS, dyadic

COLUMNS = 4
EPSILON = 2.0**-10


class GraphBuilder:
    """Nodes and constants of a random model; `seed` decides everything, `widths` are those of its tensors."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self.widths: dict[str, int] = {}
        self.block = ""

    def built(self, result: str, *inputs: onnx.ValueInfoProto) -> onnx.ModelProto:
        output = helper.make_tensor_value_info(result, TensorProto.FLOAT, ["batch", self.widths[result]])
        initializers = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, "g", inputs, [output], initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        onnx.checker.check_model(model, full_check=True)
        return model

    def op(self, kind: str, inputs: list[Any], width: int | None = None, **attributes: Any) -> str:
        """What is no name of a tensor becomes a constant."""
        name = f"{self.block}{kind.lower()}{len(self.nodes)}"
        inputs = [each if isinstance(each, str) else self.constant(each) for each in inputs]
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}.out"], name=name, **attributes))
        self.widths[f"{name}.out"] = self.widths[inputs[0]] if width is None else width
        return f"{name}.out"


class RandomGraph(GraphBuilder):
    """Builds one model with `blocks` behind the features."""

    def __init__(self, seed: int, blocks: int = 4) -> None:
        super().__init__(seed)
        self.widths["x"] = 16
        self.block = "features/"
        flat = self.features()
        steps = (
            *(self.linear, self.linear, self.experts, self.norm, self.batch_norm, self.interaction, self.row),
            *(self.no_ops, self.split_and_join, self.einsum, self.constant_weight, self.columns),
            *(self.convolution, self.column_vectors, self.gated, self.target, self.masked, self.bag),
            self.jagged,
        )
        for number in range(blocks):
            self.block = f"block{number}/"
            flat = steps[self.random.integers(len(steps))](flat)
        self.block = "head/"
        self.result = self.normalized(self.linear(flat))

    def model(self) -> onnx.ModelProto:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])
        ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", COLUMNS])
        return self.built(self.result, x, ids)

    # Parts ------------------------------------------------------------------------------------------

    def constant(self, values: Any) -> str:
        """An initializer; equal small ones share a name, as exporters write them."""
        array = np.asarray(values)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        for name, other in self.constants.items():
            if array.dtype == other.dtype and array.shape == other.shape and np.array_equal(array, other):
                return name
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def dyadic(self, *shape: int) -> str:
        return self.constant(dyadic(*shape, seed=int(self.random.integers(2**31))))

    def pick(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def activation(self, x: str) -> str:
        kind = self.pick("Relu", "Tanh", "Sigmoid", "swish")
        if kind == "swish":
            return self.op("Mul", [x, self.op("Sigmoid", [x], self.widths[x])], self.widths[x])
        return self.op(kind, [x], self.widths[x])

    # Blocks: each maps (batch, width) to (batch, another width) ---------------------------------------

    def features(self) -> str:
        lookups = []
        for column in range(COLUMNS):
            ids = self.op("Gather", ["ids", column], 0, axis=1)
            table = self.dyadic(IDS + (column if self.pick(True, False) else 0), 8)
            lookups.append(self.op("Gather", [table, ids], 8, axis=0))
        bottom = self.linear("x", 8)
        if self.pick(True, False):
            return self.op("Concat", [bottom, *lookups], 8 * (1 + COLUMNS), axis=1)
        axis = self.constant([1])
        tokens = [self.op("Unsqueeze", [tensor, axis], 8) for tensor in (bottom, *lookups)]
        return self.flattened(self.op("Concat", tokens, 8, axis=1), 1 + COLUMNS, 8)

    def flattened(self, tokens: str, count: int, width: int) -> str:
        return self.op("Reshape", [tokens, [-1, count * width]], count * width)

    def linear(self, x: str, n: int | None = None) -> str:
        n = n or int(self.pick(1, 8, 16, 20, 24, 33))
        return self.activation(self.product(self.normalized(x), n))

    def product(self, x: str, n: int) -> str:
        k = self.widths[x]
        if self.pick(True, False):
            has_bias = self.pick(True, False)
            inputs = [x, self.dyadic(n, k), *([self.dyadic(n)] if has_bias else [])]
            return self.op("Gemm", inputs, n, transB=1)
        product = self.op("MatMul", [x, self.dyadic(k, n)], n)
        return self.op("Add", [product, self.dyadic(n)], n) if self.pick(True, False) else product

    def experts(self, x: str) -> str:
        count, n = int(self.pick(2, 3)), int(self.pick(4, 8, 20))
        outputs = [self.activation(self.product(x, n)) for _ in range(count)]
        if self.pick(True, False):
            return self.op("Concat", outputs, count * n, axis=1)
        total = outputs[0]
        for other in outputs[1:]:
            total = self.op(self.pick("Add", "Mul"), [total, other], n)
        return total

    def normalized(self, x: str) -> str:
        """Statistics that keep values near 1, so that FP32 and float64 stay comparable."""
        gain, bias = self.constant(np.ones(self.widths[x])), self.dyadic(self.widths[x])
        return self.op("LayerNormalization", [x, gain, bias], self.widths[x], axis=-1, epsilon=EPSILON)

    def norm(self, x: str) -> str:
        """LayerNorm or RMSNorm in primitives, with a scale and a shift or without."""
        width = self.widths[x]
        y = self.affine(self.primitives(x, centred=self.pick(True, False)), width)
        return self.linear(y) if self.pick(True, False) else y

    def primitives(self, x: str, *, centred: bool) -> str:
        """A norm over the last axis as exporters decompose it."""
        width, axes = self.widths[x], self.constant([-1])
        d = self.op("Sub", [x, self.op("ReduceMean", [x, axes], 1)], width) if centred else x
        square = self.op("Mul", [d, d], width)
        if self.pick(True, False):
            square = self.op("Pow", [d, 2.0], width)
        mean = self.op("ReduceMean", [square, axes], 1)
        root = self.op("Sqrt", [self.op("Add", [mean, EPSILON], 1)], 1)
        return self.op("Div", [d, root], width)

    def affine(self, y: str, *shape: int) -> str:
        """A scale and a shift, a scale, or neither."""
        width = self.widths[y]
        if self.pick(True, False):
            y = self.op("Mul", [y, self.dyadic(*shape)], width)
            y = self.op("Add", [y, self.dyadic(*shape)], width) if self.pick(True, False) else y
        return y

    def batch_norm(self, x: str) -> str:
        """Behind a linear layer; its variance and epsilon add up to a power of four."""
        n = int(self.pick(8, 20))
        y = self.product(self.normalized(x), n)
        variance = self.constant(np.full(n, 4.0 ** int(self.pick(-1, 0, 1)) - EPSILON))
        statistics = [self.dyadic(n), self.dyadic(n), self.dyadic(n), variance]
        return self.activation(self.op("BatchNormalization", [y, *statistics], n, epsilon=EPSILON))

    def tokens(self, x: str) -> tuple[str, int]:
        """(batch, tokens, 8), and how many."""
        count = int(self.pick(4, 16))
        flat = self.normalized(self.product(x, 8 * count))
        return self.op("Reshape", [flat, [-1, count, 8]], 8), count

    def interaction(self, x: str) -> str:
        """Dots of pairs, or X·Xᵀ·Y in either order."""
        tokens, count = self.tokens(x)
        turned = self.op("Transpose", [tokens], count, perm=[0, 2, 1])
        projection = self.dyadic(count, 4)
        match self.pick("dots", "left", "right", "both"):
            case "dots":
                dots = self.flattened(self.op("MatMul", [tokens, turned], count), count, count)
                chosen = np.flatnonzero(np.tril(np.ones((count, count)), -1).reshape(-1))
                return self.op("Gather", [dots, self.constant(chosen)], len(chosen), axis=1)
            case "left":
                y = self.op("MatMul", [self.op("MatMul", [tokens, turned], count), projection], 4)
            case "right":
                y = self.op("MatMul", [tokens, self.op("MatMul", [turned, projection], 4)], 4)
            case _:
                again = self.op("Transpose", [tokens], count, perm=[0, 2, 1])
                mixed = [self.op("MatMul", [t, self.dyadic(count, 4)], 4) for t in (turned, again)]
                y = self.op("MatMul", [tokens, self.op("Mul", mixed, 4)], 4)
        return self.flattened(y, count, 4)

    def einsum(self, x: str) -> str:
        tokens, count = self.tokens(x)
        y = self.op("Einsum", [tokens, self.dyadic(8, 4)], 4, equation="bnd,de->bne")
        return self.flattened(y, count, 4)

    def convolution(self, x: str) -> str:
        """A mix of the tokens at each position, of the tokens of several positions, or of a group of them."""
        tokens, count = self.tokens(x)
        kernel = self.constant(self.random.integers(-8, 9, (4, count, self.pick(1, 1, 3))) / 16)
        inputs = [tokens, kernel, self.constant(self.random.integers(-8, 9, 4) / 8)]
        y = self.op("Conv", inputs[: self.pick(2, 3)], 4, auto_pad="SAME_UPPER")
        return self.flattened(y, 4, 8)

    def column_vectors(self, x: str) -> str:
        """A low-rank cross on columns: weights on the left, a bias, an activation between them or none."""
        width = self.widths[x]
        columns = self.op("Unsqueeze", [x, [2]], width)
        y = self.op("MatMul", [self.dyadic(8, width), columns], 8)
        y = self.op("Relu", [y], 8) if self.pick(True, False) else y
        y = self.op(
            "Add", [self.op("MatMul", [self.dyadic(width, 8), y], width), self.dyadic(width, 1)], width
        )
        return self.op("Squeeze", [y, [2]], width)

    def gated(self, x: str) -> str:
        """A mixture of experts of low rank that multiply the features, all with one bias or none."""
        width, last = self.widths[x], self.constant([-1])
        columns = self.op("Unsqueeze", [x, last], width)
        bias, parts = self.dyadic(width), []
        has_bias = self.pick(True, False)
        for _ in range(3):
            y = self.op(
                "MatMul", [self.op("MatMul", [x, self.dyadic(width, 4)], 4), self.dyadic(4, width)], width
            )
            y = self.op("Add", [y, bias], width) if has_bias else y
            parts.append(self.op("Mul", [columns, self.op("Unsqueeze", [y, last], width)], width))
        gates = self.op("Unsqueeze", [self.op("MatMul", [x, self.dyadic(width, 3)], 3), last], 3)
        gates = self.op(self.pick("Softmax", "Sigmoid"), [gates], 3)
        stack = self.op("Concat", parts, width, axis=2)
        return self.op("Squeeze", [self.op("MatMul", [stack, gates], width), last], width)

    def target(self, x: str) -> str:
        """Target attention of DIN: a candidate beside each position of a history."""
        history, count = self.tokens(x)
        candidate = self.normalized(self.product(x, 8))
        candidate = self.op("Unsqueeze", [candidate, [1]], 8)
        copied = self.op("Expand", [candidate, [1, count, 1]], 8)
        difference = [copied, history] if self.pick(True, False) else [history, copied]
        parts = [copied, history, self.op("Sub", difference, 8), self.op("Mul", [history, copied], 8)]
        joined = self.op("Concat", [parts[at] for at in self.random.permutation(4)], 32, axis=2)
        rows = self.op("Reshape", [joined, [-1, 32]], 32)
        return self.flattened(self.activation(self.product(rows, 4)), count, 4)

    def row(self, x: str) -> str:
        """A learned row beside the features."""
        size = self.op("Shape", ["x"], 0, start=0, end=1)
        shape = self.op("Concat", [size, [4]], 0, axis=0)
        row = self.op("Expand", [self.dyadic(1, 4), shape], 4)
        joined = self.op("Concat", [x, row], self.widths[x] + 4, axis=1)
        return self.activation(self.product(joined, 16))

    def no_ops(self, x: str) -> str:
        width = self.widths[x]
        y = self.op("Identity", [x], width)
        y = self.op("Reshape", [y, [-1, width, 1]], width)
        y = self.op("Transpose", [y], width, perm=[0, 2, 1])
        y = self.op("Transpose", [y], width, perm=[0, 2, 1])
        y = self.op("Flatten", [y], width, axis=1)
        return self.op("Mul", [y, 1.0], width)

    def masked(self, x: str) -> str:
        """`x[ids[:, 0] > 3] = 0.5`, as it is exported."""
        width = self.widths[x]
        mask = self.op("Greater", [self.op("Gather", ["ids", 0], 0, axis=1), 3], 0)
        found = self.op("NonZero", [mask], 0)
        count = self.op("Slice", [self.op("Shape", [found], 0), [1], [2]], 0)
        half = self.op("Expand", [0.5, self.op("Concat", [count, [width]], 0, axis=0)], width)
        return self.op("ScatterND", [x, self.op("Transpose", [found], 0, perm=[1, 0]), half], width)

    def bag(self, x: str) -> str:
        """`nn.EmbeddingBag(9, width)(ids % 9)`, as TorchScript exports it, times x."""
        width, name = self.widths[x], f"{self.block}bag{len(self.nodes)}"
        flat = self.op("Reshape", [self.op("Mod", ["ids", 9], 0), [-1]], 0)
        count = self.op("Size", [flat], 0)
        starts = self.op("Range", [0, count, COLUMNS], 0)
        offsets = self.op("Concat", [starts, self.op("Unsqueeze", [count, [0]], 0)], 0, axis=0)
        ends = self.op("Slice", [offsets, [1], [2**31], [0]], 0)
        bags = self.op("Squeeze", [self.op("Shape", [ends], 0)], 0)
        table, axis = self.dyadic(9, width), self.constant([0])
        inner = [
            ("Gather", [offsets, "i"], "p0"), ("Unsqueeze", ["p0", axis], "p"), ("Gather", [ends, "i"], "t0"),
            ("Unsqueeze", ["t0", axis], "t"), ("Slice", [flat, "p", "t", axis], "j"),
            ("Gather", [table, "j"], "g"), ("ReduceSum", ["g", axis], "q"), ("Identity", ["c"], "d"),
        ]  # fmt: skip
        nodes = [
            helper.make_node(
                op, read, [made], name=f"{name}/{made}", **({"keepdims": 0} if made == "q" else {})
            )
            for op, read, made in inner
        ]
        ends_of = [("i", TensorProto.INT64, []), ("c", TensorProto.BOOL, []), ("d", TensorProto.BOOL, [])]
        i, c, d = (helper.make_tensor_value_info(*each) for each in ends_of)
        q = helper.make_tensor_value_info("q", TensorProto.FLOAT, [width])
        body = helper.make_graph(nodes, "bag", [i, c], [d, q])
        summed = self.op("Loop", [bags, np.array(True)], width, body=body)
        return self.op("Mul", [x, summed], width)

    def jagged(self, x: str) -> str:
        """A column of the ids, counted and cut as TorchRec does, times x."""
        flat = self.op("Reshape", [self.op("Transpose", ["ids"], 0, perm=[1, 0]), [-1]], 0)
        ones = self.op("Expand", [1, self.op("Shape", [flat], 0)], 0)
        counts = self.op("ReduceSum", [self.op("Reshape", [ones, [COLUMNS, -1]], 0), [1]], 0, keepdims=0)
        parts = [f"{self.block}part{len(self.nodes)}.{i}" for i in range(COLUMNS)]
        self.nodes.append(helper.make_node("Split", [flat, counts], parts, name=parts[0], axis=0))
        column = self.op("Unsqueeze", [parts[self.pick(*range(COLUMNS))], [1]], 0)
        return self.op("Mul", [x, self.op("Cast", [column], 0, to=TensorProto.FLOAT)], self.widths[x])

    def split_and_join(self, x: str) -> str:
        width = self.widths[x]
        if width < 2:
            return x
        name = f"{self.block}split{len(self.nodes)}"
        sizes = self.constant([width // 2, width - width // 2])
        parts = [f"{name}.0", f"{name}.1"]
        self.nodes.append(helper.make_node("Split", [x, sizes], parts, name=name, axis=1))
        order = parts if self.pick(True, False) else parts[::-1]
        return self.op("Concat", order, width, axis=1)

    def constant_weight(self, x: str) -> str:
        """A weight that is transposed, scaled and shifted on the way: exact in FP32."""
        k = self.widths[x]
        weight = self.op("Transpose", [self.dyadic(8, k)], 8, perm=[1, 0])
        weight = self.op("Add", [self.op("Mul", [weight, 0.5], 8), self.dyadic(1, 8)], 8)
        return self.op("MatMul", [x, weight], 8)

    def columns(self, x: str) -> str:
        """A choice of columns in front of a layer of odd width."""
        width = self.widths[x]
        chosen = self.random.permutation(width)[: max(1, width - 3)]
        return self.linear(self.op("Gather", [x, self.constant(chosen)], len(chosen), axis=1))

"""Models that are valid ONNX and unusual: each must go through the pipeline or be refused in words.

Most are a product, something unusual, and another product: `body` computes k (n, 16) from h (n, 16) in ONNX's
text form. `x` is (n, 16) of numbers, `ids` (n,) of ids below 9.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_text import with_constants

_RANDOM = np.random.default_rng(7)


def _floats(*shape: int) -> np.ndarray:
    return (_RANDOM.standard_normal(shape) / 2).astype(np.float32)


CONSTANTS: dict[str, np.ndarray] = {
    "w": _floats(16, 16),
    "w1": _floats(16, 1),
    "wt": _floats(16, 16),
    "wv": _floats(16),
    "b": _floats(16),
    "table": _floats(9, 16),
    "ones": np.ones(16, np.float32),
    "zeros": np.zeros(16, np.float32),
    "half": np.array(0.5, np.float32),
    "fzero": np.array(0.0, np.float32),
    "fone": np.array(1.0, np.float32),
    "yes": np.array(True),
    "no": np.array(False),
    **{f"i{value}": np.array(value) for value in (0, 1, 2, 3, 8, 16)},
    **{f"a{value}": np.array([value]) for value in (0, 1, 4)},
    **{"m1": np.array([-1]), "s88": np.array([8, 8]), "s160": np.array([16, 0]), "odd": np.array([-1, 32])},
    **{"flat": np.array([-1, 16]), "line": np.array([-1, 16, 1]), "image": np.array([-1, 16, 1, 1])},
    "seq": np.array([-1, 4, 4]),
    "scalar5": np.array(5.0, np.float32),
    "scalar3": np.array(3.0, np.float32),
    "conv1": _floats(16, 16, 1),
    "conv2": _floats(16, 16, 1, 1),
    "deconv": _floats(16, 16, 1, 1),
    "gru_w": _floats(1, 12, 4),
    "gru_r": _floats(1, 12, 4),
    "lstm_w": _floats(1, 16, 4),
    "lstm_r": _floats(1, 16, 4),
    "nothing": np.zeros((0, 16), np.float32),
    "qs": np.array(0.05, np.float32),
    "qz": np.array(0, np.int8),
    "qz8": np.array(128, np.uint8),
    "qw": _RANDOM.integers(-100, 100, (16, 16)).astype(np.int8),
    "qws": np.full(16, 0.01, np.float32),
    "qwz": np.zeros(16, np.int8),
    "words": np.array(["a", "b"], object),
}


@dataclass(frozen=True)
class Trap:
    """A model with what is expected of it.

    `refused` is what the refusal must name, with its code for some, None where the model must go through;
    `tolerance` is that of the exact engine's output, relative to the largest; weights are `external`, or x is
    `positive` in the data.
    """

    model: onnx.ModelProto
    refused: str | None = None
    tolerance: float = 1e-5
    external: bool = False
    positive: bool = False


Builder = Callable[[], Trap]
TRAPS: dict[str, Builder] = {}


def parsed(
    body: str, *, opset: int = 21, functions: str = "", more: str = "", ends: str = ""
) -> onnx.ModelProto:
    """`g (x, ids) => (y) { body }` with the constants that it reads."""
    ir = 10 if opset >= 21 else 8 if opset >= 13 else 7
    header = f'<ir_version: {ir}, opset_import: ["" : {opset}{more}]>'
    ends = ends or "(float[n,16] x, int64[n] ids) => (float[n,1] y)"
    model = onnx.parser.parse_model(f"{header}\ng {ends} {{\n{body}\n}}\n{functions}")
    own = {i.name for i in model.graph.input} | {i.name for i in model.graph.initializer}
    for function in model.functions:
        assert not set(CONSTANTS) & {name for node in function.node for name in node.input} - set(
            function.input
        )
    return with_constants(model, {name: value for name, value in CONSTANTS.items() if name not in own})


def between(body: str, **settings: object) -> onnx.ModelProto:
    text = f"[first] h = MatMul(x, w)\n{body}\n[last] y = MatMul(k, w1)"
    return parsed(text, **settings)  # type: ignore[arg-type]


def trap(name: str, refused: str | None = None, tolerance: float = 1e-5) -> Callable[..., None]:
    def add(model: Callable[[], onnx.ModelProto], *, external: bool = False, positive: bool = False) -> None:
        assert name not in TRAPS, name
        TRAPS[name] = lambda: Trap(model(), refused, tolerance, external, positive)

    return add


def body(
    name: str, text: str, refused: str | None = None, tolerance: float = 1e-5, **settings: object
) -> None:
    trap(name, refused, tolerance)(lambda: between(text, **settings))


# Control flow --------------------------------------------------------------------------------------


def branch(then: str, other: str = "a2 = Relu(h)", output: str = "k") -> str:
    """One branch where there are rows, which gives `a`, and another that gives `a2`."""
    return f"""s = Shape<start=0, end=1>(h)
    v = Squeeze(s)
    c = Greater(v, i0)
    {output} = If(c) <then_branch = t () => (float[n,16] a) {{ {then} }},
                      else_branch = e () => (float[n,16] a2) {{ {other} }}>"""


body(
    "if-data-dependent",
    """s = ReduceMax<keepdims=0>(h)
    c = Greater(s, scalar5)
    k = If(c) <then_branch = t () => (float[n,16] a) { a = MatMul(h, wt) },
               else_branch = e () => (float[n,16] a2) { a2 = Relu(h) }>""",
    refused="ReduceMax",
)
body("if-on-the-batch-size", branch("a = MatMul(h, wt)"))
body(
    "if-constant-condition",
    """k = If(yes) <then_branch = t () => (float[n,16] a) { a = MatMul(h, wt) },
               else_branch = e () => (float[n,16] a2) { a2 = Relu(h) }>""",
)
body(
    "if-nested-same-names",
    branch(
        """d = Greater(v, i2)
        a = If(d) <then_branch = t2 () => (float[n,16] q) { z = MatMul(h, wt) q = Relu(z) },
                   else_branch = e2 () => (float[n,16] q2) { z2 = MatMul(h, wt) q2 = Relu(z2) }>""",
        "z3 = MatMul(h, wt) a2 = Relu(z3)",
    ),
)
body(
    "if-behind-a-relu-that-smoothing-divides",
    f"r = Relu(h)\nm = MatMul(r, w)\n{branch('a = MatMul(r, wt)', 'a2 = Relu(r)', 'q')}\nk = Add(m, q)",
)
body(
    "loop-with-product",
    """k = Loop(i3, yes, h) <body = b (int64 i, bool c, float[n,16] a) => (bool co, float[n,16] z)
       { co = Identity(c) p = MatMul(a, wt) z = Tanh(p) }>""",
)
body(
    "loop-that-scans-and-captures",
    """f, s = Loop(i3, yes, h) <body = b (int64 i, bool c, float[n,16] a)
                                      => (bool co, float[n,16] z, float[n,16] o)
       { co = Identity(c) g = Cast<to=1>(i) p = MatMul(h, wt) q = Mul(p, g) z = Add(a, q) o = Tanh(z) }>
    k = ReduceSum<keepdims=0>(s, a0)""",
)
body(
    "scan-over-fields",
    """r = Reshape(h, seq)
    sh = Shape<start=0, end=1>(h)
    sz = Concat<axis=0>(sh, a4)
    st = Expand(fzero, sz)
    fs, so = Scan(st, r) <num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1],
       body = b (float[n,4] a, float[n,4] e) => (float[n,4] z, float[n,4] o)
       { p = MatMul(e, w4) z = Add(a, p) o = Tanh(z) }>
    k = Reshape(so, flat)""",
)
CONSTANTS["w4"] = _floats(4, 4)

# Sequences, optionals ------------------------------------------------------------------------------

body("sequence-construct", "q = SequenceConstruct(h, h)\na = SequenceAt(q, i1)\nk = Relu(a)")
body("split-to-sequence", "q = SplitToSequence<axis=1>(h, i2)\nk = ConcatFromSequence<axis=1>(q)")
body(
    "sequence-in-a-loop",
    """e = SequenceEmpty<dtype=1>()
    f = Loop(i3, yes, e) <body = b (int64 i, bool c, seq(float[n,16]) a) => (bool co, seq(float[n,16]) z)
       { co = Identity(c) p = MatMul(h, wt) z = SequenceInsert(a, p) }>
    l = ConcatFromSequence<axis=1>(f)
    k = MatMul(l, w48)""",
)
CONSTANTS["w48"] = _floats(48, 16)
body(
    "sequence-in-an-if",
    """s = Shape<start=0, end=1>(h)
    v = Squeeze(s)
    c = Greater(v, i0)
    q = If(c) <then_branch = t () => (seq(float[n,16]) a) { a = SequenceConstruct(h, h) },
               else_branch = e () => (seq(float[n,16]) a2) { a2 = SequenceConstruct(h) }>
    k = SequenceAt(q, i0)""",
)
body(
    "sequence-between-linears",
    """r = Relu(h)
    m = MatMul(r, wt)
    q = SequenceConstruct(m, r)
    a = SequenceAt(q, i0)
    t = Relu(a)
    k = MatMul(t, w)""",
)
body("optional", "o = Optional(h)\nhe = OptionalHasElement(o)\nk = OptionalGetElement(o)")


def _sequence_map() -> onnx.ModelProto:
    text = """q = SplitToSequence<axis=1>(h, i8)
    m = SequenceMap(q) <body = b (float[n,8] e) => (float[n,8] o) { o = Relu(e) }>
    k = ConcatFromSequence<axis=1>(m)"""
    return between(text)


trap("sequence-map")(_sequence_map)

# Functions -----------------------------------------------------------------------------------------

FUNCTION = """
<domain: "own", opset_import: ["" : 21]> layer (a, wa) => (z) { p = MatMul(a, wa) z = Relu(p) }
"""
NESTED = """
<domain: "own", opset_import: ["" : 21, "own" : 1]> twice (a, wa) => (z)
{ q = own.layer(a, wa) z = own.layer(q, wa) }
"""
body("local-function", "k = own.layer(h, wt)", functions=FUNCTION, more=', "own" : 1')
body("nested-functions", "k = own.twice(h, wt)", functions=FUNCTION + NESTED, more=', "own" : 1')
body(
    "function-within-a-branch",
    branch("a = own.layer(h, wt)"),
    functions=FUNCTION,
    more=', "own" : 1',
)
body(
    "function-with-an-attribute",
    "k = own.leaky <alpha=0.3> (h)",
    functions="""
<domain: "own", opset_import: ["" : 21]> leaky <alpha> (a) => (z) { z = LeakyRelu<alpha: float = @alpha>(a) }
""",
    more=', "own" : 1',
)

# Types ---------------------------------------------------------------------------------------------


def _retyped(kind: int, numpy: object, ends: bool = True) -> onnx.ModelProto:
    """A small ranker of another float type throughout."""
    names = ("w", "b", "wt", "w1")
    nodes = [
        h.make_node("MatMul", ["x", "w"], ["h"], "first"),
        h.make_node("Add", ["h", "b"], ["hb"], "bias"),
        h.make_node("Relu", ["hb"], ["r"], "relu"),
        h.make_node("MatMul", ["r", "wt"], ["k"], "second"),
        h.make_node("MatMul", ["k", "w1"], ["y"], "last"),
    ]
    outer = kind if ends else T.FLOAT
    if not ends:
        nodes[0].input[0] = "xc"
        nodes[-1].output[0] = "yc"
        nodes.insert(0, h.make_node("Cast", ["x"], ["xc"], "in", to=kind))
        nodes.append(h.make_node("Cast", ["yc"], ["y"], "out", to=T.FLOAT))
    graph = h.make_graph(
        nodes,
        "g",
        [h.make_tensor_value_info("x", outer, ["n", 16])],
        [h.make_tensor_value_info("y", outer, ["n", 1])],
        [nh.from_array(CONSTANTS[name].astype(numpy), name) for name in names],  # type: ignore[call-overload]
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)


trap("fp16", tolerance=5e-3)(lambda: _retyped(T.FLOAT16, np.float16))
trap("fp16-within", tolerance=5e-3)(lambda: _retyped(T.FLOAT16, np.float16, ends=False))
trap("fp64")(lambda: _retyped(T.DOUBLE, np.float64))
trap("fp64-within")(lambda: _retyped(T.DOUBLE, np.float64, ends=False))
trap("bf16", refused="BF16")(lambda: _retyped(T.BFLOAT16, ml_dtypes.bfloat16))
trap("bf16-within", refused="BF16")(lambda: _retyped(T.BFLOAT16, ml_dtypes.bfloat16, ends=False))
body(
    "int8-qdq",
    """q = QuantizeLinear(h, qs, qz)
    d = DequantizeLinear(q, qs, qz)
    dw = DequantizeLinear<axis=1>(qw, qws, qwz)
    k = MatMul(d, dw)""",
    refused="QuantizeLinear",
)
body(
    "uint8-qdq",
    "q = QuantizeLinear(h, qs, qz8)\nd = DequantizeLinear(q, qs, qz8)\nk = MatMul(d, wt)",
    refused="QuantizeLinear",
)
body(
    "qlinear-matmul",
    "q = QuantizeLinear(h, qs, qz)\np = QLinearMatMul(q, qs, qz, qw, qs, qz, fone, qz)\n"
    "k = DequantizeLinear(p, fone, qz)",
    refused="QuantizeLinear",
)
body(
    "matmul-integer",
    "q = QuantizeLinear(h, qs, qz)\np = MatMulInteger(q, qw, qz, qz)\nf = Cast<to=1>(p)\nk = Mul(f, qs)",
    refused="QuantizeLinear",
)
body(
    "dynamic-quantization",
    "q, s, z = DynamicQuantizeLinear(h)\nk = DequantizeLinear(q, s, z)",
    refused="DynamicQuantizeLinear",
)
body(
    "fp8-qdq",
    "q = QuantizeLinear<output_dtype=17>(h, qs)\nd = DequantizeLinear(q, qs)\nk = MatMul(d, wt)",
    refused="QuantizeLinear",
)
body("casts-to-half-and-back", "c = Cast<to=10>(h)\nr = Relu(c)\nk = Cast<to=1>(r)", tolerance=1e-5)
body("double-in-the-middle", "c = Cast<to=11>(h)\nr = Relu(c)\nk = Cast<to=1>(r)")
body("bool-and-where", "c = Greater(h, fzero)\nn_ = Neg(h)\nk = Where(c, h, n_)")
body("complex-masks", "c = IsNaN(h)\ni = IsInf(h)\no = Or(c, i)\nk = Where(o, zeros, h)")


def _typed_inputs(kind: int, cast: bool = True) -> onnx.ModelProto:
    nodes = [
        h.make_node("Cast", ["ids"], ["f"], "cast", to=T.FLOAT),
        h.make_node("MatMul", ["f", "w"], ["k"], "first"),
        h.make_node("MatMul", ["k", "w1"], ["y"], "last"),
    ]
    graph = h.make_graph(
        nodes,
        "g",
        [h.make_tensor_value_info("ids", kind, ["n", 16])],
        [h.make_tensor_value_info("y", T.FLOAT, ["n", 1])],
        [nh.from_array(CONSTANTS[name], name) for name in ("w", "w1")],
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)


for _name, _kind in (("int32", T.INT32), ("int64", T.INT64), ("bool", T.BOOL), ("uint8", T.UINT8)):
    trap(f"inputs-of-{_name}")(lambda kind=_kind: _typed_inputs(kind))  # type: ignore[misc]
trap("inputs-of-string", refused="")(lambda: _typed_inputs(T.STRING))

# Names ---------------------------------------------------------------------------------------------


def _renamed(rename: Callable[[str], str], nodes: Callable[[int], str]) -> onnx.ModelProto:
    model = between("r = Relu(h)\nm = MatMul(r, wt)\nk = Sigmoid(m)")
    for tensor in model.graph.initializer:
        tensor.name = rename(tensor.name)
    for number, node in enumerate(model.graph.node):
        node.name = nodes(number)
        node.input[:] = [name if name == "x" else rename(name) for name in node.input]
        node.output[:] = [name if name == "y" else rename(name) for name in node.output]
    return model


trap("names-not-ascii")(lambda: _renamed(lambda n: f"тензор_{n}_张量_é", lambda i: f"узел/{i}/层"))
trap("names-with-slashes-and-colons")(lambda: _renamed(lambda n: f"/a/b:{n}:0", lambda i: f"/a:0/b/{i}/"))
trap("names-very-long")(lambda: _renamed(lambda n: n * 3000, lambda i: f"{'m/' * 900}{i}"))
trap("nodes-unnamed")(lambda: _renamed(lambda n: n, lambda i: ""))
trap("names-of-nodes-are-names-of-tensors")(
    lambda: _renamed(lambda n: n, lambda i: ["x", "y", "h", "w", "k"][i])
)
trap("names-with-blanks-and-quotes")(
    lambda: _renamed(lambda n: f"a {n} 'q' \"p\"\n", lambda i: f"n o '{i}' \"\\")
)
trap("names-numbers")(lambda: _renamed(lambda n: str(sum(map(ord, n))), str))

# Ends ----------------------------------------------------------------------------------------------

ENDS = "(float[n,16] x, int64[n] ids) => (float[n,1] y, {})"
body("output-is-an-input", "k = Relu(h)", ends=ENDS.format("float[n,16] x"))
body("output-is-a-constant", "k = Relu(h)", ends=ENDS.format("float[16] b"))
body("output-twice-by-identity", "k = Relu(h)\nz = Identity(k)", ends=ENDS.format("float[n,16] z"))
body("output-is-read-within", "k = Relu(h)", ends=ENDS.format("float[n,16] h"))
body(
    "output-per-batch", "k = Relu(h)\nz = ReduceMean<keepdims=0>(h)", refused="z", ends=ENDS.format("float z")
)
body("output-of-ints", "k = Relu(h)\nz = ArgMax<axis=1>(h)", ends=ENDS.format("int64[n,1] z"))
body("output-of-bools", "k = Relu(h)\nz = Greater(h, fzero)", ends=ENDS.format("bool[n,16] z"))
body(
    "output-is-a-sequence",
    "k = Relu(h)\nz = SequenceConstruct(h)",
    refused="z",
    ends=ENDS.format("seq(float[n,16]) z"),
)
body(
    "output-beside-that-couples-rows",
    "k = Relu(h)\nz = Softmax<axis=0>(h)",
    ends=ENDS.format("float[n,16] z"),
)
body("inputs-unused", "k = Relu(h)", ends="(float[n,16] x, int64[n] ids, float[n,3] spare) => (float[n,1] y)")
body("axes-named-apart", "k = Relu(h)", ends="(float[a,16] x, int64[c] ids) => (float[d,1] y)")
body("width-dynamic", "k = Relu(h)", ends="(float[n,m] x, int64[n] ids) => (float[n,1] y)")
body("batch-fixed", "k = Relu(h)", refused="E0408 x", ends="(float[8,16] x, int64[8] ids) => (float[8,1] y)")
trap("batch-not-first", refused="x")(
    lambda: parsed(
        "t = Transpose<perm=[1,0]>(x)\nh = MatMul(t, w)\ny = MatMul(h, w1)",
        ends="(float[16,n] x) => (float[n,1] y)",
    )
)
trap("rank-three-input", refused="x")(
    lambda: parsed(
        "h = MatMul(x, w)\ns = ReduceMean<keepdims=0>(h, a1)\ny = MatMul(s, w1)",
        ends="(float[n,3,16] x) => (float[n,1] y)",
    )
)


def _initializer_that_is_an_input() -> onnx.ModelProto:
    model = between("k = Relu(h)")
    model.graph.input.append(h.make_tensor_value_info("w", T.FLOAT, [16, 16]))
    return model


def _value_info_without_types() -> onnx.ModelProto:
    model = between("k = Relu(h)")
    model.graph.value_info.append(onnx.ValueInfoProto(name="h"))
    return model


def _sparse() -> onnx.ModelProto:
    model = between("r = Relu(h)\nk = MatMul(r, thin)")
    places = np.array([3, 40, 77, 129, 255])
    values = nh.from_array(_floats(5), "thin")
    model.graph.sparse_initializer.append(
        h.make_sparse_tensor(values, nh.from_array(places, "thin_places"), [16, 16])
    )
    return model


trap("initializer-that-is-an-input")(_initializer_that_is_an_input)
trap("value-info-without-types")(_value_info_without_types)
trap("sparse-initializer")(_sparse)
trap("output-finite-for-positive-features")(
    lambda: parsed("l = Log(x)\nh = MatMul(l, w)\nk = Relu(h)\ny = MatMul(k, w1)"), positive=True
)
trap("external-data")(lambda: between("r = Relu(h)\nk = MatMul(r, wt)"), external=True)

# Weights -------------------------------------------------------------------------------------------

body("shared-weight", "r = Relu(h)\ns = MatMul(r, w)\nt = Relu(s)\nk = MatMul(t, w)")
body("weight-read-beside", "r = Relu(h)\np = MatMul(r, wt)\nq = Add(wt, wt)\nk = MatMul(p, q)")
body("weight-on-the-left", "t = Transpose<perm=[1,0]>(h)\np = MatMul(wt, t)\nk = Transpose<perm=[1,0]>(p)")
body("weight-scalar", "k = Mul(h, scalar3)")
body(
    "scalar-activations",
    """s = Shape<start=0, end=1>(h)
    v = Squeeze(s)
    f = Cast<to=1>(v)
    p = Mul(f, half)
    q = Div(p, f)
    k = Mul(h, q)""",
)
body("weight-of-rank-one", "p = MatMul(h, wv)\nu = Unsqueeze(p, m1)\nk = Mul(h, u)")
body("gemm-transposed", "k = Gemm<transB=1, alpha=0.5, beta=2.0>(h, wt, b)")
body("gemm-trans-a", "t = Transpose<perm=[1,0]>(h)\nk = Gemm<transA=1>(t, wt, fone)")
body("gemm-without-bias", "k = Gemm(h, wt)")
body("gemm-scalar-bias", "k = Gemm<beta=0.25>(h, wt, fone)")
body(
    "gemm-left-weight",
    "t = Transpose<perm=[1,0]>(h)\np = Gemm<transA=1>(wt, t)\nk = Transpose<perm=[1,0]>(p)",
)
body("matmul-of-activations", "t = Reshape(h, seq)\np = MatMul(t, t)\nk = Reshape(p, flat)")
body("einsum-linear", 'k = Einsum<equation="bi,oi->bo">(h, wt)')
body(
    "einsum-three",
    't = Reshape(h, seq)\np = Einsum<equation="bij,bkj,kl->bil">(t, t, w4)\nk = Reshape(p, flat)',
)
body(
    "einsum-ellipsis",
    't = Reshape(h, seq)\np = Einsum<equation="...ij,jk->...ik">(t, w4)\nk = Reshape(p, flat)',
)
body(
    "einsum-diagonal",
    't = Reshape(h, seq)\np = Einsum<equation="bii->bi">(t)\nq = MatMul(p, w416)\nk = Relu(q)',
)
CONSTANTS["w416"] = _floats(4, 16)
body("einsum-blanks-no-arrow", 'k = Einsum<equation=" b i , i o ">(h, wt)')
body("conv1d-kernel-1", "t = Reshape(h, line)\np = Conv(t, conv1, b)\nk = Reshape(p, flat)")
body("conv2d-kernel-1", "t = Reshape(h, image)\np = Conv<group=1>(t, conv2)\nk = Reshape(p, flat)")
CONSTANTS["conv3"] = _floats(16, 16, 3)
for _kernel, _weight in ((1, "conv1"), (3, "conv3")):
    trap(f"conv-of-kernel-{_kernel}-and-no-other-product")(
        lambda weight=_weight, pad=_kernel // 2: parsed(
            f"t = Reshape(x, line)\np = Conv<pads=[{pad},{pad}]>(t, {weight}, b)\nr = Relu(p)\n"
            f"q = Conv<pads=[{pad},{pad}]>(r, {weight})\nk = Reshape(q, flat)\ny = ReduceSum(k, m1)"
        )
    )
trap("einsum-and-no-other-product")(
    lambda: parsed('p = Einsum<equation="bi,oi->bo">(x, wt)\nk = Relu(p)\ny = ReduceSum(k, m1)')
)
body("conv-transpose", "t = Reshape(h, image)\np = ConvTranspose(t, deconv)\nk = Reshape(p, flat)")
body(
    "gru",
    """t = Reshape(h, seq)
    t2 = Transpose<perm=[1,0,2]>(t)
    a, z = GRU<hidden_size=4, layout=0>(t2, gru_w, gru_r)
    s = Squeeze(z, a0)
    k = MatMul(s, w416)""",
)
for _layer, _call in (
    ("gru", "a, z = GRU<hidden_size=4>(t2, gru_w, gru_r)"),
    ("lstm", "a, z, cells = LSTM<hidden_size=4>(t2, lstm_w, lstm_r)"),
):
    # As over histories of which the empty ones are left out: a batch in which all are ends the process.
    body(
        f"{_layer}-over-some-rows",
        f"""d = Gather<axis=1>(h, i0)
    c = Greater(d, fzero)
    some = Compress<axis=0>(h, c)
    t = Reshape(some, seq)
    t2 = Transpose<perm=[1,0,2]>(t)
    {_call}
    s = Squeeze(z, a0)
    m = MatMul(s, w416)
    at = NonZero(c)
    places = Transpose<perm=[1,0]>(at)
    k = ScatterND(h, places, m)""",
        refused=f"({_layer.upper()})",
    )
body(
    "lstm-empty-optionals",
    "t = Reshape(h, seq)\nt2 = Transpose<perm=[1,0,2]>(t)\n"
    "a, z, c = LSTM<hidden_size=4>(t2, lstm_w, lstm_r, , , , )\ns = Squeeze(z, a0)\nk = MatMul(s, w416)",
)
body(
    "attention-like",
    "t = Reshape(h, seq)\nu = Transpose<perm=[0,2,1]>(t)\np = MatMul(t, u)\nq = Softmax(p)\n"
    "r = MatMul(q, t)\nk = Reshape(r, flat)",
)

# Optionals, emptiness ------------------------------------------------------------------------------

body("clip-without-min", "k = Clip(h, , scalar3)")
body(
    "resize-empty-inputs",
    't = Reshape(h, line)\np = Resize<mode="nearest">(t, , scales)\nk = Reshape(p, flat)',
)
CONSTANTS["scales"] = np.ones(3, np.float32)
body("dropout-mask-empty-name", "k, mask = Dropout(h)")
body("layer-norm-more-outputs", "k, m, v = LayerNormalization(h, ones, zeros)")
body("zero-size-concat", "z = Slice(h, a0, a0, a1)\nk = Concat<axis=1>(h, z)")
body("zero-size-constant", "z = Concat<axis=0>(nothing, wt)\nk = MatMul(h, z)")
body("zero-size-split", "p, q = Split<axis=1>(h, s160)\nk = Relu(p)")
body("squeeze-all", "u = Unsqueeze(h, a1)\nq = Squeeze(u)\nk = Reshape(q, flat)")
body("constant-of-shape", "s = Shape(h)\nz = ConstantOfShape(s)\nk = Add(h, z)")
body("range-over-features", "r = Range(i0, i16, i1)\nf = Cast<to=1>(r)\nk = Mul(h, f)")
body(
    "nonzero-per-row",
    "c = Greater(h, fzero)\nn_ = NonZero(c)\nt = Transpose<perm=[1,0]>(n_)\ng = GatherND(h, t)\n"
    "s = Shape(h)\nz = ConstantOfShape(s)\nk = ScatterND(z, t, g)",
)
body("unique-ids", "u, f, inv, cnt = Unique(ids)\ne = Gather(table, u)\nl = Gather(e, inv)\nk = Add(h, l)")
body("one-hot", "o = OneHot(ids, i16, hot)\nk = Mul(h, o)")
CONSTANTS["hot"] = np.array([0.5, 2.0], np.float32)
body(
    "embedding-bag",
    "u = Unsqueeze(ids, m1)\nl = Concat<axis=1>(u, u)\ne = Gather(table, l)\n"
    "s = ReduceSum<keepdims=0>(e, a1)\nk = Add(h, s)",
)
body(
    "negative-axes-everywhere",
    """u = Unsqueeze(h, m1)
    q = Squeeze(u, m1)
    s = Softmax<axis=-1>(q)
    s8, s9 = Split<axis=-1>(s, s88)
    k = Concat<axis=-1>(s8, s9)""",
)
body("identity-chain", "a = Identity(h)\nc = Identity(a)\nd = Identity(c)\nk = Identity(d)")
body("dead-nodes", "k = Relu(h)\ndead = MatMul(h, wt)\ndeader = Relu(dead)")
body("twins", "p = Relu(h)\nq = Relu(h)\nk = Add(p, q)")

# Operators of inference and of training ------------------------------------------------------------

body("dropout-inference", "k = Dropout(h, half, no)")
body("dropout-training", "k = Dropout(h, half, yes)", refused="E0409 Dropout")
body("batchnorm-inference", "k = BatchNormalization(h, ones, zeros, zeros, ones)")
body(
    "batchnorm-training",
    "k, m, v = BatchNormalization<training_mode=1>(h, ones, zeros, zeros, ones)",
    refused="BatchNormalization",
)
body("random-normal-like", "r = RandomNormalLike(h)\nk = Add(h, r)", refused="RandomNormalLike")
body("random-uniform-of-a-shape", "r = RandomUniform<shape=[16]>()\nk = Add(h, r)", refused="RandomUniform")
body("bernoulli", "p = Sigmoid(h)\nk = Bernoulli(p)", refused="Bernoulli")
body(
    "multinomial",
    "m = Multinomial<sample_size=16>(h)\nf = Cast<to=1>(m)\nk = Add(h, f)",
    refused="Multinomial",
)
body("random-in-a-branch", branch("a = RandomNormalLike(h)"), refused="If")
body("softmax-over-rows", "k = Softmax<axis=0>(h)", refused="E0409 Softmax")
body("mean-over-rows", "m = ReduceMean(h, a0)\nk = Sub(h, m)", refused="ReduceMean")
body("top-k-over-rows", "v, i = TopK<axis=0>(h, a1)\nk = Sub(h, v)", refused="TopK")
body("cumsum-over-rows", "k = CumSum(h, i0)", refused="CumSum")
body(
    "similarity-within-the-batch",
    "t = Transpose<perm=[1,0]>(h)\ng = MatMul(h, t)\nk = MatMul(g, h)",
    refused="MatMul",
)
body("fails-at-odd-batches", "r = Reshape(h, odd)\nk = Reshape(r, flat)", refused="E0409 Reshape")

# Operator sets -------------------------------------------------------------------------------------

for _opset in (7, 8, 9, 10):
    body(f"opset-{_opset}", "k = Relu(h)", refused="E0303 opset", opset=_opset)
body(
    "opset-11",
    """u = Unsqueeze<axes=[1]>(h)
    s = Squeeze<axes=[1]>(u)
    k = Relu(s)""",
    opset=11,
)
body("opset-12-softmax", "t = Reshape(h, seq)\ns = Softmax<axis=1>(t)\nk = Reshape(s, flat)", opset=12)
body(
    "opset-12-split-clip",
    "p, q = Split<axis=1, split=[8,8]>(h)\nc = Clip(p, fzero)\nk = Concat<axis=1>(c, q)",
    opset=12,
)
body("opset-12-reduce", "s = ReduceSum<axes=[1], keepdims=1>(h)\nk = Mul(h, s)", opset=12)
body("opset-13", """k = Softplus(h)""", opset=13)
body("opset-17-layernorm", "k = LayerNormalization(h, ones, zeros)", opset=17)
body("opset-18-reduce", "s = ReduceMean(h, a1)\nk = Mul(h, s)", opset=18)
body("opset-22", "k = Mish(h)", opset=22)
body("opset-23-rmsnorm", "k = RMSNormalization(h, ones)", opset=23)
body("batchnorm-opset-11", "k = BatchNormalization(h, ones, zeros, zeros, ones)", opset=11)
body("dropout-opset-11", "k = Dropout<ratio=0.5>(h)", opset=11)


def _foreign(domain: str, op: str, **attributes: object) -> onnx.ModelProto:
    model = between("k = Relu(h)")
    node = next(node for node in model.graph.node if node.op_type == "Relu")
    node.op_type, node.domain, node.name = op, domain, "foreign"
    node.attribute.extend(h.make_attribute(key, value) for key, value in attributes.items())
    model.opset_import.append(h.make_opsetid(domain, 1))
    return model


trap("com-microsoft", refused="E0305 foreign")(lambda: _foreign("com.microsoft", "Gelu"))
trap("ai-onnx-ml", refused="foreign")(lambda: _foreign("ai.onnx.ml", "Scaler", offset=[0.0], scale=[2.0]))

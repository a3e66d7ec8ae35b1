"""LayerNorm and RMSNorm as primitives, written as text in every spelling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rewrite_models import artifact, as_double, evaluate, parse, random_rows

from loka_onnx.core.rewrite import RewriteRecord
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.norms.fuse import FuseLayerNorm, FuseRMSNorm
from loka_onnx.transforms.sequence import apply_mods

EPSILON = np.float32(1e-3)
SCALARS = {"two": 2.0, "one": 1.0, "half": 0.5, "minus_half": -0.5, "epsilon": EPSILON}

SQUARES = {"pow": "s = Pow(d, two)", "mul": "s = Mul(d, d)"}
ROOTS = {
    "div_sqrt": "r = Sqrt(e) q = Div(d, r)",
    "times_reciprocal": "t = Sqrt(e) r = Reciprocal(t) q = Mul(d, r)",
    "reciprocal_times": "t = Sqrt(e) r = Reciprocal(t) q = Mul(r, d)",
    "one_over_sqrt": "t = Sqrt(e) r = Div(one, t) q = Mul(d, r)",
    "pow_half": "r = Pow(e, half) q = Div(d, r)",
    "pow_minus_half": "r = Pow(e, minus_half) q = Mul(d, r)",
}


@dataclass(frozen=True)
class Body:
    """Text of a norm over ``x``; the result is ``n`` and Relu reads it."""

    centred: bool = True
    square: str = SQUARES["mul"]
    root: str = ROOTS["div_sqrt"]
    affine: str = ""
    epsilon: str = "e = Add(v, epsilon)"
    variance: str = "v = ReduceMean(s, axes)"
    tail: str = ""
    shape: tuple[int, ...] = (8,)
    axes: tuple[int, ...] = (-1,)
    extra_outputs: str = ""

    def model(self, constants: dict[str, Any] | None = None) -> onnx.ModelProto:
        centring = "m = ReduceMean(x, axes) d = Sub(x, m)" if self.centred else ""
        parts = (centring, self.square, self.variance, self.epsilon, self.root, self.affine)
        body = " ".join(parts)
        if not self.centred:
            body = body.replace("(d, d)", "(x, x)").replace("(d,", "(x,").replace(", d)", ", x)")
        body += "y = Relu(n)" if "n = " in body else "y = Relu(q)"
        dims = ",".join(map(str, ("batch", *self.shape)))
        values = SCALARS | {"axes": np.array(self.axes, np.int64)} | (constants or {})
        used = {k: v for k, v in values.items() if f"{k})" in body or f"{k}," in body}
        outputs = f"float[{dims}] y{self.extra_outputs}"
        return parse(f"{body} {self.tail}", used, inputs=f"float[{dims}] x", outputs=outputs)

    def mod(self) -> Mod[Any]:
        return FuseLayerNorm() if self.centred else FuseRMSNorm()

    def op(self) -> str:
        return "LayerNormalization" if self.centred else "RMSNormalization"


@dataclass(frozen=True)
class Fused:
    before: onnx.ModelProto
    after: onnx.ModelProto
    record: RewriteRecord
    path: Path


def fuse(model: onnx.ModelProto, mod: Mod[Any], folder: Path) -> Fused:
    shape = [d.dim_value or 5 for d in model.graph.input[0].type.tensor_type.shape.dim]
    source = artifact(model, folder / "before.onnx")
    result = apply_mods(source, [{"x": random_rows(*shape)}], folder / "after.onnx", [mod])
    path = result.model.path
    return Fused(model, onnx.load(path), result.log.records[0], path)


def formula(x: Any, axes: tuple[int, ...], *, centred: bool, scale: Any = 1.0, bias: Any = 0.0) -> Any:
    """The textbook norm in float64, then Relu."""
    x = x.astype(np.float64)
    d = x - x.mean(axis=axes, keepdims=True) if centred else x
    return np.maximum(d / np.sqrt((d * d).mean(axis=axes, keepdims=True) + float(EPSILON)) * scale + bias, 0)


def assert_equal_to_primitives(fused: Fused, body: Body, scale: Any = 1.0, bias: Any = 0.0) -> None:
    x = random_rows(5, *body.shape, seed=1)
    expected = formula(x, body.axes, centred=body.centred, scale=scale, bias=bias)
    wide = {"x": x.astype(np.float64)}
    # Float64 has 16 digits, the norm some ten operations on numbers of size 1: 1e-9 is generous, while
    # a wrong epsilon or divisor shows at 1e-4.
    for model in (fused.before, fused.after):
        np.testing.assert_allclose(evaluate(as_double(model), wide)["y"], expected, rtol=0, atol=1e-9)
    # 1.5e-7 seen on values of size 2.
    np.testing.assert_allclose(OnnxSession(fused.path).run({"x": x})["y"], expected, rtol=0, atol=1e-6)
    onnx.checker.check_model(fused.after, full_check=True)

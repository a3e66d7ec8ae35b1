"""The logit end and the residual stream of graphs as text, and of what PyTorch's exporters write."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from graph_runs import export

from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.protected import logit_ends, residual_streams

# fmt: off
WEIGHTS = {
    "w": (32, 32), "v": (32, 32), "head": (32, 1), "heads": (32, 4), "platt": (1, 1), "matrix": (4, 4),
    "thin": (4, 1), "up": (32, 128), "down": (128, 1), "scale": (1,), "gain": (32,), "table": (100, 1),
    "one": np.array([1]), "half": np.array([2, 2]), "third": np.array(2), "sixteen": np.array([16, 16]),
}
# fmt: on


def load(write_model: Callable[..., Path], body: str, inputs: str = "float[b,32] x") -> GraphModel:
    weights = {name: values for name, values in WEIGHTS.items() if name in re.findall(r"\w+", body)}
    outputs = "float[] y, float[] z" if " z = " in f" {body}" else "float[] y"
    model = GraphModel.load(write_model(f"g ({inputs}) => ({outputs}) {{ {body} }}", weights))
    for node in model.nodes:
        node.name = node.outputs[0].name
    return model


# fmt: off
LOGIT_ENDS = {
    "temperature": ("l = MatMul(x, head) y = Div(l, scale)", "y"),
    "bias, temperature, clip, sigmoid": (
        "l = MatMul(x, head) b = Add(l, scale) t = Mul(b, scale) c = Clip(t) y = Sigmoid(c)", "b t c y"),
    "platt in elements": ("l = MatMul(x, head) m = Mul(l, scale) a = Add(m, scale) y = Sigmoid(a)", "m a y"),
    "platt as a linear": ("l = MatMul(x, head) p = Gemm(l, platt, scale) y = Sigmoid(p)", "p y"),
    "matrix scaling": ("l = MatMul(x, heads) p = MatMul(l, matrix) y = Softmax(p)", "p y"),
    "a head that is no calibration layer": ("h = MatMul(x, heads) y = MatMul(h, thin)", ""),
    "movements alone": ("l = MatMul(x, head) y = Squeeze(l, one)", ""),
    "movements behind what computes": ("l = MatMul(x, head) s = Sigmoid(l) y = Squeeze(s, one)", "s y"),
    "movements in front of it": ("l = MatMul(x, head) s = Squeeze(l, one) y = Sigmoid(s)", "y"),
    "sum of logits": ("l = MatMul(x, head) h = Relu(x) k = MatMul(h, head) y = Add(l, k)", "y"),
    "sum over a concatenation": (
        "l = MatMul(x, head) h = Relu(x) k = MatMul(h, heads) c = Concat<axis=1>(l, k)"
        " y = ReduceSum(c, one)", "y"),
    "hidden layers": ("h = MatMul(x, w) r = Relu(h) y = MatMul(r, head)", ""),
    "merged heads": ("l = MatMul(x, heads) s, t = Split<axis=1>(l, half) y = Sigmoid(s) z = Tanh(t)", "y z"),
    "pCTCVR": (
        "l = MatMul(x, head) y = Sigmoid(l) h = Relu(x) k = MatMul(h, head) c = Sigmoid(k) z = Mul(y, c)",
        "y c z"),
    "a logit that another tower reads": (
        "l = MatMul(x, head) y = Mul(l, scale) c = Concat<axis=1>(y, x) d = Slice(c, one, third, one)"
        " z = MatMul(d, scale)", "y"),
    "a hidden state that leaves the model": (
        "h = MatMul(x, up) r = Relu(h) z = Tanh(r) y = MatMul(r, down)", "z"),
    "a norm": ("h = MatMul(x, w) n = LayerNormalization(h, gain) y = Mul(n, scale)", "y"),
}
# fmt: on


@pytest.mark.parametrize("case", LOGIT_ENDS)
def test_logit_end(case, write_model):
    body, expected = LOGIT_ENDS[case]
    found = logit_ends(load(write_model, body))
    assert [place.node for place in found] == expected.split()


def test_sums_of_few_terms_and_the_reasons(write_model):
    # First-order weights of 26 features; the square of a sum over 32 columns of 26 features.
    few = "r = Gather(table, ids) s = Squeeze(r, third) t = ReduceSum(s, one)"
    inputs = "float[b,32] x, int64[b,26] ids"
    model = load(write_model, f"{few} l = MatMul(x, head) y = Add(t, l)", inputs)
    assert [p.node for p in logit_ends(model)] == ["t", "y"]
    many = "s = Mul(x, x) t = ReduceSum(s, one) l = MatMul(u, head) y = Add(t, l)"
    wide = load(write_model, many, "float[b,128] x, float[b,32] u")
    assert [p.node for p in logit_ends(wide)] == ["y"]
    body = "l = MatMul(x, head) p = Gemm(l, platt, scale) z = Relu(l) y = Sigmoid(p)"
    assert {p.node: p.reason for p in logit_ends(load(write_model, body))} == {
        "p": "calibrates output 'y'",
        "y": "is computed behind the last product of output 'y'",
        "z": "is computed behind the last product of output 'z'",
    }


# fmt: off
STREAMS = {
    "block": ("h = MatMul(x, w) r = Relu(h) s = Add(x, r) y = MatMul(s, head)", "s"),
    "either order": ("h = MatMul(x, w) r = Relu(h) s = Add(r, x) y = MatMul(s, head)", "s"),
    "pre-norm, two blocks": (
        "n = LayerNormalization(x, gain) h = MatMul(n, w) s = Add(x, h) m = LayerNormalization(s, gain)"
        " k = MatMul(m, v) t = Add(s, k) y = MatMul(t, head)", "s t"),
    "post-norm: the norm carries": (
        "h = MatMul(x, w) s = Add(x, h) n = LayerNormalization(s, gain) k = MatMul(n, v) t = Add(k, n)"
        " y = MatMul(t, head)", "s n t"),
    "scaled and reshaped skip": (
        "h = MatMul(x, w) s = Add(x, h) u = Unsqueeze(s, one) m = Mul(u, scale) k = MatMul(u, v)"
        " t = Add(k, m) f = Flatten(t) y = MatMul(f, head)", "s u m t"),
    "DCNv2's cross layers": (
        "a = MatMul(x, w) b = Add(a, gain) c = Mul(x, b) s = Add(c, x) d = MatMul(s, v) e = Add(d, gain)"
        " f = Mul(x, e) t = Add(f, s) y = MatMul(t, head)", "s t"),
    "a sum of three": ("h = MatMul(x, w) k = MatMul(x, v) s = Sum(x, h, k) y = MatMul(s, head)", "s"),
    "Wukong: part of what is added is concatenated": (
        "p, q = Split<axis=1>(x, sixteen) h = MatMul(x, w) a, b = Split<axis=1>(h, sixteen)"
        " c = Concat<axis=1>(a, q) s = Add(c, x) y = MatMul(s, head)", "s"),
    # Near misses.
    "two branches over one tensor": (
        "h = MatMul(x, w) k = MatMul(x, v) s = Add(h, k) y = MatMul(s, head)", ""),
    "a learned shortcut": (
        "h = MatMul(x, w) r = Relu(h) g = MatMul(r, w) k = MatMul(x, v) s = Add(g, k) y = MatMul(s, head)",
        ""),
    "no product in between": ("r = Relu(x) s = Add(x, r) y = MatMul(s, head)", ""),
    "bias": ("h = MatMul(x, w) s = Add(h, gain) y = MatMul(s, head)", ""),
    "wide and deep": (
        "l = MatMul(x, head) h = MatMul(x, w) r = Relu(h) k = MatMul(r, head) y = Add(l, k)", ""),
    "a product, not a sum": ("h = MatMul(x, w) s = Mul(x, h) y = MatMul(s, head)", ""),
}
# fmt: on


@pytest.mark.parametrize("case", STREAMS)
def test_residual_stream(case, write_model):
    body, expected = STREAMS[case]
    found = residual_streams(load(write_model, body))
    assert [place.node for place in found] == expected.split()


def ranker():
    """Cross layers, an MLP, and a head with bias, temperature and Platt scaling."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from torch import nn

    from loka_zoo.layers import Cross

    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross = nn.ModuleList([Cross(32, None), Cross(32, 8)])
            self.deep = nn.Sequential(nn.Linear(32, 16), nn.ReLU())
            self.head, self.wide = nn.Linear(16, 1), nn.Linear(32, 1)
            numbers = (nn.Parameter(torch.tensor(value)) for value in (1.5, 0.9, 0.1))
            self.temperature, self.slope, self.shift = numbers
            self.platt = nn.Linear(1, 1)

        def forward(self, x):
            y = x
            for layer in self.cross:
                y = layer(x, y)
            logit = (self.head(self.deep(y)) + self.wide(x)) / self.temperature
            return torch.sigmoid(self.slope * self.platt(logit) + self.shift).squeeze(-1)

    return Ranker()


@pytest.mark.parametrize("exporter", [pytest.param("dynamo", marks=pytest.mark.slow), "torchscript"])
def test_what_the_exporters_write(exporter, tmp_path):
    model = canonicalize(export(ranker(), (4, 32), tmp_path / "m.onnx", exporter)).model
    ends = {place.node for place in logit_ends(model)}
    assert "platt" in ends and ends.isdisjoint({"head", "wide", "deep.0"})
    ops = {model.node(name).op for name in ends}
    assert {"Add", "Mul", "Div", "Sigmoid", "Gemm"} <= ops
    # The sum of logits, the Platt layer and what comes behind it; no node of a hidden layer.
    behind = [node for node in model.sorted_nodes() if node.name in ends]
    assert [node.op for node in behind][-2:] == ["Sigmoid", "Squeeze"]
    assert sum(node.op == "Gemm" for node in behind) == 1 and "Relu" not in ops
    joins = [model.node(place.node) for place in residual_streams(model)]
    assert [node.op for node in joins] == ["Add", "Add"]
    assert all(node.outputs[0].shape[-1] == 32 for node in joins)

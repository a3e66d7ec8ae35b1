"""Time of matching and rewriting on large graphs; the checks on data are not part of it.

A synthetic ranker is made of the blocks of the zoo's models, until it has the nodes asked for: lookups of
columns, cross layers, Wukong layers with their interaction in the dear order, attention, experts, norms in
primitives, twins and no-ops as exporters leave them. Every default mod runs in order, as in
`transforms.sequence`::

    python -m benchmarks.micro.rewrite_time

The record holds processor seconds by mod, those of copying, saving and loading the graph between mods, and
the exponent of the growth of both with the number of nodes. Processor seconds, because they are the same on a
machine that does other things; the process has one thread, so on an idle one they are the wall time.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.recording import write_record
from loka_onnx.core.progress import collector_paused
from loka_onnx.graph.model import GraphModel
from loka_onnx.transforms.sequence import DEFAULT_MODS

NODES = (1000, 2000, 5000, 10000)
TOKENS, WIDTH = 16, 8
FLAT = TOKENS * WIDTH
LIMIT_S = 20.0
"""Accepted for matching and rewriting 5,000 nodes on two cores."""


class Ranker:
    """A synthetic model of about so many nodes.

    Args:
        nodes: Number of nodes.
    """

    def __init__(self, nodes: int) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, npt.NDArray[Any]] = {}
        self.module = "embeddings"
        self.columns = nodes // 40
        x = self.lookups()
        blocks = (self.wukong, self.attention, self.cross, self.experts)
        number = 0
        while len(self.nodes) < nodes - 10:
            self.module = f"layers.{number}"
            x = blocks[number % len(blocks)](x)
            number += 1
        self.module = "head"
        self.result = self.linear(self.op("Flatten", x, axis=1), FLAT, 1)

    def model(self) -> onnx.ModelProto:
        """The model."""
        ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", self.columns])
        logit = helper.make_tensor_value_info(self.result, TensorProto.FLOAT, ["batch", 1])
        constants = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, "ranker", [ids], [logit], constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Append a node; returns its output."""
        name = f"{self.module}/{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [f"{name}.out"], name=name, **attributes))
        return f"{name}.out"

    def weight(self, *shape: int) -> str:
        """A random initializer."""
        name = f"w{len(self.constants)}"
        self.constants[name] = self.random.normal(size=shape).astype(np.float32) / np.float32(shape[0] ** 0.5)
        return name

    def shared(self, name: str, value: Any) -> str:
        """An initializer that every block reads, as exporters share them."""
        array = np.asarray(value)
        self.constants.setdefault(name, array.astype(np.float32) if array.dtype == np.float64 else array)
        return name

    def linear(self, x: str, k: int, n: int) -> str:
        """A Gemm with a bias."""
        return self.op("Gemm", x, self.weight(n, k), self.weight(n), transB=1)

    def norm(self, x: str, *, centred: bool = True) -> str:
        """LayerNorm or RMSNorm over the last axis, in primitives."""
        axes, two = self.shared("axes", [-1]), self.shared("two", 2.0)
        d = self.op("Sub", x, self.op("ReduceMean", x, axes)) if centred else x
        mean = self.op("ReduceMean", self.op("Pow", d, two), axes)
        root = self.op("Sqrt", self.op("Add", mean, self.shared("epsilon", 1e-5)))
        y = self.op("Mul", self.op("Div", d, root), self.weight(WIDTH))
        return self.op("Add", y, self.weight(WIDTH)) if centred else y

    def stack(self, flat: str) -> str:
        """(batch, tokens · width) as tokens."""
        return self.op("Reshape", flat, self.shared("tokens", [-1, TOKENS, WIDTH]))

    def lookups(self) -> str:
        """One lookup a column, mixed down to the tokens of the first block."""
        axis = self.shared("axis", [1])
        rows = []
        for column in range(self.columns):
            ids = self.op("Gather", "ids", self.shared(f"column{column}", column), axis=1)
            rows.append(self.op("Unsqueeze", self.op("Gather", self.weight(10, WIDTH), ids, axis=0), axis))
        turned = self.op("Transpose", self.op("Concat", *rows, axis=1), perm=[0, 2, 1])
        mixed = self.op("MatMul", turned, self.weight(self.columns, TOKENS))
        return self.op("Transpose", mixed, perm=[0, 2, 1])

    def wukong(self, x: str) -> str:
        """FMB with the interaction in the dear order, beside LCB, and a residual."""
        turned, again = (self.op("Transpose", x, perm=[0, 2, 1]) for _ in range(2))
        dots = self.op("MatMul", self.op("MatMul", x, turned), self.weight(TOKENS, 4))
        flat = self.op("Reshape", dots, self.shared("flat4", [-1, 4 * TOKENS]))
        hidden = self.op("Relu", self.linear(flat, 4 * TOKENS, 20))
        fmb = self.op(
            "Reshape", self.linear(hidden, 20, FLAT // 2), self.shared("half", [-1, TOKENS // 2, WIDTH])
        )
        mixed = self.op("MatMul", again, self.weight(TOKENS, TOKENS // 2))
        lcb = self.op("Transpose", mixed, perm=[0, 2, 1])
        return self.norm(self.op("Add", self.op("Concat", fmb, lcb, axis=1), self.op("Identity", x)))

    def attention(self, x: str) -> str:
        """Query, key and value of one head; the product with the values as an Einsum."""
        query, key, value = (
            self.op("Add", self.op("MatMul", x, self.weight(WIDTH, WIDTH)), self.weight(WIDTH))
            for _ in range(3)
        )
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 2, 1]))
        weights = self.op("Softmax", scores, axis=-1)
        attended = self.op("Einsum", weights, value, equation="bqk,bkd->bqd")
        return self.norm(self.op("Add", attended, x), centred=False)

    def cross(self, x: str) -> str:
        """A low-rank cross layer, x ⊙ (U·Vᵀ·x + b) + x."""
        flat = self.op("Reshape", x, self.shared("flat", [-1, FLAT]))
        low = self.op("Gemm", flat, self.weight(16, FLAT), transB=1)
        crossed = self.op("Add", self.op("Mul", flat, self.linear(low, 16, FLAT)), flat)
        return self.stack(self.op("Identity", crossed))

    def experts(self, x: str) -> str:
        """Four experts and their gates; a weight that is transposed on the way."""
        flat = self.op("Reshape", x, self.shared("flat", [-1, FLAT]))
        total = ""
        for _ in range(4):
            expert = self.op("Relu", self.linear(flat, FLAT, 24))
            gate = self.op("Sigmoid", self.linear(flat, FLAT, 24))
            weighed = self.op("Mul", expert, gate)
            total = self.op("Add", total, weighed) if total else weighed
        turned = self.op("Transpose", self.weight(FLAT, 24), perm=[1, 0])
        return self.norm(self.stack(self.op("MatMul", total, turned)))


def measure(nodes: int, folder: Path) -> dict[str, Any]:
    """Seconds of every default mod on a graph of so many nodes."""
    path = folder / f"{nodes}.onnx"
    onnx.save(Ranker(nodes).model(), path)
    between: defaultdict[str, float] = defaultdict(float)

    def timed(what: str, began: float) -> None:
        between[what] += time.process_time() - began

    began = time.process_time()
    graph = GraphModel.load(path)
    timed("load", began)
    mods: dict[str, dict[str, Any]] = {}
    before = len(graph.nodes)
    for kind in DEFAULT_MODS:
        mod = kind()
        with collector_paused():
            began = time.process_time()
            found = mod.match(graph)
            match_cpu_s = time.process_time() - began
            if found.matches:
                began = time.process_time()
                graph.copy()
                timed("copy", began)
            began = time.process_time()
            for match in found.matches:
                mod.rewrite(graph, match)
            done = time.process_time()
        mods[mod.name] = {
            "match_cpu_s": match_cpu_s,
            "rewrite_cpu_s": done - began,
            "applied": len(found.matches),
            "declined": len(found.declined),
        }
        if found.matches:
            graph.save(path)
            timed("save", done)
            began = time.process_time()
            graph = GraphModel.load(path)
            timed("load", began)
    total = sum(mod["match_cpu_s"] + mod["rewrite_cpu_s"] for mod in mods.values())
    return {
        "nodes_before": before,
        "nodes_after": len(graph.nodes),
        "match_and_rewrite_cpu_s": total,
        "between_cpu_s": dict(between),
        "mods": mods,
    }


def growth(figures: dict[int, float]) -> float:
    """Exponent p of seconds ~ nodesᵖ, by least squares on logarithms."""
    return float(np.polyfit(np.log(list(figures)), np.log(list(figures.values())), 1)[0])


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", nargs="+", type=int, default=list(NODES))
    options = parser.parse_args()
    measured: dict[int, dict[str, Any]] = {}
    with TemporaryDirectory() as folder:
        for nodes in options.nodes:
            measured[nodes] = figures = measure(nodes, Path(folder))
            between = ", ".join(
                f"{what} {seconds:.2f} s" for what, seconds in figures["between_cpu_s"].items()
            )
            print(
                f"{nodes} nodes: match and rewrite {figures['match_and_rewrite_cpu_s']:.2f} s; {between}",
                flush=True,
            )
            for name, mod in figures["mods"].items():
                line = f"  {name:26} match {mod['match_cpu_s']:7.3f} s, rewrite {mod['rewrite_cpu_s']:7.3f} s"
                print(f"{line}, {mod['applied']} applied, {mod['declined']} declined", flush=True)
    summary: dict[str, Any] = {"sizes": {str(nodes): figures for nodes, figures in measured.items()}}
    if len(measured) > 1:
        summary["growth_match_and_rewrite"] = growth(
            {nodes: figures["match_and_rewrite_cpu_s"] for nodes, figures in measured.items()}
        )
        summary["growth_between"] = growth(
            {nodes: sum(figures["between_cpu_s"].values()) for nodes, figures in measured.items()}
        )
        print(
            f"growth with nodes: {summary['growth_match_and_rewrite']:.2f}, {summary['growth_between']:.2f}"
        )
    print(write_record("rewrite_time", summary, {"limit_s_at_5000": LIMIT_S}))


if __name__ == "__main__":
    main()

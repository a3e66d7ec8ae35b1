"""What `Engine.infer` costs over calling ONNX Runtime directly, by batch size.

Both are called in turns in one process, the order of each turn drawn anew, on the same session and the same
rows; what is recorded is the difference of the two within a turn. Three models, from one that computes
nothing to a ranker's tower, because the cost of a request is that of its inputs: how many there are, and what
they are made of::

    nice -n 5 python -m benchmarks.micro.runtime_overhead

The figure is the median of the differences; the spread is the range between its quartiles, and the standard
error of the median is 1.25 σ/√n with σ from the quartiles. Where the backend takes milliseconds, its own
spread is larger than the overhead: each figure has its error, and the largest of all counts. For all sizes
there is "around the call" as well: what one `Engine.infer` takes without the backend's call inside of it.
That has none of the backend's spread, and what it leaves out is what the engine changes about the call itself
(what is in the caches).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.recording import write_record
from loka_onnx.bundle.format.files import Sample
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.manifest import BatchRange, EngineEntry
from loka_onnx.runtime import Engine
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

BATCHES = (1, 8, 64, 256, 1024, 4096)
LIMIT_US = 20.0
COLUMNS = 26
"""Inputs of the model with one for each column, as in Criteo."""

Arrays = Mapping[str, npt.NDArray[Any]]


def identity() -> onnx.ModelProto:
    """Gives back its input: nothing but the cost of a call."""
    node = helper.make_node("Identity", ["x"], ["y"])
    return _model([node], {"x": (TensorProto.FLOAT, (13,))}, 13, [])


def many_inputs() -> onnx.ModelProto:
    """The sum of 26 columns of ids and of 13 numbers."""
    ids = {f"id{number}": (TensorProto.INT64, ()) for number in range(COLUMNS)}
    nodes = [helper.make_node("Cast", [name], [f"{name}f"], to=TensorProto.FLOAT) for name in ids]
    nodes.append(helper.make_node("Sum", [f"{name}f" for name in ids], ["s"]))
    nodes.append(helper.make_node("Unsqueeze", ["s", "one"], ["column"]))
    nodes.append(helper.make_node("Add", ["x", "column"], ["y"]))
    one = numpy_helper.from_array(np.array([1], np.int64), "one")
    return _model(nodes, {"x": (TensorProto.FLOAT, (13,)), **ids}, 13, [one])


def tower() -> onnx.ModelProto:
    """Three layers, 128 wide."""
    rng, nodes, weights, x = np.random.default_rng(1), [], [], "x"
    for layer in range(3):
        values = rng.standard_normal((128, 128)).astype(np.float32) / 11
        weights.append(numpy_helper.from_array(values, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [x, f"w{layer}"], [f"m{layer}"]))
        x = "y" if layer == 2 else f"r{layer}"
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [x]))
    return _model(nodes, {"x": (TensorProto.FLOAT, (128,))}, 128, weights)


MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "identity": identity,
    "27 inputs": many_inputs,
    "tower 3x128": tower,
}


def _model(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, tuple[int, ...]]],
    width: int,
    weights: list[onnx.TensorProto],
) -> onnx.ModelProto:
    described = [
        helper.make_tensor_value_info(name, kind, ["b", *tail]) for name, (kind, tail) in inputs.items()
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", width])]
    graph = helper.make_graph(nodes, "g", described, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def request_for(model: onnx.ModelProto, rows: int) -> dict[str, npt.NDArray[Any]]:
    """Rows of every input."""
    rng, request = np.random.default_rng(rows), {}
    for spec in model.graph.input:
        tail = tuple(axis.dim_value for axis in spec.type.tensor_type.shape.dim[1:])
        is_float = spec.type.tensor_type.elem_type == TensorProto.FLOAT
        values = rng.standard_normal((rows, *tail)) if is_float else rng.integers(0, 100, (rows, *tail))
        request[spec.name] = values.astype(np.float32 if is_float else np.int64)
    return request


class Described:
    """What `Engine` reads of a manifest."""

    model_digest = ""
    shared: tuple[str, ...] = ()

    def __init__(self, model: onnx.ModelProto, rows: Arrays) -> None:
        self.inputs = tuple(TensorSpec(n, str(v.dtype), (None, *v.shape[1:])) for n, v in rows.items())
        width = model.graph.output[0].type.tensor_type.shape.dim[1].dim_value
        self.outputs = (TensorSpec("y", "float32", (None, width)),)
        self.fallback = None

    def inputs_of(self, part: object) -> tuple[TensorSpec, ...]:
        """The inputs."""
        return self.inputs


class Watch:
    """A session that notes how long its calls take."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.took_ns = backend, 0

    def run(self, names: list[str], feeds: Arrays) -> object:
        """As the session, timed."""
        began = perf_counter_ns()
        answer = self._backend.run(names, feeds)
        self.took_ns = perf_counter_ns() - began
        return answer


def engine_of(model: onnx.ModelProto, session: OnnxSession) -> Engine:
    """An engine around a session, as `load` makes it, without a bundle."""
    rows = request_for(model, 1)
    entry = EngineEntry(
        "e", "onnxruntime", "", "cpu", "cpu", "", "fp32", False, BatchRange(1, max(BATCHES)),
        "", 0, "", {"y": 0.0}, None,
    )  # fmt: skip
    described: Any = Described(model, rows)
    return Engine(described, entry, session, Sample(rows, session.run(rows)))


def as_tensors(request: Arrays) -> dict[str, Any]:
    """The request in tensors of PyTorch, which lie where the arrays do."""
    import torch

    return {name: torch.from_numpy(value) for name, value in request.items()}


def compare(model: onnx.ModelProto, folder: Path, batch: int, turns: int) -> dict[str, dict[str, float]]:
    """Microseconds of each way to ask, over the backend's own call."""
    path = folder / "model.onnx"
    onnx.save(model, path)
    session = OnnxSession(path, SessionOptions(threads=1))
    backend, request = session._session, request_for(model, batch)
    counted = engine_of(model, session)
    watched = Watch(backend)
    around = engine_of(model, session)
    ways: dict[str, Callable[[], object]] = {
        "backend": lambda: backend.run(None, request),
        "metrics on": lambda: counted.infer(request),
    }
    try:
        tensors = as_tensors(request)
        ways["tensors"] = lambda: counted.infer(tensors)
    except ImportError:
        pass
    taken: dict[str, list[float]] = {name: [] for name in ways}
    outside: list[float] = []
    order = list(ways)
    for turn in range(turns + turns // 10):
        random.shuffle(order)
        for name in order:
            began = perf_counter_ns()
            answer = ways[name]()
            took_us = (perf_counter_ns() - began) / 1e3
            del answer
            if turn >= turns // 10:
                taken[name].append(took_us)
        session._session = watched
        began = perf_counter_ns()
        # Kept until the clock is read: freeing an answer is the caller's.
        answer = around.infer(request)
        outside.append((perf_counter_ns() - began - watched.took_ns) / 1e3)
        del answer
        session._session = backend
    figures = {"backend": _summary(taken["backend"]), "around the call": _summary(outside)}
    for name in ways:
        if name != "backend":
            pairs = zip(taken[name], taken["backend"], strict=True)
            figures[name] = _summary([mine - bare for mine, bare in pairs])
    return figures


def _summary(values: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(values, n=4)
    spread = quartiles[2] - quartiles[0]
    return {
        "median_us": quartiles[1],
        "quartile_low_us": quartiles[0],
        "quartile_high_us": quartiles[2],
        "median_error_us": 1.25 * spread / 1.35 / len(values) ** 0.5,
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="about, for each model and batch")
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as folder:
        for name, make in MODELS.items():
            model = make()
            figures[name] = {}
            for batch in BATCHES:
                trial = compare(model, Path(folder), batch, 30)
                each_us = 5 * max(trial["backend"]["median_us"] + 15, 20)
                turns = int(min(max(options.seconds * 1e6 / each_us, 200), 5000))
                figures[name][str(batch)] = found = compare(model, Path(folder), batch, turns)
                found["turns"] = {"count": turns}
                line = "  ".join(
                    f"{way} {value['median_us']:.1f} ± {value['median_error_us']:.1f}"
                    for way, value in found.items()
                    if way != "turns"
                )
                print(f"{name:12} batch {batch:5}  {line}  µs", flush=True)
    worst = {
        way: max(
            (found[way]["median_us"], found[way]["median_error_us"], f"{name}, batch {batch}")
            for name, batches in figures.items()
            for batch, found in batches.items()
        )
        for way in ("metrics on", "around the call", "tensors")
        if way in figures["identity"]["1"]
    }
    for way, (value, error, where) in worst.items():
        verdict = "met" if value <= LIMIT_US else "missed"
        print(f"{way}: at most {value:.1f} ± {error:.1f} µs ({where}); aim {LIMIT_US:.0f}: {verdict}")
    largest = {
        way: {"median_us": value, "median_error_us": error, "case": where}
        for way, (value, error, where) in worst.items()
    }
    settings = {
        "limit_us": LIMIT_US,
        "batches": list(BATCHES),
        "threads": 1,
        "seconds": options.seconds,
    }
    print(write_record("runtime_overhead", {"largest": largest, "models": figures}, settings))


if __name__ == "__main__":
    main()

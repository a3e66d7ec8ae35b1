"""Where fused attention pays: the rule of `inductor.fusions.attention`, measured.

Of each shape two graphs in BF16 are lowered, exported and compiled as engines are, but just in time: one with
the fused operator, one with MatMul, Mul, Softmax and MatMul. Both begin with the biases of query, key and
value and end with a row per query, as attention does in a model: what the compiler writes there anyway, it
writes in the layout that the products want. Products of weights, and masks, are left out. Requests are CUDA
graphs, both forms take turns, and recorded are median and quartiles of the time of one request among many::

    python -m benchmarks.engines.attention_times

The shapes are those of InterFormer at its production size, and some on either side of `LEAST`, of which our
own kernel takes all but those of the most keys. Others may be given as
``--shape BATCH,HEADS,QUERIES,KEYS,WIDTH``. Without a GPU ``--target cpu --rehearse`` runs all of it on tiny
ones, whose times say nothing.

Inductor replaces attention that it recognizes by PyTorch's fused kernels itself. It recognizes the formula as
one would write it in PyTorch, but not what our lowering makes of a graph; the record counts what it replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

import loka_onnx.engines.inductor.kernels.operators  # noqa: F401 (registers the fused operator)
from benchmarks.engines.cases import CASES
from benchmarks.engines.timing import (
    LAUNCHES,
    alone,
    device_clock,
    device_facts,
    kernel_times,
    summary,
    timed_in_turns,
)
from benchmarks.recording import write_record
from loka_onnx.engines.inductor.compile import torch_device
from loka_onnx.engines.inductor.fusions.attention import LEAST, OP, is_short
from loka_onnx.engines.inductor.lowering.model import lower
from loka_onnx.engines.registry import get_backend
from loka_onnx.numerics.intervals import is_tie
from loka_onnx.sessions.runner import Resident
from loka_zoo.spec import config_of

FUSED, WRITTEN = "fused", "written out"
FORMS = (FUSED, WRITTEN)
FARTHEST = 0.02
"""Largest root mean square error over that of the exact result itself. Rounding to BF16 four times (products,
factor, probabilities, result) made .002 to .004 on the CPU; attention over other keys makes far more."""
BEGAN = time.perf_counter()


@dataclass(frozen=True, order=True)
class Shape:
    """Queries (batch, heads, queries, width), and keys and values (batch, heads, keys, width)."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int

    @classmethod
    def read(cls, text: str) -> Shape:
        """From ``BATCH,HEADS,QUERIES,KEYS,WIDTH``."""
        return cls(*map(int, text.split(",")))

    @property
    def products(self) -> int:
        """Products of queries with keys, of one head."""
        return self.queries * self.keys

    @property
    def head(self) -> str:
        """What the threshold may depend on beside the number of products."""
        return f"{self.batch} examples, {self.heads} heads of {self.width}"


def interformer_shapes() -> tuple[Shape, ...]:
    """Of the case ``interformer``: its sequence with CLS tokens in front, and the pooling of its history."""
    case = CASES["interformer"]
    config = config_of(case.model, case.preset)
    (batch,), tokens, width = case.batches, config.cls + case.history, config.embedding // config.heads
    return (
        Shape(batch, config.heads, tokens, tokens, width),
        Shape(batch, config.heads, config.pma, case.history, width),
    )


SHAPES = (
    *interformer_shapes(),
    Shape(1024, 8, 32, 32, 16),
    Shape(1024, 8, 48, 48, 16),
    Shape(1024, 8, 32, 104, 16),
    Shape(1024, 8, 64, 64, 16),
    Shape(1024, 1, 32, 64, 128),
    Shape(1024, 1, 50, 50, 128),
    Shape(1024, 1, 64, 64, 128),
    Shape(1024, 2, 48, 48, 64),
    Shape(1024, 2, 64, 64, 64),
    # More keys than a tile of our own holds: PyTorch's kernels.
    Shape(1024, 8, 8, 300, 16),
    Shape(1024, 8, 12, 300, 16),
)
REHEARSAL = (Shape(2, 2, 4, 5, 8), Shape(2, 1, 60, 60, 16))


def graph_of(shape: Shape, form: str) -> onnx.ModelProto:
    """Attention of (batch, tokens, heads · width) tensors, their biases added first; BF16."""
    bf16, row = TensorProto.BFLOAT16, shape.heads * shape.width
    lengths = {"q": shape.queries, "k": shape.keys, "v": shape.keys}
    orders = {"q": [0, 2, 1, 3], "k": [0, 2, 3, 1], "v": [0, 2, 1, 3]}
    nodes: list[onnx.NodeProto] = []
    constants = [
        helper.make_tensor("scale", bf16, [], [shape.width**-0.5]),
        helper.make_tensor("rows", TensorProto.INT64, [3], [-1, shape.queries, row]),
    ]

    def op(kind: str, inputs: list[str], name: str, **attributes: Any) -> None:
        domain, _, kind = kind.rpartition("::")
        nodes.append(helper.make_node(kind, inputs, [name], f"{name}.node", domain=domain, **attributes))

    for name, tokens in lengths.items():
        split = [-1, tokens, shape.heads, shape.width]
        constants += [
            helper.make_tensor(f"{name}.bias", bf16, [row], [0.25] * row),
            helper.make_tensor(f"{name}.split", TensorProto.INT64, [4], split),
        ]
        op("Add", [name, f"{name}.bias"], f"{name}.added")
        op("Reshape", [f"{name}.added", f"{name}.split"], f"{name}.heads")
        op("Transpose", [f"{name}.heads"], f"{name}.turned", perm=orders[name])
    if form == FUSED:
        op(OP, ["q.turned", "k.turned", "v.turned"], "attended", scale=shape.width**-0.5)
    else:
        op("MatMul", ["q.turned", "k.turned"], "compared")
        op("Mul", ["compared", "scale"], "scaled")
        op("Softmax", ["scaled"], "weights", axis=-1)
        op("MatMul", ["weights", "v.turned"], "attended")
    op("Transpose", ["attended"], "joined", perm=[0, 2, 1, 3])
    op("Reshape", ["joined", "rows"], "y")
    inputs = [helper.make_tensor_value_info(n, bf16, ["batch", t, row]) for n, t in lengths.items()]
    output = helper.make_tensor_value_info("y", bf16, ["batch", shape.queries, row])
    graph = helper.make_graph(nodes, "attention", inputs, [output], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(OP.partition("::")[0], 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def compiled(graph: onnx.ModelProto, inputs: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The graph as an engine of these very shapes computes it; compiled when it is first called."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(graph, os.fspath(path))
        module = lower(path).to(inputs[0].device).eval()
    exported = torch.export.export(module, tuple(inputs), strict=False)
    run: Any = torch.compile(exported.module(check_guards=False), dynamic=False, fullgraph=True)
    return lambda: run(*inputs)


def resident(run: Callable[[], object], device: torch.device) -> Resident:
    """A request to launch again and again: on a GPU a CUDA graph."""
    run()
    if device.type == "cpu":
        return Resident(run, lambda: None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return Resident(graph.replay, torch.cuda.synchronize)


def drawn(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """Standard normal queries, keys and values, (batch, tokens, heads · width)."""
    generator = torch.Generator(device).manual_seed(0)
    row = shape.heads * shape.width
    return tuple(
        torch.randn(shape.batch, tokens, row, generator=generator, device=device).to(torch.bfloat16)
        for tokens in (shape.queries, shape.keys, shape.keys)
    )


def exact(shape: Shape, inputs: Iterable[Tensor]) -> Tensor:
    """The formula in FP64."""
    wide = [each.to(torch.float64) + 0.25 for each in inputs]
    q, k, v = (x.reshape(*x.shape[:2], shape.heads, shape.width).transpose(1, 2) for x in wide)
    weights = torch.softmax(q @ k.transpose(-1, -2) * shape.width**-0.5, dim=-1)
    return torch.matmul(weights, v).transpose(1, 2).flatten(2)


def measure(shape: Shape, device: torch.device, rounds: int) -> dict[str, Any]:
    """Both forms of one shape.

    Raises:
        RuntimeError: One of them computes something else.
    """
    # Else shapes would count as recompilations of one function, of which a few are allowed.
    torch._dynamo.reset()
    inputs = drawn(shape, device)
    runs = {form: compiled(graph_of(shape, form), inputs) for form in FORMS}
    right, off = exact(shape, inputs), {}
    before = _fused_by_the_compiler()
    for form, run in runs.items():
        (found,) = run()
        error = (found.to(torch.float64) - right).square().mean() / right.square().mean()
        off[form] = float(error.sqrt())
        if not off[form] <= FARTHEST:
            raise RuntimeError(f"{shape}, {form}: off by {off[form]:.2g}, at most {FARTHEST} is allowed")
    rewritten = _fused_by_the_compiler() - before
    del right
    residents = {form: resident(run, device) for form, run in runs.items()}
    times = {form: summary(taken) for form, taken in timed_in_turns(residents, rounds, device_clock).items()}
    return {
        **asdict(shape),
        "products": shape.products,
        "times": times,
        "written out over fused": times[WRITTEN]["median_us"] / times[FUSED]["median_us"],
        "fused is": verdict(times),
        "off": off,
        "attentions that the compiler fused by itself": rewritten,
        "kernels": {form: kernel_times(each) for form, each in residents.items()},
    }


def _fused_by_the_compiler() -> int:
    """How often Inductor has replaced products and softmax by fused attention: then both forms are one."""
    return int(torch._dynamo.utils.counters["inductor"]["fuse_attention"])


def verdict(times: Mapping[str, Mapping[str, float]]) -> str:
    """``faster`` or ``slower`` where the quartiles of both forms are apart, else ``even``."""
    fused, written = ((times[form]["low_us"], times[form]["high_us"]) for form in (FUSED, WRITTEN))
    if is_tie(fused, written):
        return "even"
    return "faster" if fused < written else "slower"


def crossover(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """From how many products on the fused form was faster.

    Args:
        found: `measure` of shapes.

    Returns:
        Under ``not faster up to`` the most products at which it was not, under ``faster from`` the least
        above these that were measured; each None where there are none.
    """
    behind = max((each["products"] for each in found if each["fused is"] != "faster"), default=None)
    ahead = [each["products"] for each in found if behind is None or each["products"] > behind]
    return {"not faster up to": behind, "faster from": min(ahead, default=None)}


def is_fused(shape: Shape) -> bool:
    """What the fusion does with it."""
    return shape.products >= LEAST or is_short(shape.queries, shape.keys, shape.width)


def figures_of(measured: Mapping[Shape, Mapping[str, Any]]) -> dict[str, Any]:
    """The record: every shape, where it pays, and where the rule decides for the slower form."""
    heads = dict.fromkeys(shape.head for shape in measured)
    by_head = {
        head: crossover([each for shape, each in measured.items() if shape.head == head]) for head in heads
    }
    return {
        "shapes": list(measured.values()),
        "crossover": {"all": crossover(list(measured.values())), **by_head},
        "least": LEAST,
        "slower form chosen": [
            asdict(shape)
            for shape, each in measured.items()
            if each["fused is"] == ("slower" if is_fused(shape) else "faster")
        ],
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", nargs="+", type=Shape.read, help="in place of all others")
    parser.add_argument("--target", default="nvidia-h100")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes")
    parser.add_argument("--out", type=Path, help="directory of the record")
    options = parser.parse_args()
    (architecture,) = get_backend("inductor").architectures(options.target)
    device = torch_device(architecture)
    settings = {
        "target": options.target,
        "device": device_facts(),
        "rounds": options.rounds,
        "launches": LAUNCHES,
        "inputs": "standard normal, BF16",
    }
    name = "attention-times-rehearsal" if options.rehearse else "attention-times"
    measured: dict[Shape, dict[str, Any]] = {}
    shapes = options.shape or (REHEARSAL if options.rehearse else SHAPES)
    with alone(options.target), torch.no_grad():
        for shape in dict.fromkeys(shapes):
            found = attempt(str(shape), partial(measure, shape, device, options.rounds))
            if found is None:
                continue
            measured[shape] = found
            times = {form: round(each["median_us"], 1) for form, each in found["times"].items()}
            tell(f"{shape}: {shape.products} products, {json.dumps(times)}, fused is {found['fused is']}")
            # Whatever happens to the next shape, this one is recorded.
            record = write_record(name, figures_of(measured), settings, options.out)
    if measured:
        tell(f"crossover: {json.dumps(figures_of(measured)['crossover'])}")
        tell(str(record))
    if len(measured) < len(set(shapes)):
        sys.exit("not every shape could be measured; see above")


def attempt(what: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """What it returns; None where it raises, which is printed: the other shapes go on."""
    try:
        return work()
    except Exception:
        tell(f"{what} failed: {traceback.format_exc()}")
        return None


def tell(what: str) -> None:
    """Print with the time since the start."""
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    main()

"""A user's features once: requests of 16 users with 128 candidates each, over the same model without.

Models of the zoo whose bottom MLP is a user tower with most of the FLOPs, and public rankers that
`benchmarks.public_rankers.prepare` wrote, which share the inputs that are equal in all rows of a user::

    python -m benchmarks.micro.shared_users --cache DIRECTORY

For each: share of the FLOPs of layers that users alone decide, on plain rows; the largest change of an
output; and how many times faster a call in request form is than on plain rows, in CPU time, FP32, after mods,
in ONNX Runtime, in turns in one process on one thread: the median and the range of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.micro.int8_tables import call_seconds
from benchmarks.recording import write_record
from loka_onnx.config import load_run_file
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.rewrite import INDEX, USERS
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.export.torch_module import export_torch
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel, is_constant
from loka_onnx.graph.shape_values import static_shape
from loka_onnx.pipeline.rows import bind_columns, fixed_widths, generated_rows, open_rows
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.requests.share_users import share_users
from loka_onnx.transforms.sequence import apply_mods

RANKERS = ("fuxictr-dcnv2", "fuxictr-finalmlp", "rechub-deepfm", "rechub-mmoe", "rechub-edcn")
TOWERS = {"half": ((512, 256), (512, 256)), "most": ((1024, 1024, 512), (256, 128))}
"""Share of FLOPs of a user tower, about: its widths, and those of the MLP over both."""
USER = "user_id"
ROWS = 1 << 14
"""Rows on which inputs are compared within a user."""


@dataclass(frozen=True)
class Case:
    """A model, and its inputs that are equal within a request."""

    name: str
    model: ModelArtifact
    shared: tuple[str, ...]


def zoo(directory: Path) -> Iterator[Case]:
    """Models of the zoo with 16 numbers of the user and two ids of the candidate."""
    from loka_zoo.dcnv2 import DCNv2
    from loka_zoo.dlrm import DLRM
    from loka_zoo.spec import DCNv2Config, DLRMConfig, FeatureSpec, WukongConfig
    from loka_zoo.wukong import Wukong

    features = FeatureSpec((("item", 1000), ("genre", 20)), tuple(f"n{i}" for i in range(16)))
    modules = {}
    for share, (tower, over) in TOWERS.items():
        modules[f"dlrm-{share}"] = DLRM(features, DLRMConfig(32, tower, over))
        modules[f"dcnv2-{share}"] = DCNv2(features, DCNv2Config(32, tower, 2, None, over, norm=False))
        modules[f"wukong-{share}"] = Wukong(features, WukongConfig(32, tower, 2, 4, 4, 8, (64,), over))
    rows = {"dense": np.zeros((2, 16), np.float32), "ids": np.zeros((2, 2), np.int64)}
    for name, module in modules.items():
        target = directory / f"{name}.onnx"
        specs = [OutputSpec("logit", OutputKind.LOGIT, None)]
        yield Case(name, export_torch(module.eval(), rows, target, specs), ("dense",))


def public(directory: Path, cache: Path, rankers: list[str]) -> Iterator[Case]:
    """Prepared rankers, with the inputs that are equal in all rows of a user."""
    for name in rankers:
        config = load_run_file(cache / name / "run.yaml")
        source = cache / name / "model.onnx"
        target, specs = directory / f"{name}.onnx", config.output_specs
        model = import_onnx(source, target, specs)
        model = import_onnx(source, target, specs, widths=fixed_widths(config, model.inputs))
        rows = open_rows(config, config.data.path or source, bind_columns(config.data.inputs, model.inputs))
        batch = next(rows.batches(ROWS))
        _, first, user = np.unique(batch.columns[USER], return_index=True, return_inverse=True)
        same = (name for name, v in batch.inputs.items() if (v == v[first][user]).all())
        yield Case(name, model, tuple(same))


def shared_flops(model: GraphModel) -> float:
    """Share of the FLOPs of layers that users alone decide, if each candidate had them."""
    flops = {True: 0, False: 0}
    for node in model.nodes:
        if node.op in {"MatMul", "Gemm"} and is_constant(node.inputs[1]):
            sizes = [n for n in static_shape(node.outputs[0]) if n is not None]
            is_users = any(USERS in str(n) for n in node.outputs[0].shape or ())
            k = next(n for n in reversed(static_shape(node.inputs[0])) if n)
            flops[is_users] += 2 * k * int(np.prod(sizes))
    return flops[True] / max(1, sum(flops.values()))


def measure(case: Case, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one model."""
    users, rows = options.users, options.users * options.candidates
    bindings = bind_columns({}, case.model.inputs, id_bounds(GraphModel.load(case.model.path)))
    drawn = generated_rows(case.model.inputs, bindings, rows)
    plain, request = directory / "plain.onnx", directory / "request.onnx"
    apply_mods(case.model, [{name: values[:512] for name, values in drawn.items()}], plain)
    graph = GraphModel.load(plain)
    said = share_users(graph, case.shared)
    graph.save(request)
    index = np.arange(rows) // options.candidates
    apart = {n: v[:users] if n in case.shared else v for n, v in drawn.items()} | {INDEX: index}
    whole = {n: v[:users][index] if n in case.shared else v for n, v in drawn.items()}
    threads = SessionOptions(threads=1)
    with OnnxSession(plain, threads) as one, OnnxSession(request, threads) as other:
        before, after = one.run(whole), other.run(apart)
        ratios = []
        for number in range(options.rounds + 1):
            turns = ((one, whole), (other, apart))
            ordered = turns if number % 2 else turns[::-1]
            times = {id(each): call_seconds(each, asked, options.calls) for each, asked in ordered}
            if number:
                ratios.append(times[id(one)] / times[id(other)])
    return {
        "shared_inputs": len(case.shared),
        "inputs": len(case.model.inputs),
        "rewrites": len(said),
        "share_of_flops": shared_flops(GraphModel.load(request)),
        "largest_change": max(float(np.abs(before[n] - after[n]).max()) for n in before),
        "times_faster": [statistics.median(ratios), min(ratios), max(ratios)],
        "plain_ms": 1e3 * times[id(one)],
    }


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="of benchmarks.public_rankers.prepare")
    parser.add_argument("--rankers", nargs="+", default=RANKERS)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=7)
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as scratch:
        cases = (*zoo(Path(scratch)), *public(Path(scratch), options.cache, options.rankers))
        for case in cases:
            figures[case.name] = measure(case, Path(scratch), options)
            print(case.name, json.dumps(figures[case.name]), flush=True)
    settings = {name: getattr(options, name) for name in ("users", "candidates", "rounds", "calls")}
    print(write_record("shared_users", figures, settings | {"threads": 1, "base": "fp32"}))


if __name__ == "__main__":
    main()

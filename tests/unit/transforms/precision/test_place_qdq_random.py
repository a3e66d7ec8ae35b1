"""Placement on random graphs: the same bits, no exact reader rounded, and nothing to do the second time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qdq_models import RTX, Placed, place_source, run_basic, sources
from random_graphs import RandomGraph
from random_movements import MovementGraph
from rewrite_models import artifact
from shape_models import feeds

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.graph.model import GraphModel
from loka_onnx.transforms.precision.place_qdq import place_qdq
from loka_onnx.transforms.precision.qdq_pairs import moved

SEEDS = st.integers(0, 2**32 - 1)
SCALES = (0.03125, 0.03125, 0.0625)
"""Few, so that tensors that meet often share one; wide enough for the values of these graphs."""


Build = Callable[[int], onnx.ModelProto]


def ranker(seed: int) -> onnx.ModelProto:
    return RandomGraph(seed).model()


def movements(seed: int) -> onnx.ModelProto:
    return MovementGraph(seed).model()


def place_random(build: Build, seed: int, folder: Path) -> tuple[ModelArtifact, Placed]:
    random = np.random.default_rng(seed)
    source = artifact(build(seed), folder / "source.onnx")
    products = [site.name for site in source.sites if site.n]
    scales = {
        name: (float(random.choice(SCALES)), float(random.choice(SCALES)))
        for name in products
        if random.random() < 0.8
    }
    return source, place_source(source, scales or {products[0]: (SCALES[0], SCALES[0])}, folder)


def check(build: Build, seed: int) -> Placed:
    with TemporaryDirectory() as folder:
        source, placed = place_random(build, seed, Path(folder))
        rows = feeds(placed.before, 7, seed=3)
        expected, found = (run_basic(model, rows) for model in (placed.before, placed.after))
        for name, values in expected.items():
            # An infinity or NaN is the graph's own, and its bits are compared like any others.
            assert values.tobytes() == found[name].tobytes(), name
        assert rounded_readers(placed.after) == rounded_readers(placed.before)
        assert len(sources(placed.after)) >= 1
        graph = GraphModel.load(Path(folder) / "placed.onnx")
        again = place_qdq(graph, [site.name for site in source.sites], RTX)
        assert [a for a in again.applied if not a.what.startswith("chain")] == []
        graph.save(Path(folder) / "again.onnx")
        assert list(onnx.load(Path(folder) / "again.onnx").graph.node) == list(placed.after.graph.node)
    return placed


def rounded_readers(model: onnx.ModelProto) -> set[tuple[str, int]]:
    """Node and position of everything but movements and Q that reads rounded values, moved or not."""
    graph = GraphModel.from_proto(onnx.ModelProto.FromString(model.SerializeToString()), Path())
    rounded: set[str] = set()
    found: set[tuple[str, int]] = set()
    for node in graph.sorted_nodes():
        reads = [index for index, tensor in enumerate(node.inputs) if tensor.name in rounded]
        is_moving = bool(reads) and all(tensor.name in rounded for tensor in moved(node)) and moved(node)
        if node.op == "DequantizeLinear" or is_moving:
            rounded |= {tensor.name for tensor in node.outputs}
        elif node.op not in {"QuantizeLinear", "Shape"}:
            found |= {(node.name, index) for index in reads}
    return found


@given(SEEDS)
@settings(max_examples=4)
def test_random_graphs_keep_their_bits(seed: int) -> None:
    check(movements, seed)


@pytest.mark.slow
@pytest.mark.parametrize("build", [movements, ranker])
@given(seed=SEEDS)
@settings(max_examples=80)
def test_many_random_graphs_keep_their_bits(build: Build, seed: int) -> None:
    check(build, seed)


@pytest.mark.slow
def test_the_graphs_meet_every_step() -> None:
    """Else the tests above would pass without it."""
    told: list[str] = []
    for seed in range(40):
        placed = check(movements, seed)
        told += [text for _, text in (*placed.applied, *placed.declined, *placed.chains)]
    for part in (
        *("hoisted in front of", "pairs made", "through a copy of", "and 1 more", "chain: "),
        *("Concat", "Flatten", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose"),
        *("as it is", "is rounded to", "several scales", "more than these values"),
    ):
        assert any(part in text for text in told), part

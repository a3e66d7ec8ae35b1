"""Placement on random graphs: the same bits, no exact reader rounded, and nothing to do the second time."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from qdq_models import RTX, Placed, place_source, run_basic, sources
from random_graphs import GraphBuilder, RandomGraph
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
def test_random_graphs_keep_their_bits(seed):
    check(movements, seed)


@pytest.mark.slow
@pytest.mark.parametrize("build", [movements, ranker])
@given(seed=SEEDS)
@settings(max_examples=50)
def test_many_random_graphs_keep_their_bits(build, seed):
    check(build, seed)


@pytest.mark.slow
def test_the_graphs_meet_every_step():
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


START = 12


class MovementGraph(GraphBuilder):
    """Builds one model of `steps` blocks; every tensor between them is (batch, width)."""

    def __init__(self, seed: int, steps: int = 14) -> None:
        super().__init__(seed)
        self.widths["x"] = START
        self.unread = {"x"}
        kinds = (
            *(self.product, self.product, self.product, self.concat, self.concat, self.split, self.choose),
            *(self.turn, self.views, self.repeat, self.compute),
        )
        for _ in range(steps):
            kinds[self.random.integers(len(kinds))]()
        for tensor in sorted(self.unread):
            self.product(tensor)
        ends = sorted(self.unread)
        self.result = self.op("Tanh", [self.op("Concat", ends, sum(self.widths[t] for t in ends), axis=1)])

    def model(self) -> onnx.ModelProto:
        return self.built(
            self.result, helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", START])
        )

    # Parts ------------------------------------------------------------------------------------------

    def op(self, kind: str, inputs: list[str], width: int | None = None, **attributes: Any) -> str:
        output = super().op(kind, inputs, width, **attributes)
        self.unread -= set(inputs)
        self.unread.add(output)
        return output

    def constant(self, values: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(values)
        return name

    def some(self) -> str:
        """One of the last tensors, so that paths become long and meet."""
        names = [name for name, width in self.widths.items() if width > 1]
        return names[int(self.random.integers(max(0, len(names) - 8), len(names)))]

    # Blocks -----------------------------------------------------------------------------------------

    def product(self, tensor: str = "") -> None:
        tensor = tensor or self.some()
        shape = (self.widths[tensor], int(self.random.choice([4, 8, 12])))
        values = self.random.normal(size=shape) / np.sqrt(shape[0])
        self.op("MatMul", [tensor, self.constant(values.astype(np.float32))], shape[1])

    def concat(self) -> None:
        parts = [self.some() for _ in range(int(self.random.integers(2, 4)))]
        self.op("Concat", parts, sum(self.widths[part] for part in parts), axis=1)

    def split(self) -> None:
        tensor = self.some()
        half = self.widths[tensor] // 2
        sizes = [half, self.widths[tensor] - half]
        first = self.op("Split", [tensor, self.constant(np.array(sizes, np.int64))], sizes[0], axis=1)
        second = f"{first}.second"
        self.nodes[-1].output.append(second)
        self.widths[second] = sizes[1]
        self.unread.add(second)

    def choose(self) -> None:
        tensor = self.some()
        width = self.widths[tensor]
        if self.random.random() < 0.5:
            chosen = self.random.integers(0, width, size=4)
            self.op("Gather", [tensor, self.constant(chosen)], 4, axis=1)
        else:
            bounds = [self.constant(np.array([value], np.int64)) for value in (1, width, 1)]
            self.op("Slice", [tensor, *bounds], width - 1)

    def turn(self) -> None:
        """Rank 3 and back, by a transposition or a product with it."""
        tensor = self.some()
        width = self.widths[tensor]
        rows = 2 if width % 2 == 0 else 1
        tokens = self.inner("Reshape", [tensor, self.constant(np.array([-1, rows, width // rows], np.int64))])
        turned = self.inner("Transpose", [tokens], perm=[0, 2, 1])
        if self.random.random() < 0.5:
            turned, width = self.inner("MatMul", [tokens, turned]), rows * rows
        self.op("Flatten", [turned], width, axis=1)

    def views(self) -> None:
        tensor = self.some()
        axis = self.constant(np.array([1], np.int64))
        self.op("Squeeze", [self.inner("Unsqueeze", [tensor, axis]), axis], self.widths[tensor])

    def inner(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        """A tensor of rank 3, which no other block reads."""
        tensor = self.op(kind, inputs, 0, **attributes)
        del self.widths[tensor]
        self.unread.discard(tensor)
        return tensor

    def repeat(self) -> None:
        tensor = self.some()
        if self.widths[tensor] <= START:
            repeats = self.constant(np.array([1, 2], np.int64))
            self.op("Tile", [tensor, repeats], 2 * self.widths[tensor])

    def compute(self) -> None:
        self.op(str(self.random.choice(["Relu", "Tanh", "Sigmoid"])), [self.some()])

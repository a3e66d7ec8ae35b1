"""Precision of a site in ONNX Runtime: types of the optimized graph, and the provider of the node.

Nothing is taken from the plan. A product that a GPU provider left to the CPU is a fallback whatever its
types, and a product between casts is read by its own operands' types.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

import onnx

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.engines.draft import GraphDraft
from loka_onnx.engines.onnx_operands import INTEGER_OPS, OperandReader, OperandSource, is_same_up_to_transpose
from loka_onnx.engines.onnxruntime.cpu_form import part_name
from loka_onnx.engines.onnxruntime.providers import PlacedNode, Provider, provider_chain, start_session
from loka_onnx.sessions.model_files import FLOAT8_TYPES, read_model
from loka_onnx.sessions.onnx_session import holds_float8, import_onnxruntime, keep_float8_exact

TYPE_NAMES = {Precision.FP32: "float", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
"""ONNX names of base precisions."""
SLOWER = "loka/slower in int8/"
"""Prefix of an engine's metadata: times of a planned INT8 product that it has in FP32."""
SHOWN = 20
"""Most nodes that a log lists."""


@dataclass(frozen=True)
class Graphs:
    """Graphs from which the precision of sites is read: the engine's original one (`before`), and the one
    that ONNX Runtime optimized (`after`; `before` where a provider compiles it). With `is_fp32`, everything
    but FP8 is FP32 whatever the plan's base, as in simulated FP8. `integers` is the graph at the optimization
    level that INT8 engines are loaded at; None without INT8.
    """

    before: OperandReader
    after: OperandReader
    is_fp32: bool
    name: str = "the graph as ONNX Runtime optimized it (BASIC)"
    integers: OperandReader | None = None


class NodePlacement:
    """Providers of the nodes; the one named `provider` should run all of them."""

    def __init__(self, provider: Provider, nodes: Sequence[PlacedNode]) -> None:
        self.provider = provider.name
        self._nodes = tuple(nodes)
        self._by_name = {node.name: node.provider for node in nodes if node.name}

    def why_elsewhere(self, node: onnx.NodeProto) -> str:
        """Reason why the provider does not run a node; empty when it does."""
        placed = self._by_name.get(node.name)
        if placed == self.provider:
            return ""
        if placed is None:
            return f"ONNX Runtime does not say which provider runs {node.op_type} '{node.name}'"
        return f"{node.op_type} '{node.name}' runs on {placed}: {self.provider} does not take it"

    def describe(self) -> str:
        """Describe the placement for the log: counts by provider, and misplaced nodes."""
        counts = Counter(node.provider for node in self._nodes)
        elsewhere = [node for node in self._nodes if node.provider != self.provider]
        lines = [f"{count} nodes on {provider}" for provider, count in sorted(counts.items())]
        lines += [f"not on {self.provider}: {node.op} '{node.name}'" for node in elsewhere[:SHOWN]]
        return "\n".join(lines)


def dump_optimized(
    engine: Path, target: Path, provider: Provider, device: int = 0, *, keeps_float8: bool = True
) -> None:
    """Write the graph as it is loaded with FP8 (higher levels change no types), or without its FP8 pairs."""
    ort = import_onnxruntime()
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    if keeps_float8:
        keep_float8_exact(settings)
    settings.optimized_model_filepath = os.fspath(target)
    external = "session.optimized_model_external_initializers"
    settings.add_session_config_entry(f"{external}_file_name", f"{target.name}.data")
    settings.add_session_config_entry(f"{external}_min_size_in_bytes", "1024")
    chain, bare = provider_chain(provider, {}, device, None), engine.with_name(f"{engine.stem}.bare.onnx")
    try:
        if not keeps_float8 and holds_float8(model := read_model(engine)):
            # Beside the engine, whose external data it reads.
            onnx.save(_without_float8_pairs(model, engine.parent), os.fspath(bare))
        start_session(bare if bare.exists() else engine, settings, chain)
    finally:
        bare.unlink(missing_ok=True)


def _without_float8_pairs(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Let readers of activations skip FP8 pairs, which ONNX Runtime would join into operators of INT8."""
    draft = GraphDraft(model, folder)
    for node in draft.nodes:
        if node.op_type == "DequantizeLinear" and draft.quantized_kind(node) in FLOAT8_TYPES:
            quantize = draft.producer(node.input[0])
            if quantize is not None and quantize.op_type == "QuantizeLinear":
                for reader, place in draft.readers(node.output[0]):
                    reader.input[place] = quantize.input[0]
    return draft.finished()


def site_precision(
    site: str, planned: Precision, graphs: Graphs, placement: NodePlacement | None = None
) -> SitePrecision:
    """Read the precision of a planned site; without a placement, everything runs on the CPU."""
    if planned is Precision.INT8:
        return _integer_precision(site, graphs)
    node = graphs.after.product(site)
    if node is None:
        # With several providers, the one that runs the fused node would be unknown.
        engaged = placement is None and graphs.is_fp32 and planned is not Precision.FP8
        if engaged and graphs.after.float_types() == {"float"}:
            evidence = "fused; the optimized graph is FP32 throughout"
            return SitePrecision(site, planned, ("float",), True, evidence)
        return SitePrecision(site, planned, (), False, f"no node of that name in {graphs.name}")
    sources = graphs.after.operands(node)
    evidence = f"{node.op_type} '{node.name}' of {graphs.name}"
    if planned is Precision.FP8:
        sources = tuple(_confirmed(source, site, graphs) for source in sources)
        engaged = len(sources) == 2 and all(source.float8 for source in sources)
        simulated, wide = "simulated: FP8 Q/DQ around an FP32 product", "not FP8: an operand lacks its Q/DQ"
        evidence = f"{simulated if engaged else wide}; {evidence}"
    else:
        base = Precision.FP32 if graphs.is_fp32 else planned
        engaged = all(source.describe() == TYPE_NAMES[base] for source in sources)
        evidence += "" if planned is base else f"; stands for {planned.upper()}, run in FP32"
    if placement is not None:
        reason = placement.why_elsewhere(node)
        evidence = reason or f"{evidence}; on {placement.provider}"
        engaged = engaged and not reason
    return SitePrecision(site, planned, tuple(source.describe() for source in sources), engaged, evidence)


def _integer_precision(site: str, graphs: Graphs) -> SitePrecision:
    """Read whether a site, and each part of it, runs in an integer kernel of the optimized graph."""
    reader, name = graphs.integers or graphs.after, "the graph as ONNX Runtime optimized it (ALL)"
    parts = takewhile(lambda node: node is not None, (reader.product(part_name(site, i)) for i in count()))
    nodes = [node for node in parts if node is not None]
    slower = graphs.before.note(SLOWER + site)
    if slower:
        return SitePrecision(
            site, Precision.INT8, ("float", "float"), False, f"not INT8, which is slower: {slower}"
        )
    if not nodes:
        return SitePrecision(site, Precision.INT8, (), False, f"no node of that name in {name}")
    node = next((node for node in nodes if node.op_type not in INTEGER_OPS), nodes[0])
    engaged = node.op_type in INTEGER_OPS
    how = "" if engaged else "not INT8: ONNX Runtime has not fused its Q/DQ, and multiplies FP32; "
    kinds = tuple(source.describe() for source in reader.operands(node))
    return SitePrecision(site, Precision.INT8, kinds, engaged, f"{how}{node.op_type} '{node.name}' of {name}")


def _confirmed(source: OperandSource, site: str, graphs: Graphs) -> OperandSource:
    """Count a folded constant as FP8 only when its values equal the FP8 weight times its scale."""
    if not source.constant:
        return source
    expected = graphs.before.dequantized_weight(site)
    if expected is None or not is_same_up_to_transpose(graphs.after.values(source.constant), expected):
        return source
    return OperandSource(source.element_type, "float8 weight, folded,", source.constant)

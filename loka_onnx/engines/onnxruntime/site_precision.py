"""Precision of a site in ONNX Runtime: types of the optimized graph, and the provider of the node.

Nothing is taken from the plan. A product that a GPU provider left to the CPU is a fallback whatever its
types, and a product between casts is read by its own operands' types.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.engines.onnx_operands import OperandReader, Source, is_same_up_to_transpose
from loka_onnx.engines.onnxruntime.provider_session import PlacedNode, start_session
from loka_onnx.engines.onnxruntime.providers import Provider, provider_chain
from loka_onnx.sessions.onnx_session import import_onnxruntime, keep_float8_exact

BIG_INITIALIZER_BYTES = "1024"
TYPE_NAMES = {Precision.FP32: "float", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
"""ONNX names of base precisions."""
SHOWN = 20
"""Most nodes that a log lists."""


@dataclass(frozen=True)
class Graphs:
    """Graphs from which the precision of sites is read.

    Attributes:
        before: The engine's original graph.
        after: The graph that ONNX Runtime optimized; `before` where a provider compiles it.
        is_fp32: Whether everything but FP8 is FP32 whatever the plan's base, as in simulated FP8.
        name: Name of `after`, for evidence.
    """

    before: OperandReader
    after: OperandReader
    is_fp32: bool
    name: str = "the graph as ONNX Runtime optimized it (BASIC)"


class Placement:
    """Providers of the nodes; `provider` should run all of them."""

    def __init__(self, provider: Provider, nodes: Sequence[PlacedNode]) -> None:
        self._provider = provider
        self._nodes = tuple(nodes)
        self._by_name = {node.name: node.provider for node in nodes if node.name}

    @property
    def provider(self) -> str:
        """ONNX Runtime's name of the provider that should run every node."""
        return self._provider.name

    def why_elsewhere(self, node: onnx.NodeProto) -> str:
        """Reason why the provider does not run a node; empty when it does."""
        placed = self._by_name.get(node.name)
        if placed == self._provider.name:
            return ""
        if placed is None:
            return f"ONNX Runtime does not say which provider runs {node.op_type} '{node.name}'"
        return f"{node.op_type} '{node.name}' runs on {placed}: {self._provider.name} does not take it"

    def describe(self) -> str:
        """Describe the placement for the log: nodes of each provider, and the first ones on other
        providers.
        """
        counts: dict[str, int] = {}
        for node in self._nodes:
            counts[node.provider] = counts.get(node.provider, 0) + 1
        left = [node for node in self._nodes if node.provider != self.provider]
        lines = [f"{count} nodes on {provider}" for provider, count in sorted(counts.items())]
        lines += [f"not on {self.provider}: {node.op} '{node.name}'" for node in left[:SHOWN]]
        return "\n".join(lines)


def dump_optimized(engine: Path, target: Path, provider: Provider, device: int = 0) -> None:
    """Write the graph at the optimization level of FP8; higher levels change no types.

    Raises:
        ModelError: ONNX Runtime refuses the model.
        EngineError: The provider does not start.
    """
    ort = import_onnxruntime()
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    keep_float8_exact(settings)
    settings.optimized_model_filepath = os.fspath(target)
    settings.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", f"{target.name}.data"
    )
    settings.add_session_config_entry(
        "session.optimized_model_external_initializers_min_size_in_bytes", BIG_INITIALIZER_BYTES
    )
    start_session(engine, settings, provider_chain(provider, {}, device, None))


def site_precision(
    site: str, planned: Precision, graphs: Graphs, placement: Placement | None = None
) -> SitePrecision:
    """Read the precision of a planned site; without a placement, everything runs on the CPU."""
    node = graphs.after.product(site)
    if node is None:
        return _missing(site, planned, graphs, alone=placement is None)
    found = _fp8(site, node, graphs) if planned is Precision.FP8 else _wide(site, planned, node, graphs)
    if placement is None:
        return found
    reason = placement.why_elsewhere(node)
    evidence = reason or f"{found.evidence}; on {placement.provider}"
    return SitePrecision(site, planned, found.operands, found.engaged and not reason, evidence)


def _missing(site: str, planned: Precision, graphs: Graphs, *, alone: bool) -> SitePrecision:
    if planned is Precision.FP8:
        return SitePrecision(site, planned, (), False, "no product of that name in the optimized graph")
    # With several providers, the one that runs the fused node would be unknown.
    if alone and graphs.is_fp32 and graphs.after.float_types() == {"float"}:
        said = "fused; the optimized graph is FP32 throughout"
        return SitePrecision(site, planned, ("float",), True, said)
    return SitePrecision(site, planned, (), False, f"no node of that name in {graphs.name}")


def _wide(site: str, planned: Precision, node: onnx.NodeProto, graphs: Graphs) -> SitePrecision:
    base = Precision.FP32 if graphs.is_fp32 else planned
    types = tuple(source.describe() for source in graphs.after.operands(node))
    engaged = all(kind == TYPE_NAMES[base] for kind in types)
    exact = "" if planned is base else f"; stands for {planned.upper()}, run in FP32"
    return SitePrecision(site, planned, types, engaged, f"{_where(node, graphs)}{exact}")


def _fp8(site: str, node: onnx.NodeProto, graphs: Graphs) -> SitePrecision:
    sources = tuple(_confirmed(source, site, graphs) for source in graphs.after.operands(node))
    engaged = len(sources) == 2 and all(source.float8 for source in sources)
    said = "simulated: FP8 Q/DQ around an FP32 product" if engaged else "not FP8: an operand lacks its Q/DQ"
    operands = tuple(source.describe() for source in sources)
    return SitePrecision(site, Precision.FP8, operands, engaged, f"{said}; {_where(node, graphs)}")


def _where(node: onnx.NodeProto, graphs: Graphs) -> str:
    return f"{node.op_type} '{node.name}' of {graphs.name}"


def _confirmed(source: Source, site: str, graphs: Graphs) -> Source:
    """Count a folded constant as FP8 only when its values equal the FP8 weight times its scale."""
    if not source.constant:
        return source
    expected = graphs.before.dequantized_weight(site)
    if expected is None or not is_same_up_to_transpose(graphs.after.constant(source.constant), expected):
        return source
    return Source(source.element_type, "float8 weight, folded,", source.constant)

"""Import of an ONNX file, the user's or an exported one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.errors import ModelError
from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.products import other_products
from loka_onnx.graph.shape_values import tensor_spec
from loka_onnx.graph.sites import find_sites
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

BECOME_SITES = frozenset({"Conv", "Einsum"})
"""Operators that are no sites, and that mods may write as products."""


def import_onnx(
    source: Path,
    target: Path,
    outputs: tuple[OutputSpec, ...],
    *,
    link_tables: bool = False,
    widths: Mapping[str, int] = MappingProxyType({}),
) -> ModelArtifact:
    """Bring an ONNX file into canonical form, with `widths` of its `open_inputs` fixed, and name its sites.

    Table files of the source are copied, or linked where `link_tables` allows it. Raises ModelError if the
    model is truncated, has no sites, a static batch, a custom operator, or lacks a judged output; or ONNX
    Runtime refuses it.
    """
    canonical = canonicalize(source, widths)
    model = canonical.model
    _check_outputs(model, outputs, source)
    _check_batch(model, source)
    sites = find_sites(model)
    others = other_products(model)
    if not any(site.n for site in sites) and not any(other.op_type in BECOME_SITES for other in others):
        raise ModelError(
            f"E0406 '{source}' has no sites",
            evidence=f"none of its {len(model.nodes)} nodes is a MatMul or Gemm of an activation",
            remedy="FP8 has nothing to offer to a model without matrix products",
        )
    digest = model.save(target, link_tables=link_tables)
    OnnxSession(target, SessionOptions(threads=1, optimize=False))
    return ModelArtifact(
        path=target,
        digest=digest,
        opset=model.opset,
        inputs=tuple(tensor_spec(tensor) for tensor in model.inputs),
        outputs=tuple(tensor_spec(tensor) for tensor in model.outputs),
        sites=sites,
        producer=canonical.producer,
        notes=canonical.notes,
        other_products=others,
    )


def _check_outputs(model: GraphModel, outputs: tuple[OutputSpec, ...], source: Path) -> None:
    present = [tensor.name for tensor in model.outputs]
    for spec in outputs:
        if spec.name not in present:
            raise ModelError(
                f"E0407 '{source}' has no output named '{spec.name}'",
                evidence=f"its outputs are {', '.join(present)}",
                remedy="name one of them under `outputs`",
            )


def _check_batch(model: GraphModel, source: Path) -> None:
    for tensor in model.inputs:
        if not tensor.shape or isinstance(tensor.shape[0], int):
            raise ModelError(
                f"E0408 input '{tensor.name}' of '{source}' has no dynamic batch",
                evidence="it has no shape" if tensor.shape is None else f"its shape is {list(tensor.shape)}",
                remedy="export the model with a dynamic first dimension",
            )

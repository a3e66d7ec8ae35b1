"""torch → ONNX, with parity measured on real rows."""

from __future__ import annotations

import importlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import ModelArtifact, OutputSpec, Parity
from loka_onnx.errors import ExportError, InternalError, MissingPackage, ModelError, line_of
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.graph.entry import OPSET
from loka_onnx.graph.storage import model_files
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

if TYPE_CHECKING:
    import torch

Arrays = Mapping[str, npt.NDArray[Any]]

PARITY_TOLERANCE = 1e-4
"""Largest accepted |ONNX − torch| relative to the larger of 1 and the largest |output|. Two FP32 libraries
that sum some thousand products in different orders differed by up to 2e-5."""

_TAKEN_FOR_ZERO = 1e-8
"""`abs_tol` of constants in onnxscript's patterns: the optimizer replaces x + c by x up to here."""


def import_torch() -> Any:
    """Return the `torch` module, or raise `MissingPackage`."""
    with MissingPackage(
        "E0410 PyTorch is not installed", remedy="pip install 'loka-onnx[export]'"
    ).in_place_of(ImportError):
        import torch
    return torch


def as_tensors(rows: Arrays) -> tuple[torch.Tensor, ...]:
    """Return arrays as tensors over the same memory; read-only ones, as columns of a file, are copied."""
    torch = import_torch()
    return tuple(torch.from_numpy(np.require(array, requirements=["C", "W"])) for array in rows.values())


def load_builder(reference: str) -> Callable[[], Any]:
    """Return the function that `module:function` names; ModelError if malformed, or there is none."""
    module_name, separator, function_name = reference.partition(":")
    if not separator or not module_name or not function_name:
        raise ModelError(
            f"E0411 '{reference}' is not of the form module:function",
            remedy="for example mymodels.ranker:build",
        )
    # The user's module runs here, and may raise anything.
    with ModelError(
        f"E0412 cannot import the model builder '{reference}'",
        remedy="run from a directory, or with a PYTHONPATH, in which the module can be imported",
    ).in_place_of(Exception, words=lambda error: f"{type(error).__name__}: {error}"):
        builder = getattr(importlib.import_module(module_name), function_name)
    if not callable(builder):
        raise ModelError(
            f"E0413 the model builder '{reference}' is not callable",
            evidence=f"it is a {type(builder).__name__}",
        )
    return builder  # type: ignore[no-any-return]


def export_torch(
    module: torch.nn.Module, rows: Arrays, target: Path, outputs: tuple[OutputSpec, ...]
) -> ModelArtifact:
    """Export a module with a dynamic batch and measure its parity with the canonical graph on all rows.

    `rows` are at least 2 examples, one array per input in the order of the module's, the batch on axis 0;
    `outputs` are in the order in which the module returns them. Weights beyond 1 GiB go beside `target`.
    Raises ExportError if the exporter refuses the module, or the graph does not agree with it; ModelError if
    the graph is refused.
    """
    torch = import_torch()
    fewest = min((len(array) for array in rows.values()), default=0)
    if fewest < 2:
        raise InternalError("an export needs at least 2 example rows", evidence=f"{fewest} were given")
    module = module.eval()
    tensors = as_tensors(rows)
    with (
        ModelError(
            f"E0414 {type(module).__name__} fails on the first {fewest} rows of the data",
            remedy="compare the ids with the sizes of the embedding tables, and the columns with the inputs "
            "that the model was trained with",
        ).in_place_of(IndexError, RuntimeError, words=lambda error: " ".join(str(error).split())[:300]),
        torch.no_grad(),
    ):
        results = module(*tensors)
    results = tuple(results) if isinstance(results, tuple | list) else (results,)
    wrong = [type(result).__name__ for result in results if not isinstance(result, torch.Tensor)]
    if wrong:
        raise ExportError(
            f"E0415 {type(module).__name__} returns a {wrong[0]}, not a tensor or a tuple of tensors",
            remedy="wrap it in a module whose forward() returns its judged outputs in order",
        )
    if len(results) != len(outputs):
        raise ExportError(
            f"E0416 the module returns {len(results)} tensors, the configuration declares "
            f"{len(outputs)} outputs",
            remedy="declare every output under `outputs`, in the order in which the module returns them",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that large tables can be linked.
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as scratch:
        raw = Path(scratch) / "raw.onnx"
        _export(module, tensors, tuple(rows), tuple(spec.name for spec in outputs), raw)
        artifact = import_onnx(raw, target, outputs, link_tables=True)
    try:
        # Of the canonical form, which the run goes on with.
        parity = measure_parity(target, rows, dict(zip((o.name for o in outputs), results, strict=True)))
    except ExportError:
        for file in model_files(target):
            file.unlink()
        raise
    return replace(artifact, parity=parity)


def _export(
    module: torch.nn.Module,
    tensors: tuple[torch.Tensor, ...],
    input_names: tuple[str, ...],
    output_names: tuple[str, ...],
    target: Path,
) -> None:
    torch = import_torch()
    from onnxscript.optimizer import fold_constants

    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    example = tuple(tensor[:3] if len(tensor) >= 3 else tensor for tensor in tensors)
    noisy = logging.getLogger("torch.onnx")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    # The exporter wraps whatever the module or a decomposition raised.
    refused = ExportError(
        f"E0417 PyTorch cannot export {type(module).__name__} to ONNX",
        remedy="see torch.onnx.export(dynamo=True); or export it yourself and pass the .onnx file",
    )
    try:
        with refused.in_place_of(Exception, words=line_of), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for optimize in (True, False):
                program = torch.onnx.export(
                    module,
                    example,
                    dynamo=True,
                    opset_version=OPSET,
                    input_names=list(input_names),
                    output_names=list(output_names),
                    dynamic_shapes=tuple({0: batch} for _ in tensors),
                    verbose=False,
                    optimize=optimize,
                )
                if not _adds_tiny_numbers(program):
                    break
            else:
                fold_constants(program.model)  # without the patterns: sequences that are known become Splits
            program.save(str(target), external_data=True)
    finally:
        noisy.setLevel(level)


def _adds_tiny_numbers(program: torch.onnx.ONNXProgram) -> bool:
    """True if the exporter's optimizer drops an addition, as of the guard in `x / (count + 1e-9)`."""
    nodes = program.exported_program.graph.nodes if program.exported_program else ()
    added = (number for node in nodes if str(node.target).startswith("aten.add") for number in node.args)
    return any(isinstance(number, float) and 0 < abs(number) <= _TAKEN_FOR_ZERO for number in added)


def measure_parity(path: Path, rows: Arrays, expected: Mapping[str, torch.Tensor]) -> Parity:
    """Return how well a graph agrees with a module; ExportError beyond tolerance, or if one is infinite."""
    got = OnnxSession(path, SessionOptions(optimize=False)).run(rows)
    worst, squares, count, largest = 0.0, 0.0, 0, 1.0
    for name, tensor in expected.items():
        reference = tensor.detach().numpy().astype(np.float64)
        wrong = ~np.isfinite(reference)
        if wrong.any():
            # No comparison says anything about rows whose output is NaN or infinite.
            raise ExportError(
                f"E0419 the module's output '{name}' is not finite",
                evidence=f"{int(wrong.sum())} of {wrong.size} values, the first in row "
                f"{int(np.argwhere(wrong)[0][0])}",
                remedy="check the checkpoint and the example rows",
            )
        difference = np.abs(got[name].astype(np.float64) - reference)
        worst = float(np.maximum(worst, difference.max()))  # unlike max(), keeps NaN
        largest = max(largest, float(np.abs(reference).max()))
        squares += float((difference**2).sum())
        count += difference.size
    tolerance = PARITY_TOLERANCE * largest
    if not worst <= tolerance:
        raise ExportError(
            "E0418 the exported graph does not agree with the module",
            evidence=f"largest difference {worst:.3g} over {count} values, tolerance {tolerance:.3g}",
            remedy="look for randomness or data-dependent control flow in forward()",
        )
    return Parity(len(next(iter(rows.values()))), worst, (squares / count) ** 0.5, tolerance)

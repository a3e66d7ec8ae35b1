"""Norms as PyTorch's exporters write them, and what the tests ask of a model before and after a mod."""

import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rewrite_models import evaluate, op_types, widened
from shape_models import feeds

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.rewrite import Declined
from loka_onnx.graph.entry import OPSET, canonicalize
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.norms.fold_batch_norm import FoldBatchNorm
from loka_onnx.transforms.norms.fold_norm_affine import FoldNormAffine
from loka_onnx.transforms.norms.fuse import FuseLayerNorm, FuseRMSNorm
from loka_onnx.transforms.sequence import apply_mods

FUSIONS: tuple[type[Mod[Any]], ...] = (FuseLayerNorm, FuseRMSNorm)
FOLDS: tuple[type[Mod[Any]], ...] = (FoldBatchNorm, FoldNormAffine)


@dataclass(frozen=True)
class Exporter:
    name: str
    opset: int

    def __str__(self) -> str:
        return f"{self.name}{self.opset}"

    def export(self, module: Any, x: np.ndarray[Any, Any]) -> onnx.ModelProto:
        """The model of ``y = module(x)`` with a dynamic batch."""
        import torch

        example = (torch.from_numpy(x),)
        known: Any = {"opset_version": self.opset, "input_names": ["x"], "output_names": ["y"]}
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            if self.name == "dynamo":
                known |= {"dynamic_shapes": ({0: torch.export.Dim("batch")},), "verbose": False}
                return torch.onnx.export(module.eval(), example, dynamo=True, **known).model_proto
            buffer = io.BytesIO()
            known["dynamic_axes"] = {"x": {0: "batch"}, "y": {0: "batch"}}
            torch.onnx.export(module.eval(), example, buffer, dynamo=False, **known)
            return onnx.load_from_string(buffer.getvalue())


DYNAMO = Exporter("dynamo", 21)
EXPORTERS = (DYNAMO, Exporter("torchscript", 11), Exporter("torchscript", 20))
"""One of each spelling: axes as an input, as an attribute, and shapes computed by other operators."""


def taken_in(model: onnx.ModelProto, folder: Path) -> ModelArtifact:
    """A foreign model in canonical form; operator sets that the entry refuses are converted before it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "foreign.onnx"
    if model.opset_import[0].version < OPSET:
        model = onnx.version_converter.convert_version(model, OPSET)
    onnx.save(model, path)
    target = folder / "canonical.onnx"
    canonicalize(path).model.save(target)
    graph = GraphModel.load(target)
    return ModelArtifact(target, graph.save(target), graph.opset, (), (), find_sites(graph), "test")


@dataclass(frozen=True)
class Outcome:
    before: onnx.ModelProto
    after: onnx.ModelProto
    path: Path
    applied: tuple[str, ...]
    declined: tuple[Declined, ...]

    @property
    def ops(self) -> list[str]:
        return op_types(self.after)

    @property
    def reasons(self) -> list[str]:
        return [declined.reason for declined in self.declined]


def fused(model: ModelArtifact, folder: Path, mods: tuple[type[Mod[Any]], ...] = FUSIONS) -> Outcome:
    """Run mods through the sequence, which checks them on FP32 rows."""
    before = onnx.load(model.path)
    result = apply_mods(model, [feeds(before)], folder / "after.onnx", [mod() for mod in mods])
    records = result.log.records
    assert not any(record.rolled_back for record in records)
    path = result.model.path
    return Outcome(
        before,
        onnx.load(path),
        path,
        tuple(applied.what for record in records for applied in record.applied),
        tuple(declined for record in records for declined in record.declined),
    )


def assert_equal(outcome: Outcome, formula: Callable[..., Any] | None = None, single: float = 5e-6) -> None:
    """Before and after in float64 by the reference evaluator, after in ONNX Runtime, and a formula.

    Float64 has 16 digits and a norm some ten operations on numbers of size 1: 1e-9 is generous, while a wrong
    epsilon or divisor shows at 1e-4.
    """
    x = feeds(outcome.before, seed=1)
    wide = {
        name: value.astype(np.float64) if value.dtype == np.float32 else value for name, value in x.items()
    }
    expected = next(iter(evaluate(widened(outcome.before), wide).values()))
    actual = next(iter(evaluate(widened(outcome.after), wide).values()))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)
    if formula is not None:
        np.testing.assert_allclose(actual, formula(*wide.values()), rtol=0, atol=1e-9)
    onnx.checker.check_model(outcome.after, full_check=True)
    # FP32 sums of ten terms of size 3: 5e-7 seen.
    run = next(iter(OnnxSession(outcome.path).run(x).values()))
    np.testing.assert_allclose(run, expected, rtol=0, atol=single)


def rewritten_in_double(model: onnx.ModelProto, mod: Mod[Any], folder: Path) -> onnx.ModelProto:
    """A model widened to float64, then rewritten: new constants are float64 as well, and not rounded."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(widened(model), folder / "wide.onnx")
    graph = GraphModel.load(folder / "wide.onnx")
    for match in mod.match(graph).matches:
        mod.rewrite(graph, match)
    graph.save(folder / "wide_after.onnx")
    return onnx.load(folder / "wide_after.onnx")


def assert_folded_equally(
    model: onnx.ModelProto, mod: Mod[Any], folder: Path, tolerance: float = 1e-9
) -> None:
    """The algebra of a mod that makes new constants, in float64 throughout."""
    after = rewritten_in_double(model, mod, folder)
    x = {name: value.astype(np.float64) for name, value in feeds(model, seed=2).items()}
    expected, actual = evaluate(widened(model), x), evaluate(after, x)
    assert list(actual) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=tolerance)

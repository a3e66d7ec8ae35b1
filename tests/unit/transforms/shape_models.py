"""Small models for the mods that change shapes: what each must rewrite, and what tests ask of the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import TensorProto
from rewrite_models import Arrays, artifact, evaluate, parse, widened

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.rewrite import RewriteRecord
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.sequence import apply_mods

IDS = 7
"""Ids are drawn below this."""
BATCH = 5


def weight(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Normal values that keep the size of an activation, other ones for every shape and seed."""
    random = np.random.default_rng([seed, *shape])
    return (random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def dyadic(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Multiples of 1/8 up to 1: sums and products of some of them are exact in FP32."""
    return (np.random.default_rng([seed, *shape]).integers(-8, 9, size=shape) / 8).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A model as text: nodes without a name get that of their output, in module ``block``; ``__`` is a dot.

    Constants are values, or the shape (a tuple) of random ones; `why` is said by a mod that leaves it alone.
    """

    body: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "float[batch,8] x"
    outputs: str = ""
    opset: int = 21
    why: Any = None

    shared: ClassVar[Mapping[str, Any]] = {}
    """Constants of all cases of a file."""

    def model(self) -> onnx.ModelProto:
        constants = {
            name: weight(*value, seed=len(name)) if isinstance(value, tuple) else value
            for name, value in {**self.shared, **self.constants}.items()
        }
        model = parse(self.body, constants, inputs=self.inputs, outputs=self.outputs, opset=self.opset)
        for node in model.graph.node:
            node.name = node.name.replace("__", ".")
        return model


@dataclass(frozen=True)
class Rewrite:
    """A model before and after one mod, the rewritten one described, and what the mod did and declined."""

    before: onnx.ModelProto
    after: onnx.ModelProto
    artifact: ModelArtifact
    record: RewriteRecord

    def reasons(self) -> dict[str, str]:
        return reasons_of(Found((), self.record.declined))

    def sites(self) -> dict[str, tuple[int, int]]:
        return {site.name: (site.k, site.n) for site in self.artifact.sites}


def feeds(model: onnx.ModelProto, batch: int = BATCH, seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    rows: Arrays = {}
    for tensor in model.graph.input:
        kind = tensor.type.tensor_type
        shape = [d.dim_value or batch for d in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        is_integer = kind.elem_type in {TensorProto.INT64, TensorProto.INT32}
        values = random.integers(0, IDS, size=shape) if is_integer else random.normal(size=shape) + 0.5
        rows[tensor.name] = np.asarray(values, dtype=dtype)
    return rows


def rewrite(model: onnx.ModelProto, mod: Mod[Any], folder: Path) -> Rewrite:
    """Apply one mod through the sequence runner, and hold the result against the model before."""
    source = artifact(model, folder / "before.onnx")
    result = apply_mods(source, [feeds(model, seed=1)], folder / "after.onnx", [mod])
    after = onnx.load(result.model.path)
    record = result.log.records[0]
    assert not record.rolled_back, record.declined
    assert_same(model, after)
    again = apply_mods(result.model, [feeds(model, seed=1)], folder / "again.onnx", [mod])
    assert again.log.records[0].applied == (), "a second run finds something"
    assert again.model.digest == result.model.digest
    return Rewrite(model, after, result.model, record)


def assert_same(
    before: onnx.ModelProto, after: onnx.ModelProto, single: float = 2e-5, batches: Sequence[int] = (1, BATCH)
) -> None:
    """Same interface, valid, and the same values: to 1e-9 in float64, to rounding in ONNX Runtime.

    `single` is for some ten operations in another order, on sums of up to 1000 terms.
    """
    onnx.checker.check_model(after, full_check=True)
    assert [(t.name, t.type) for t in after.graph.input] == [(t.name, t.type) for t in before.graph.input]
    assert [t.name for t in after.graph.output] == [t.name for t in before.graph.output]
    for batch in batches:
        rows = feeds(before, batch)
        wide = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in rows.items()}
        # The evaluator computes both branches of a sigmoid, of which one may overflow.
        with np.errstate(over="ignore", invalid="ignore"):
            expected, exact = (evaluate(widened(model), wide) for model in (before, after))
        found = run(after, rows)
        for name, values in expected.items():
            scale = max(1.0, float(np.abs(values).max(initial=0.0)))
            assert exact[name].shape == values.shape
            np.testing.assert_allclose(exact[name], values, rtol=0, atol=1e-9 * scale)
            np.testing.assert_allclose(found[name], values, rtol=0, atol=single * scale)


def run(model: onnx.ModelProto, rows: Arrays) -> Arrays:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        return OnnxSession(path).run(rows)


def match(model: onnx.ModelProto, mod: Mod[Any], folder: Path) -> Found[Any]:
    return mod.match(GraphModel.load(artifact(model, folder / "model.onnx").path))


def reasons_of(found: Found[Any]) -> dict[str, str]:
    """Why each place was left alone, by name."""
    reasons: dict[str, str] = {}
    for declined in found.declined:
        before = f"{reasons[declined.at]}; " if declined.at in reasons else ""
        reasons[declined.at] = before + declined.reason
    return reasons


def assert_left_alone(case: Case, mod: Mod[Any], folder: Path) -> None:
    """A near miss is declined with its reasons, by name, or silently."""
    found = match(case.model(), mod, folder)
    assert found.matches == ()
    assert reasons_of(found) == (case.why or {})

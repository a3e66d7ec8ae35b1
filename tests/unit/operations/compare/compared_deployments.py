"""Rankers whose answers are known in float64, as ONNX files and as bundles, with rows and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from loka_onnx.bundle.writer import BundleContents, BundleEngine, Expectation, write_bundle
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec, TensorSpec
from loka_onnx.core.digests import digest_file
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Choice, Evaluation, Latency, Route, TargetChoice
from loka_onnx.core.formats import Precision
from loka_onnx.core.manifest import BatchRange
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.errors import LokaError
from loka_onnx.operations.compare.deployments import CompareOptions, compare
from loka_onnx.operations.compare.difference import Difference, Row
from loka_onnx.operations.compare.rows import RowOptions
from loka_onnx.operations.compare.sides import Opening
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

WIDTH, ITEMS, DIM, ROWS = 4, 10, 3, 3000
CTR = OutputSpec("ctr", OutputKind.LOGIT, "clicked", "importance", budget=0.01)
CVR = OutputSpec("cvr", OutputKind.PROBABILITY, "bought", budget=0.01)
SPEND = OutputSpec("spend", OutputKind.REGRESSION, "amount", budget=0.01)
JUDGED = (CTR, CVR, SPEND)
BATCH = BatchRange(1, 512)
OUTPUTS = ("ctr", "cvr", "spend")
BY = 0.02
"""How far the weights of the other deployment lie."""


@dataclass(frozen=True)
class Weights:
    """Of a linear ranker: (10, 3), (7, 3) and (3,)."""

    table: np.ndarray
    heads: np.ndarray
    bias: np.ndarray

    def moved(self, by: float, seed: int = 3) -> Weights:
        """The same with other heads."""
        change = np.random.default_rng(seed).standard_normal(self.heads.shape)
        return Weights(self.table, (self.heads + by * change).astype(np.float32), self.bias)

    def scores(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """(rows, 3) in float64: the logits of ctr and cvr, and spend."""
        dense = np.stack([columns[f"d{i}"] for i in range(WIDTH)], axis=1).astype(np.float64)
        joined = np.concatenate([dense, self.table.astype(np.float64)[columns["item"]]], axis=1)
        return joined @ self.heads.astype(np.float64) + self.bias


def make_weights(seed: int = 0, items: int = ITEMS) -> Weights:
    random = np.random.default_rng(seed)
    heads = random.standard_normal((WIDTH + DIM, 3)).astype(np.float32) / 2
    table = random.standard_normal((items, DIM)).astype(np.float32)
    return Weights(table, heads, np.array([-1.0, -0.5, 0.25], np.float32))


def make_rows(rows: int = ROWS, seed: int = 1) -> dict[str, np.ndarray]:
    """Inputs, labels drawn from the answers of the weights of seed 0, weights, groups and slices."""
    random = np.random.default_rng(seed)
    columns = {f"d{i}": random.standard_normal(rows).astype(np.float32) for i in range(WIDTH)}
    columns["item"] = random.integers(0, ITEMS, rows)
    answers = make_weights().scores(columns)
    clicked, bought = (random.random((rows, 2)) < 1 / (1 + np.exp(-answers[:, :2]))).T
    return {
        **columns,
        "clicked": clicked.astype(np.float32),
        "bought": bought.astype(np.float32),
        "amount": (answers[:, 2] + random.standard_normal(rows)).astype(np.float32),
        "importance": random.uniform(0.5, 2.0, rows).astype(np.float32),
        "request": np.arange(rows) // 3,
        "country": np.where(np.arange(rows) % 3 == 0, 7, 8),
    }


def write_rows(path: Path, columns: Mapping[str, np.ndarray], drop: Sequence[str] = ()) -> Path:
    kept = {name: values for name, values in columns.items() if name not in drop}
    np.savez(path, **kept)
    return path


INPUTS = {"dense": tuple(f"d{i}" for i in range(WIDTH))}
"""Columns of the input that is not of its column's name."""


def write_model(path: Path, weights: Weights, outputs: Sequence[str] = OUTPUTS, width: int = WIDTH) -> Path:
    """dense (B, 4) and item (B,) to the named outputs, each (B,)."""
    model = parsed(
        "found = Gather(table, item)  joined = Concat<axis=1>(dense, found)"
        " scores = Gemm(joined, heads, bias)  s0, s1, s2 = Split<axis=1, num_outputs=3>(scores)"
        " ctr = Squeeze(s0, one)  logit = Squeeze(s1, one)  cvr = Sigmoid(logit)  spend = Squeeze(s2, one)",
        {
            "table": weights.table,
            "heads": np.concatenate([weights.heads[:1].repeat(width - WIDTH, axis=0), weights.heads]),
            "bias": weights.bias,
            "one": np.array([1]),
        },
        inputs=f"float[batch,{width}] dense, int64[batch] item",
        outputs=", ".join(f"float[batch] {name}" for name in outputs),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def write_deployment(  # noqa: PLR0917
    root: Path,
    plans: Mapping[str, Weights],
    routes: Mapping[int, str] | None = None,
    judged: tuple[OutputSpec, ...] = JUDGED,
    batch: BatchRange = BATCH,
    exported: Weights | None = None,
    backend: str = "onnxruntime",
) -> Path:
    """A bundle whose engines are the rankers of these weights by plan, the first plan's the main one.

    `routes` are plans by the largest number of rows; the exported model has the weights of the first plan, if
    no others are given.
    """
    model = write_model(root / "model.onnx", exported or next(iter(plans.values())))
    digest = digest_file(model)
    sample = {"dense": np.ones((2, WIDTH), np.float32) / 8, "item": np.zeros(2, np.int64)}
    engines = {plan: _engine(root, plan, weights, sample, backend) for plan, weights in plans.items()}
    main = next(iter(engines.values())).artifact
    table = tuple(Route(rows, engines[plan].artifact.id, plan) for rows, plan in (routes or {}).items())
    inputs = (TensorSpec("dense", "float32", (None, WIDTH)), TensorSpec("item", "int64", (None,)))
    outputs = tuple(TensorSpec(name, "float32", (None,)) for name in OUTPUTS)
    contents = BundleContents(
        root=root,
        model=ModelArtifact(Path("model.onnx"), digest, 21, inputs, outputs, (), "test"),
        judged=judged,
        batch=batch,
        engines=tuple(engines.values()),
        fallback=_expected(model, sample),
        sample=sample,
        plans=PlanSet(tuple(PrecisionPlan(p, digest, Precision.FP32, (), {}, 0.0) for p in plans)),
        choice=Choice((TargetChoice("cpu", main.id, main.plan, "test", "measured", (), table),)),
        report=(),
        lineage=(),
        versions={"loka-onnx": "0", "onnxruntime": "1.31.1"},
    )
    return write_bundle(contents, root / "bundle")


def _engine(
    root: Path, plan: str, weights: Weights, sample: Mapping[str, np.ndarray], backend: str
) -> BundleEngine:
    path = write_model(root / "engines" / f"{plan}.onnx", weights)
    file = (path.relative_to(root), path.stat().st_size, digest_file(path))
    artifact = EngineArtifact(
        backend, plan, "cpu", "cpu", BuildStatus.READY, False, *file, "1.31.1", (), build_seconds=0.0
    )
    timed = tuple(Latency(batch, 9.0, 9.5, 10.0, 50, "cpu", True) for batch in (8, 32))
    evaluation = Evaluation(
        artifact.id, "onnxruntime", plan, "cpu", "certification", 0, (), timed, "measured"
    )
    return BundleEngine(artifact, _expected(path, sample), evaluation)


def _expected(model: Path, sample: Mapping[str, np.ndarray]) -> Expectation:
    outputs = OnnxSession(model, SessionOptions(threads=1)).run(sample)
    return Expectation(outputs, dict.fromkeys(outputs, 1e-4))


@dataclass(frozen=True)
class Place:
    """Deployment `a`, `b` with other heads but the same exported model, and rows for both."""

    a: Path
    b: Path
    rows: Path
    columns: dict[str, np.ndarray]


def make_place(root: Path) -> Place:
    weights, columns = make_weights(), make_rows()
    a = write_deployment(root / "a", {"fp32": weights})
    b = write_deployment(root / "b", {"other": weights.moved(BY)}, exported=weights)
    return Place(a, b, write_rows(root / "rows.npz", columns), columns)


def options(*, latency: bool = False, batches: tuple[int, ...] = (), **rows: object) -> CompareOptions:
    return CompareOptions(
        RowOptions(**{"inputs": INPUTS, **rows}),  # type: ignore[arg-type]
        Opening(threads=1),
        batches,
        latency,
        seconds=0.05,
    )


def refused(kind: type[LokaError], a: Path, b: Path, rows: Path, options: CompareOptions) -> LokaError:
    with pytest.raises(kind) as error:
        compare(a, b, rows, options)
    return error.value


def named(found: Difference, what: str, pair: int = 0) -> Row:
    """A row of the accuracy of one pair of engines."""
    section = [section for section in found.sections if section.name == "accuracy"][pair]
    (item,) = [item for item in section.rows if item.what == what]
    return item


def ends(found: Difference, what: str, pair: int = 0) -> tuple[float, ...]:
    """Estimate and ends of the interval of a row."""
    verdict = named(found, what, pair).verdict
    assert verdict is not None
    return verdict.numbers

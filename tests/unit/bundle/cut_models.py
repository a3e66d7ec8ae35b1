"""A ranker with one table, cut at its embeddings, as the contents of a bundle."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx_text import parsed
from sample_run import SampleRun

from loka_onnx.bundle.writer import BundleContents, BundleEngine, BundleLookup, Expectation
from loka_onnx.core.artifact import ModelArtifact, TensorSpec
from loka_onnx.core.digests import digest_file
from loka_onnx.core.rewrite import Part
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.graph.storage import model_digest
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.lookups.split_sparse import SparseSplit, describe_halves, split_sparse, verify_split

TABLE = np.arange(40, dtype=np.float32).reshape(10, 4) / 7
WEIGHT = np.array([[1.0], [-2.0], [0.5], [0.25], [3.0], [-1.0], [0.125]], np.float32)
LOOKED_UP = "embeddings.item"


def request(rows: int, seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"x": random.standard_normal((rows, 3)).astype(np.float32), "item": random.integers(0, 10, rows)}


def answer(asked: dict[str, np.ndarray]) -> np.ndarray:
    """The ranker's definition in float64: (rows, 1)."""
    joined = np.concatenate([asked["x"], TABLE[asked["item"]]], axis=1).astype(np.float64)
    return np.asarray(joined @ WEIGHT.astype(np.float64))


def cut_contents(sample: SampleRun, root: Path, *, is_external: bool = False) -> BundleContents:
    """What a run with the cut hands over, with one engine of ONNX Runtime on the CPU."""
    model = parsed(
        "e = Gather<axis=0>(table, item)  c = Concat<axis=1>(x, e)  [over] ctr = MatMul(c, w)",
        {"table": TABLE, "w": WEIGHT},
        inputs="float[batch,3] x, int64[batch] item",
        outputs="float[batch,1] ctr",
    )
    # The parser's names have no slash.
    model.graph.node[0].name = f"{LOOKED_UP}/gather"
    path = root / "model" / "whole.onnx"
    path.parent.mkdir(parents=True)
    outside = {"save_as_external_data": True, "location": "tables.bin", "size_threshold": 100}
    onnx.save(model, path, **outside if is_external else {})
    whole = ModelArtifact(
        path=path,
        digest=model_digest(path),
        opset=21,
        inputs=(TensorSpec("x", "float32", (None, 3)), TensorSpec("item", "int64", (None,))),
        outputs=(TensorSpec("ctr", "float32", (None, 1)),),
        sites=find_sites(GraphModel.load(path)),
        producer="cut_models",
    )
    split, rows = split_sparse(GraphModel.load(path)), request(8)
    assert isinstance(split, SparseSplit)
    assert verify_split(split, path, [rows], root / "model") is None
    halves = describe_halves(split, whole, root / "model")
    expected = Expectation(OnnxSession(path).run(rows), {"ctr": 1e-5})
    dense = {"path": Path("model/dense.onnx"), "digest": digest_file(halves.dense.path), "part": Part.DENSE}
    lookup = replace(halves, lookup=replace(halves.lookup, path=Path("model/lookup.onnx")))
    return replace(
        sample.contents,
        root=root,
        model=replace(whole, path=Path("model/whole.onnx")),
        engines=(BundleEngine(replace(sample.contents.engines[1].artifact, **dense), expected),),
        fallback=expected,
        sample=rows,
        lookup=BundleLookup(lookup, {LOOKED_UP: TABLE[rows["item"]]}),
    )

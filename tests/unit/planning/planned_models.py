"""A model with every kind of site, and profiles of it with chosen sensitivities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import RatioMoments
from loka_onnx.core.profile import (
    DeltaSums,
    Draws,
    Profile,
    Sampling,
    Sensitivity,
    SensitivityName,
    SiteGroup,
    SiteProfile,
)
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.core.statistics import TensorRange
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites

CTR = OutputSpec("ctr", OutputKind.LOGIT, "clicked", budget=0.001)
CVR = OutputSpec("cvr", OutputKind.LOGIT, "bought", budget=0.001)

BODY = """
    [fc0] h = MatMul(x, w0)
    [ln] n = LayerNormalization(h, g)
    [fc1] a = MatMul(n, w1)
    u = Unsqueeze(a, one)
    t = Transpose<perm=[0,2,1]>(u)
    [dot] d = MatMul(t, u)
    f = Flatten(d)
    [fc2] b = MatMul(f, w2)
    [thin] ctr = MatMul(b, w3)
"""
WEIGHTS = {"w0": (32, 64), "w1": (64, 16), "w2": (256, 16), "w3": (16, 1)}
FLOPS = {"fc0": 2 * 32 * 64, "fc1": 2 * 64 * 16, "fc2": 2 * 256 * 16}
"""Per example, of the sites that can run in FP8."""
UNITS = 2**20
"""A power of two: then the moments of a KL without spread give a standard error of exactly 0."""
FIXED = Sampling(UNITS, 1, UNITS)


def write_model(folder: Path) -> ModelArtifact:
    """Sites fc0, ln, fc1, dot (an interaction), fc2 and thin (N = 1)."""
    text = (
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[batch,32] x) => (float[batch,1] ctr) {{{BODY}}}'
    )
    proto = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    constants = {name: random.normal(size=shape).astype(np.float32) for name, shape in WEIGHTS.items()}
    constants |= {"g": np.ones(64, np.float32)}
    proto.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in constants.items())
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    for node in proto.graph.node:
        node.name = node.name or f"inner/{node.output[0]}"
    path = folder / "model.onnx"
    onnx.save(proto, path)
    graph = GraphModel.load(path)
    return ModelArtifact(path, graph.save(path), 21, (), (), find_sites(graph), "test")


def kl_of(value: float, error: float = 0.0, units: int = UNITS) -> RatioMoments:
    """Moments of a ratio with that value and that standard error: ψ² sums to error²·n·(n − 1) for B = 1."""
    squares = value * value * units + error * error * units * (units - 1)
    sums = (value * units, units, squares, value * units, units)
    return RatioMoments(units, units, *(ExactSum.of([float(s)]) for s in sums))


NO_KL = kl_of(0.0)


def sensitivity(
    recipe: str, output: str, kl: RatioMoments, draws: Draws | None = None, denominator: str = "loss"
) -> Sensitivity:
    delta = DeltaSums(*(ExactSum.of([s]) for s in (1000.0, 0.0, 0.1)))
    return Sensitivity.of(SensitivityName(recipe, output, denominator), delta, kl, None, draws)


def profile_of(
    model: ModelArtifact,
    kl: Mapping[str, RatioMoments],
    outputs: tuple[OutputSpec, ...] = (CTR,),
    scale: float = 0.0078125,
) -> Profile:
    """A profile with the given KL per site (zero for the others), the same for every output."""
    recipes = {s.name: "bf16" if s.kind is SiteKind.NORM else PER_CHANNEL_WEIGHT.id for s in model.sites}
    entries = tuple(
        SiteProfile(
            site.name,
            {},
            (),
            tuple(sensitivity(recipes[site.name], spec.name, kl.get(site.name, NO_KL)) for spec in outputs),
        )
        for site in model.sites
    )
    tensors = {o.tensor: scale for site in model.sites for o in site.operands if not o.constant}
    scales = {PER_CHANNEL_WEIGHT.activation_id: tensors}
    return Profile(
        model.digest, "data", 1000, 1000, FIXED, False, entries, {}, scales, {}, (), (), magnitudes_of(model)
    )


def magnitudes_of(model: ModelArtifact, **others: TensorRange) -> dict[str, TensorRange]:
    """Every tensor reaches 10, but for the others; what is divided by is at least 0.5."""
    graph = GraphModel.load(model.path)
    computed = [tensor for node in graph.nodes for tensor in node.outputs]
    names = [t.name for t in (*graph.inputs, *computed) if t.dtype == np.float32]
    return dict.fromkeys(names, TensorRange(10.0, 0.5)) | others


def linear(name: str, k: int = 16, n: int = 16, rows: int = 1) -> Site:
    operands = (Operand(f"{name}.x", 0, False, 1, (None, k)), Operand(f"{name}.w", 1, True, 0, (k, n)))
    return Site(name, SiteKind.LINEAR, "MatMul", operands, f"{name}.y", k, n, rows)


def norm(name: str) -> Site:
    return Site(name, SiteKind.NORM, "LayerNormalization", (Operand("x", 0, False, None, ()),), "y", 8, 0, 1)


def group(tensor: str, sites: Sequence[str], kl: Mapping[str, RatioMoments]) -> SiteGroup:
    return SiteGroup(tensor, tuple(sites), tuple(sensitivity("r", name, m) for name, m in kl.items()))


def bare_profile(
    kl: Mapping[str, Mapping[str, RatioMoments]],
    groups: Sequence[SiteGroup] = (),
    sampling: Sampling = FIXED,
    draws: Draws | None = None,
) -> Profile:
    """A profile that knows nothing but KL, by site and output."""
    entries = tuple(
        SiteProfile(name, {}, (), tuple(sensitivity("r", output, m, draws) for output, m in by.items()))
        for name, by in kl.items()
    )
    return Profile("model", "data", 1, 1, sampling, False, entries, {}, {}, {}, tuple(groups))

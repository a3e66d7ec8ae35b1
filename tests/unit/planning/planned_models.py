"""A model with every kind of site, and profiles of it with chosen sensitivities."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
from onnx import numpy_helper

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import RatioMoments
from loka_onnx.core.plan import Verdict
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
from loka_onnx.planning.costs import LABELLED_ALLOWANCE
from loka_onnx.planning.judging import judge_sites

CTR = OutputSpec("ctr", OutputKind.LOGIT, "clicked", budget=0.001)
CVR = OutputSpec("cvr", OutputKind.LOGIT, "bought", budget=0.001)

TEXT = """(float[batch,32] x) => (float[batch,1] ctr) {
    [fc0] h = MatMul(x, w0)
    [ln] n = LayerNormalization(h, g)
    [fc1] a = MatMul(n, w1)
    u = Unsqueeze(a, one)
    t = Transpose<perm=[0,2,1]>(u)
    [dot] d = MatMul(t, u)
    f = Flatten(d)
    [fc2] b = MatMul(f, w2)
    [thin] ctr = MatMul(b, w3)
}"""
WEIGHTS = {"w0": (32, 64), "w1": (64, 16), "w2": (256, 16), "w3": (16, 1)}
FLOPS = {"fc0": 2 * 32 * 64, "fc1": 2 * 64 * 16, "fc2": 2 * 256 * 16}
"""Per example, of the sites that can run in FP8."""
UNITS = 2**20
"""A power of two: then the moments of a KL without spread give a standard error of exactly 0."""
FIXED = Sampling(UNITS, 1, UNITS)


def graph_of(path: Path, text: str, constants: Mapping[str, npt.ArrayLike]) -> GraphModel:
    """Write a model given as text; floating constants in FP32, ``__`` in a node's name stands for a slash."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    for name, given in constants.items():
        values = np.asarray(given)
        stored = values.astype(np.float32) if values.dtype == np.float64 else values
        proto.graph.initializer.append(numpy_helper.from_array(stored, name))
    for node in proto.graph.node:
        node.name = node.name.replace("__", "/") or f"inner/{node.output[0]}"
    onnx.save(proto, path)
    return GraphModel.load(path)


def artifact_of(path: Path, text: str, constants: Mapping[str, npt.ArrayLike]) -> ModelArtifact:
    graph = graph_of(path, text, constants)
    return ModelArtifact(path, graph.save(path), 21, (), (), find_sites(graph), "test")


def write_model(folder: Path) -> ModelArtifact:
    """Sites fc0, ln, fc1, dot (an interaction), fc2 and thin (N = 1)."""
    random = np.random.default_rng(0)
    constants = {name: random.normal(size=shape) for name, shape in WEIGHTS.items()}
    return artifact_of(folder / "model.onnx", TEXT, constants | {"g": np.ones(64), "one": np.array([1])})


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


def profile_of(model, kl, outputs=(CTR,), scale=0.0078125):
    """A profile with the given KL per site (zero for the others), the same for every output."""
    recipes = {s.name: "bf16" if s.kind is SiteKind.NORM else PER_CHANNEL_WEIGHT.id for s in model.sites}

    def entry(name: str) -> SiteProfile:
        of_outputs = (sensitivity(recipes[name], spec.name, kl.get(name, NO_KL)) for spec in outputs)
        return SiteProfile(name, {}, (), tuple(of_outputs))

    entries = tuple(entry(site.name) for site in model.sites)
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


def bare_profile(kl, groups=(), sampling=FIXED, draws=None):
    """A profile that knows nothing but KL, by site and output."""
    entries = tuple(
        SiteProfile(name, {}, (), tuple(sensitivity("r", output, m, draws) for output, m in by.items()))
        for name, by in kl.items()
    )
    return Profile("model", "data", 1, 1, sampling, False, entries, {}, {}, {}, tuple(groups))


ALLOWED = CTR.budget * (1 - LABELLED_ALLOWANCE)

Moments = Mapping[str, Mapping[str, RatioMoments]]


def judged(sites, profile, outputs=(CTR,), confidence=0.95):
    return judge_sites(sites, (), profile, outputs, confidence)


def safe(sites: Sequence[Site], profile: Profile, outputs: tuple[OutputSpec, ...] = (CTR,)) -> set[str]:
    return {name for name, found in judged(sites, profile, outputs).items() if found.verdict is Verdict.SAFE}


def exactly(parts: Mapping[str, float]) -> Moments:
    """KL without error, in parts of what is allowed."""
    return {name: {"ctr": kl_of(part * ALLOWED)} for name, part in parts.items()}


def moments_of(estimated: Mapping[str, tuple[float, float]]) -> Moments:
    return {n: {"ctr": kl_of(v * ALLOWED, e * ALLOWED)} for n, (v, e) in estimated.items()}

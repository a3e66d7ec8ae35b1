"""A model with every kind of site, and profiles of it with chosen sensitivities."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.intervals import Interval
from loka_onnx.core.profile import Profile, SiteProfile
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT
from loka_onnx.core.sensitivity import Sensitivity
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.core.statistics import RangeStats
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


def around(value: float, half_width: float = 0.0) -> Interval:
    return Interval(value, value - half_width, value + half_width, 0.95, 1000)


def profile_of(
    model: ModelArtifact, kl: Mapping[str, Interval], outputs: tuple[OutputSpec, ...] = (CTR,)
) -> Profile:
    """A profile with the given KL per site (zero for the others), the same for every output."""
    sites = tuple(
        SiteProfile(
            site.name,
            {o.tensor: RangeStats(100, 3.0, -3.0, 2.0, 0.0, 100.0) for o in site.operands},
            (),
            tuple(sensitivity(site, spec.name, kl.get(site.name, around(0.0))) for spec in outputs),
        )
        for site in model.sites
    )
    return Profile(model.digest, "data", 1000, 1000, False, sites, {}, {})


def sensitivity(site: Site, output: str, kl: Interval) -> Sensitivity:
    recipe = "bf16" if site.kind is SiteKind.NORM else PER_CHANNEL_WEIGHT.id
    return Sensitivity(recipe, output, "loss", 0.01, 0.0, kl, None)


def linear(name: str, k: int, n: int, rows: int = 1) -> Site:
    operands = (Operand(f"{name}.x", 0, False, 1, (None, k)), Operand(f"{name}.w", 1, True, 0, (k, n)))
    return Site(name, SiteKind.LINEAR, "MatMul", operands, f"{name}.y", k, n, rows)


def bare_profile(kl: Mapping[str, Mapping[str, Interval]]) -> Profile:
    """A profile that knows nothing but KL, by site and output."""
    sites = tuple(
        SiteProfile(
            name,
            {},
            (),
            tuple(Sensitivity("r", output, "loss", 0.0, 0.0, value, None) for output, value in by.items()),
        )
        for name, by in kl.items()
    )
    return Profile("model", "data", 1, 1, False, sites, {}, {})

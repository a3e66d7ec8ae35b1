"""Two linears in FP8, compiled with an operator of another package for each, and what they compute."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "contract"))

from tiny_models import GraphWriter, TinyModel, make_plan, write_sample

from loka_onnx.core.formats import Precision
from loka_onnx.core.site import SiteKind
from loka_onnx.engines.inductor import compile as compiling
from loka_onnx.engines.inductor.lowering.strategies import PerSite, ProductStrategy, ScaledMatMul
from loka_onnx.engines.request import BatchRange, BuildRequest

LAYERS = (("fc0", 64, 48, 1), ("fc1", 48, 32, None))
"""Name, K, N, and the axis of the scales: the second has one for its whole weight."""


def two_linears(folder: Path) -> TinyModel:
    """ReLU follows each, and is fused with it."""
    folder.mkdir(parents=True)
    w = GraphWriter(Precision.BF16)
    x = w.enter("x")
    for name, k, n, axis in LAYERS:
        x = w.op("MatMul", [w.quantized(x, f"{name}/x"), w.float8_weight(name, (k, n), axis)], name)
        w.site(name, SiteKind.LINEAR, k, n, x)
        x = w.op("Relu", [x], f"relu/{name}")
    w.leave(x)
    path = w.save(folder / "model.onnx", {"x": (64,)})
    plan = make_plan(tuple(w.sites), base=Precision.BF16, fp8=("fc0", "fc1"))
    return TinyModel(path, plan, tuple(w.sites), write_sample(folder / "sample.npz", {"x": (64,)}))


def compiled(model: TinyModel, into: Path, architecture: str, choices: Mapping[str, ProductStrategy]) -> Path:
    """The engine that has these products, in this process: a build of its own would choose by timing."""
    compilers = compiling.Compilers.find()
    assert compilers is not None
    into.mkdir(parents=True)
    request = BuildRequest(
        model=model.path,
        plan=model.plan,
        sites=model.sites,
        target=architecture,
        architecture=architecture,
        batch=BatchRange(1, 8, 16, (4, 8)),
        output=into,
        sample=model.sample,
        relative_to=into.parent,
    )
    products = PerSite(choices, ScaledMatMul())
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # PyTorch's compiler uses what PyTorch has deprecated.
        warnings.simplefilter("ignore")
        for name, value in compilers.environment.items():
            patch.setenv(name, value)
        patch.setattr(compiling, "chosen_products", lambda build, model: lambda sizes: products)
        return compiling.compile_engine(request, into, compilers)


def expected(model: TinyModel, x: Any) -> Any:
    """The graph in float64; rounded to FP8, and to BF16 by the products, but not between what is fused."""
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(model.path).graph.initializer}
    value = torch.from_numpy(x)
    for name, *_ in LAYERS:
        scale, columns, weight = (
            torch.from_numpy(stored[f"{name}/{each}"].astype(np.float64))
            for each in ("x/scale", "w_scale", "w_fp8")
        )
        narrow = (value.double() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
        value = torch.relu((narrow * scale) @ (weight * columns)).to(torch.bfloat16)
    return value.float().numpy()

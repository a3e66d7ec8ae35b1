"""Which sites are switched on together."""

from __future__ import annotations

from dataclasses import replace

from small_models import BODY, artifact_of

from loka_onnx.calibration.effects.switchable import Switch, units_of
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.graph.model import GraphModel


def units(folder, body: str = BODY, **recipes: Recipe):
    artifact = artifact_of(folder, body)
    switches = [Switch(site, recipes.get(site.name, PER_TENSOR)) for site in artifact.sites]
    return units_of(GraphModel.load(artifact.path), switches)


def shared(folder, body: str = BODY, **recipes: Recipe) -> list[tuple[str | None, tuple[str, ...], str]]:
    return [(u.tensor, u.sites, u.recipe) for u in units(folder, body, **recipes) if len(u.sites) > 1]


def test_each_site_alone_and_then_those_that_read_one_tensor(tmp_path):
    found = units(tmp_path)
    alone = [("left",), ("right",), ("norm",), ("deep",), ("head",)]
    assert [u.sites for u in found] == [*alone, ("left", "right")]
    assert [u.tensor for u in found] == [None] * 5 + ["x"]
    assert [u.recipe for u in found][2:] == ["bf16", PER_TENSOR.id, PER_TENSOR.id, "e4m3fn/amax"]
    assert [u.sites for u in found if not u.has_scales] == [("norm",)]


def test_the_weights_may_be_rounded_otherwise_but_not_the_tensor(tmp_path):
    assert shared(tmp_path, left=PER_CHANNEL_WEIGHT) == [("x", ("left", "right"), "e4m3fn/amax")]
    assert shared(tmp_path, left=replace(PER_TENSOR, scale="mse")) == []


def test_layouts_of_a_tensor_are_that_tensor(tmp_path):
    body = """
        t = Transpose <perm = [1, 0]> (x)  u = Transpose <perm = [1, 0]> (t)
        [left] a = MatMul(x, w_left)  [right] b = MatMul(u, w_right)
        c = Mul(a, b)  [head] y = MatMul(c, w_head)
    """
    assert shared(tmp_path, body) == [("x", ("left", "right"), "e4m3fn/amax")]

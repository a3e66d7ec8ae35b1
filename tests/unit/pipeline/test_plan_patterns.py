"""Patterns are held against the exported model, and against what mods make of it, before calibration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.errors import ConfigError
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.pipeline import accepting
from loka_onnx.pipeline.accepting import check_plan_patterns
from loka_onnx.transforms.sequence import Rewritten, apply_mods


class Place:
    """Two products of one input, `a` and `b`, which mods merge into `a+b`; counts how often they are."""

    def __init__(self, folder: Path, **plan: tuple[str, ...]) -> None:
        proto = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> g (float[batch,32] x) => (float[batch,16] y) {'
            "[a] p = MatMul(x, wa) [b] q = MatMul(x, wb) r = Relu(p) s = Tanh(q) [sum] y = Add(r, s) }"
        )
        random = np.random.default_rng(0)
        for name in ("wa", "wb"):
            values = random.normal(size=(32, 16)).astype(np.float32)
            proto.graph.initializer.append(numpy_helper.from_array(values, name))
        onnx.save(proto, folder / "exported.onnx")
        graph = GraphModel.load(folder / "exported.onnx")
        digest = graph.save(folder / "exported.onnx")
        self.exported = ModelArtifact(folder / "exported.onnx", digest, 21, (), (), find_sites(graph), "test")
        self.rows = {"x": random.normal(size=(8, 32)).astype(np.float32)}
        self.config = SimpleNamespace(
            plan=SimpleNamespace(**{"keep": (), "force": (), **plan}),
            mods=SimpleNamespace(split_channels=False),
        )
        self.rewrites = 0

    def check(self) -> None:
        def rewrite(context: object, target: Path) -> Rewritten:
            self.rewrites += 1
            return apply_mods(self.exported, [self.rows], target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accepting, "rewrite", rewrite)
            check_plan_patterns(cast(Any, self))


@pytest.mark.parametrize("plan", [{}, {"keep": ("a", "sum")}, {"keep": ("a",), "force": ("b",)}])
def test_names_of_the_exported_model_need_no_mods(tmp_path, plan):
    place = Place(tmp_path, **plan)
    place.check()
    assert place.rewrites == 0


@pytest.mark.parametrize("key", ["keep", "force"])
def test_names_that_mods_make_are_known(tmp_path, key):
    place = Place(tmp_path, **{key: ("a+b",)})
    place.check()
    assert place.rewrites == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["exported.onnx"]


@pytest.mark.parametrize("key", ["keep", "force"])
def test_what_neither_has_is_refused(tmp_path, key):
    place = Place(tmp_path, **{key: ("a", "nothing")})
    with pytest.raises(ConfigError, match=rf"^plan\.{key}: pattern 'nothing' matches no site"):
        place.check()
    assert [entry.name for entry in tmp_path.iterdir()] == ["exported.onnx"]


def test_a_site_that_is_kept_and_forced_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"site 'a.*' is both kept and forced"):
        Place(tmp_path, keep=("a",), force=("a",)).check()


def test_names_that_depend_on_calibration_are_left_to_the_plan(tmp_path):
    place = Place(tmp_path, keep=("a+b.loud",))
    with pytest.raises(ConfigError):
        place.check()
    place.config.mods.split_channels = True
    place.check()
    place.config.plan.keep = ("c.loud",)
    with pytest.raises(ConfigError):
        place.check()

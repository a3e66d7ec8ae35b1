"""What a torch builder returns, and patterns that name sites, both before the first long stage."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from loka_onnx.config.schema import ModelConfig
from loka_onnx.core.artifact import ModelArtifact, TensorSpec
from loka_onnx.errors import ConfigError, ModelError
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.pipeline import accepting
from loka_onnx.pipeline.accepting import build_torch_model, check_plan_patterns
from loka_onnx.transforms.sequence import Rewritten, apply_mods

SOURCE = """
import numpy as np
import torch

def pair():
    return torch.nn.Linear(3, 1), {"x": np.zeros((2, 3), np.float32), "ids": np.zeros(2, np.int64)}

def bare():
    return torch.nn.Linear(3, 1)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch", reason="needs torch")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "described_ranker.py").write_text(SOURCE)
    return tmp_path


def test_a_pair_tells_names_types_and_widths_in_order(place):
    model = build_torch_model(ModelConfig(torch="described_ranker:pair"), place)
    assert model.inputs == (
        TensorSpec("x", "float32", (None, 3)),
        TensorSpec("ids", np.dtype(np.int64).name, (None,)),
    )


def test_a_module_alone_is_refused_and_not_promised(place):
    with pytest.raises(ModelError) as caught:
        build_torch_model(ModelConfig(torch="described_ranker:bare"), place)
    assert caught.value.code == "E1531"


@pytest.mark.parametrize("columns", [{}, {"x": "x"}])
def test_columns_are_checked_where_the_model_is_refused_too(columns, monkeypatch):
    refused, opened = ModelError("E1531 no inputs", where="m", evidence="none", remedy="give some"), []

    def export(_: object) -> None:
        raise refused

    changes = {"check_targets": str, "ChosenMods": str, "export_model": export}
    changes["open_splits"] = lambda config, bindings: opened.append((config.columns, bindings))
    for name, change in changes.items():
        monkeypatch.setattr(accepting, name, change)
    directory = SimpleNamespace(watched=lambda _: nullcontext())
    settings = SimpleNamespace(config=SimpleNamespace(columns=columns), directory=directory)
    with pytest.raises(ModelError):
        accepting.accept(cast(Any, settings))
    assert opened == ([(columns, ())] if columns else [])


class Place:
    """Two products of one input, `a` and `b`, which mods merge into `a+b`; counts how often they are."""

    def __init__(self, folder: Path, **plan: tuple[str, ...]) -> None:
        random = np.random.default_rng(0)
        proto = parsed(
            "[a] p = MatMul(x, wa) [b] q = MatMul(x, wb) r = Relu(p) s = Relu(q) [sum] y = Add(r, s)",
            {name: random.normal(size=(32, 16)) for name in ("wa", "wb")},
            inputs="float[batch,32] x",
            outputs="float[batch,16] y",
        )
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

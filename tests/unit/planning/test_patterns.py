"""What patterns name: sites, what they were merged from, modules, and other nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from planned_models import CTR, artifact_of, linear, profile_of

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT
from loka_onnx.errors import ConfigError
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.patterns import named_places
from loka_onnx.planning.policy import PlanOptions, make_plans
from loka_onnx.transforms.norms.fold_batch_norm import FoldBatchNorm
from loka_onnx.transforms.sequence import apply_mods

SITES = (
    linear("bottom.fc1"),
    replace(linear("experts.0.fc1+63_more"), merged_from=("experts.0.fc1", "experts.17.fc1")),
    linear("tower.calibrator.fc"),
    linear("head"),
)
NODES = ("bottom/relu", "tower.scale/mul", "tower.scale/add", "/div")


@pytest.mark.parametrize(
    ("pattern", "sites", "nodes"),
    [
        ("*.fc1", ["bottom.fc1", "experts.0.fc1+63_more"], []),
        ("bottom", ["bottom.fc1"], []),
        ("*.calibrator", ["tower.calibrator.fc"], []),
        # A name from before the mods.
        ("experts.17.fc1", ["experts.0.fc1+63_more"], []),
        ("experts.17", ["experts.0.fc1+63_more"], []),
        ("tower*", ["tower.calibrator.fc"], []),
        # A pattern that names no site names nodes.
        ("tower.scale", [], ["tower.scale/mul", "tower.scale/add"]),
        ("*.scale/mul", [], ["tower.scale/mul"]),
        ("/div", [], ["/div"]),
        ("*relu", [], ["bottom/relu"]),
    ],
)
def test_sites_and_nodes(pattern: str, sites: list[str], nodes: list[str]) -> None:
    named = named_places((pattern, "head"), SITES, NODES, "plan.keep")
    assert named.sites == dict.fromkeys(sites, pattern) | {"head": "head"}
    assert named.nodes == dict.fromkeys(nodes, pattern)


@pytest.mark.parametrize("pattern", ["fc1", "experts.18.fc1", "tow", "scale", "tower.scale/m"])
def test_what_is_near_is_named_in_the_refusal(pattern: str) -> None:
    with pytest.raises(ConfigError) as caught:
        named_places((pattern,), SITES, NODES, "plan.keep")
    assert caught.value.code == "E0706" and pattern in caught.value.what
    if pattern == "experts.18.fc1":
        assert caught.value.evidence == "the nearest of 4 sites is 'experts.17.fc1'"


# Names that only the exported model has, or only the model after mods ---------------------------------

GONE = "decides nothing: mods removed all that it names in the exported model"


@dataclass(frozen=True)
class Models:
    exported: ModelArtifact
    modified: ModelArtifact


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A linear, its BatchNorm `tower/bn`, a ReLU and a head; the BatchNorm is folded into the linear."""
    folder = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(0)
    constants = {"w0": random.normal(size=(32, 16)), "w1": random.normal(size=(16, 1))}
    constants |= {"gain": np.ones(16), "shift": np.ones(16), "mean": np.zeros(16), "variance": np.ones(16)}
    exported = artifact_of(
        folder / "exported.onnx",
        "(float[batch,32] x) => (float[batch,1] ctr) {"
        "[fc0] h = MatMul(x, w0) [tower__bn] n = BatchNormalization(h, gain, shift, mean, variance)"
        " [act] a = Relu(n) [head] ctr = MatMul(a, w1) }",
        constants,
    )
    rows = {"x": random.normal(size=(8, 32)).astype(np.float32)}
    modified = apply_mods(exported, [rows], folder / "modified.onnx", [FoldBatchNorm()]).model
    assert "tower/bn" not in {node.name for node in GraphModel.load(modified.path).nodes}
    return Models(exported, modified)


def plans_of(model: ModelArtifact, options: PlanOptions) -> PlanSet:
    return make_plans(model, profile_of(model, {}), (CTR,), [PER_CHANNEL_WEIGHT], options)


@pytest.mark.parametrize("pattern", ["tower/bn", "tower", "*/bn"])
def test_what_mods_removed_is_told(models: Models, pattern: str) -> None:
    with pytest.raises(ConfigError):
        plans_of(models.modified, PlanOptions(keep=(pattern,)))
    plans = plans_of(models.modified, PlanOptions(keep=(pattern, "fc0"), exported=models.exported))
    assert plans.notes == (f"'{pattern}' of plan.keep {GONE}",)
    assert plans.plan("fp8-all").decision("fc0").reason.startswith("kept in bf16 by 'fc0'")
    assert serde.loads(PlanSet, serde.dumps(plans)) == plans


def test_a_forced_site_that_mods_removed_is_told_but_not_a_node_nor_what_neither_model_has(models):
    with pytest.raises(ConfigError) as caught:
        plans_of(models.modified, PlanOptions(keep=("tower/bn", "haed"), exported=models.exported))
    assert "'haed'" in caught.value.what and "'head'" in caught.value.evidence
    (fc0, head) = models.exported.sites
    exported = replace(models.exported, sites=(fc0, replace(head, name="folded.fc"), head))
    options = PlanOptions(force=("folded.fc",), exported=exported)
    assert plans_of(models.modified, options).notes == (f"'folded.fc' of plan.force {GONE}",)
    with pytest.raises(ConfigError) as caught:
        plans_of(models.modified, PlanOptions(force=("tower/bn",), exported=exported))
    assert (caught.value.code, caught.value.where) == ("E0706", "plan.force")

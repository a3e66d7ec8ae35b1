"""The switchable model against the plain one, and against the graphs that plans are written into."""

import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from planned import quantized_site
from zoo_runs import EACH_MODEL, ZooRun, capture, zoo_run

from loka_onnx.calibration.effects.switchable import Switch, SwitchableModel, write_switchable
from loka_onnx.calibration.passes.probe import scales_of
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import RangeStats
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.precision.insert_qdq import insert_qdq

pytest.importorskip("torch", reason="needs torch")

ROWS = 400


def inputs_of(run: ZooRun) -> dict[str, np.ndarray]:
    return {name: array[:ROWS] for name, array in run.inputs().items()}


def recipe_of(site: Site, number: int) -> Recipe:
    return PER_CHANNEL_WEIGHT if site.kind is SiteKind.LINEAR and number % 2 else PER_TENSOR


@dataclass(frozen=True)
class World:
    run: ZooRun
    model: SwitchableModel
    switches: list[Switch]
    scales: dict[str, dict[str, float]]


def make(name: str, folder: Path) -> World:
    run = zoo_run(name)
    tensors = [o.tensor for s in run.artifact.sites for o in s.operands if not o.constant]
    values = capture(run.graph(), tensors, inputs_of(run), folder)
    sums = ExactSum(), ExactSum()
    ranges = {t: RangeStats(v.size, float(np.abs(v).max()), 0, 0, *sums) for t, v in values.items()}
    scales = scales_of(ranges, (PER_TENSOR,))
    switches = [Switch(site, recipe_of(site, number)) for number, site in enumerate(run.artifact.sites)]
    file = write_switchable(run.graph(), switches, scales, folder / "switchable.onnx")
    # As it comes to another process.
    return World(run, pickle.loads(pickle.dumps(file)).open(), switches, scales)


def planned(run: ZooRun, decisions: list[Decision], folder: Path) -> np.ndarray:
    graph = run.graph()
    plan = PrecisionPlan("test", run.artifact.digest, Precision.FP32, tuple(decisions), {}, 1.0)
    insert_qdq(graph, run.artifact.sites, plan)
    graph.save(folder / "planned.onnx")
    session = OnnxSession(folder / "planned.onnx", SessionOptions(threads=1, optimize=False))
    return session.run(inputs_of(run))["logit"]


@pytest.mark.parametrize("name", EACH_MODEL)
def test_switches_do_what_a_plan_does(name, tmp_path):
    """Each product alone, then all of them, against Q/DQ with the same scales; none is the plain model."""
    world = make(name, tmp_path)
    run, model, inputs = world.run, world.model, inputs_of(world.run)
    exact = model.run(inputs)["logit"]
    plain = OnnxSession(run.artifact.path, SessionOptions(threads=1)).run(inputs)["logit"]
    assert model.file.outputs == ("logit",)
    # The sites sit in branches, where ONNX Runtime fuses less: rounding in another order. Seen: 6e-8.
    np.testing.assert_allclose(exact, plain, rtol=0, atol=5e-7)
    decisions, moved, tensors = [], 0, world.scales[PER_TENSOR.activation_id]
    for switch in world.switches:
        if switch.site.kind is SiteKind.NORM:
            continue
        scales = [tensors[o.tensor] for o in switch.site.operands if not o.constant]
        decisions.append(quantized_site(run.graph(), switch.site, switch.recipe, *scales))
        got = model.run(inputs, (switch.site.name,))["logit"]
        np.testing.assert_allclose(got, planned(run, decisions[-1:], tmp_path), rtol=0, atol=1e-5)
        moved += int(np.abs(got - exact).max() > 1e-5)
    # Some sites of InterFormer's attention move nothing: with random weights its softmax is nearly uniform.
    assert moved >= len(decisions) * 0.7
    joint = model.run(inputs, [d.site for d in decisions])["logit"]
    difference = np.abs(joint - planned(run, decisions, tmp_path))
    # An FP8 rounding tie that falls the other way moves the rows that it is in; seen: at most one row.
    assert (difference > 1e-5).mean() <= 0.01
    assert np.abs(joint - exact).max() > 1e-3


def test_a_bias_is_added_to_a_site_in_low_precision_alone(tmp_path):
    world = make("dcnv2", tmp_path)
    run, inputs = world.run, inputs_of(world.run)
    (last,) = [switch for switch in world.switches if switch.site.name == world.switches[-1].site.name]
    shift = {last.site.name: np.full(last.site.n, 0.25)}
    path = tmp_path / "biased.onnx"
    biased = write_switchable(run.graph(), world.switches, world.scales, path, biases=shift).open()
    for on, moved in (((), 0.0), ((world.switches[0].site.name,), 0.0), ((last.site.name,), 0.25)):
        difference = biased.run(inputs, on)["logit"] - world.model.run(inputs, on)["logit"]
        np.testing.assert_allclose(difference, moved, rtol=0, atol=1e-5)

"""Parts of a switchable model against the whole of it, bit by bit."""

import numpy as np
import onnx
import pytest
from small_models import artifact_of

from loka_onnx.calibration.effects import reached
from loka_onnx.calibration.effects.reached import write_parts
from loka_onnx.calibration.effects.switchable import SWITCHES, Switch, write_switchable
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

TOWERS = """
    [left] a = MatMul(x, w_left)
    [right] b = MatMul(x, w_right)
    c = Tanh(a)  t = Sigmoid(b)
    [deep] f = MatMul(c, w_deep)
    g = Add(f, t)
    [norm] e = LayerNormalization(g, gain, bias)
    z = Relu(e)
    [head] y = MatMul(z, w_head)
"""
SEQUENCE = "t = SequenceConstruct(x) u = SequenceInsert(t, a) c = ConcatFromSequence<axis = 1>(u)"
NARROW = "t = Cast<to = 16>(x) u = Cast<to = 16>(a) v = Concat<axis = 1>(t, u) c = Cast<to = 1>(v)"


@pytest.fixture
def switched(tmp_path):
    def write(body, **weights):
        artifact = artifact_of(tmp_path, body, **weights)
        scales = {PER_TENSOR.activation_id: {o.tensor: 0.03125 for s in artifact.sites for o in s.operands}}
        recipes = [PER_TENSOR, PER_CHANNEL_WEIGHT]
        switches = [Switch(site, recipe) for site in artifact.sites for recipe in recipes[: 1 + bool(site.n)]]
        path = tmp_path / "switchable.onnx"
        return write_switchable(GraphModel.load(artifact.path), switches, scales, path)

    return write


def assert_equal_to_the_whole(file, parts, units):
    x = np.random.default_rng(0).standard_normal((37, 16)).astype(np.float32)
    session, count = OnnxSession(file.path, SessionOptions(threads=1)), len(file.sites)
    switches = [np.isin(np.arange(count), on) for on in ((), *units)]
    expected = [session.run({"x": x, SWITCHES: on}, ["y"]) for on in switches]
    found = list(parts.open()({"x": x}, units, ["y"]))
    for part, whole in zip(found, expected, strict=True):
        np.testing.assert_array_equal(part["y"], whole["y"])
    assert len({each["y"].tobytes() for each in expected}) > len(units) // 2


def test_parts_compute_what_the_whole_does(switched):
    file = switched(TOWERS)
    parts, count = write_parts(file), len(file.sites)
    sites = [{file.sites[n] for n in part} for part in parts.reached_by.values()]
    joined = {"left", "deep", "right"}
    assert sites == [{"left"}, {"right"}, {"left", "deep"}, joined, joined | {"norm"}, {*file.sites}]
    units = [(n,) for n in range(count)]
    assert_equal_to_the_whole(file, parts, [*units, (0, count - 1), (1, 3), tuple(range(count))])


@pytest.mark.parametrize("crossing", [SEQUENCE, NARROW])
def test_a_tensor_that_no_session_takes_leaves_the_model_whole(crossing, switched):
    wide = np.random.default_rng(1).standard_normal((32, 16)) / 4
    body = f"[left] a = MatMul(x, w_left) {crossing} [deep] e = MatMul(c, wide) [head] y = MatMul(e, w_head)"
    file = switched(body, wide=wide)
    parts = write_parts(file)
    assert [*parts.reached_by] == [file.path]
    assert_equal_to_the_whole(file, parts, [(n,) for n in range(len(file.sites))])


def test_tensors_that_would_fill_the_memory_leave_the_model_whole(switched, monkeypatch):
    file = switched(TOWERS)
    passed = {
        value.name: value.type.tensor_type.shape.dim[1].dim_value
        for path in write_parts(file).reached_by
        for value in onnx.load(path).graph.output
    }
    monkeypatch.setattr(reached, "_MOST_PASSED", sum(passed.values()))
    assert len(write_parts(file).reached_by) > 1
    monkeypatch.setattr(reached, "_MOST_PASSED", sum(passed.values()) - 1)
    assert [*write_parts(file).reached_by] == [file.path]

"""Recurrent layers against ONNX Runtime, whose kernels share no code with torch."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from lowering_models import Case, Fixed, exported, lowered, run  # noqa: E402

from loka_onnx.errors import EngineError  # noqa: E402
from loka_onnx.sessions.onnx_session import OnnxSession  # noqa: E402

RANDOM = np.random.default_rng(0)
STEPS, BATCH, WIDTH, HIDDEN = 5, 3, 4, 6
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def f(*shape: int) -> Any:
    return RANDOM.uniform(-1, 1, size=shape).astype(np.float32)


def layer(op: str, directions: int = 1, *more: Any, bias: bool = True, **attributes: Any) -> Case:
    gates = GATES[op] * HIDDEN
    weights = [Fixed(f(directions, gates, WIDTH)), Fixed(f(directions, gates, HIDDEN))]
    biases = Fixed(f(directions, 2 * gates)) if bias else None
    attributes |= {"hidden_size": HIDDEN}
    outputs = 3 if op == "LSTM" else 2
    return Case(op, [f(STEPS, BATCH, WIDTH), *weights, biases, *more], attributes, opset=22, outputs=outputs)


LENGTHS = np.array([5, 2, 1], np.int32)
CASES = {
    "rnn": layer("RNN"),
    "rnn with relu": layer("RNN", activations=["Relu"]),
    "gru": layer("GRU"),
    "gru of pytorch": layer("GRU", linear_before_reset=1),
    "gru without bias": layer("GRU", bias=False),
    "gru of both directions": layer("GRU", 2, direction="bidirectional", linear_before_reset=1),
    "gru of shorter rows": layer("GRU", 2, LENGTHS, f(2, BATCH, HIDDEN), direction="bidirectional"),
    "lstm": layer("LSTM"),
    "lstm backward": layer("LSTM", 1, LENGTHS, direction="reverse"),
    "lstm from a state": layer("LSTM", 1, None, f(1, BATCH, HIDDEN), f(1, BATCH, HIDDEN)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_recurrent_layer_agrees_with_onnx_runtime(case: Case, tmp_path: Path) -> None:
    proto = case.model()
    module = lowered(proto, tmp_path)
    expected = OnnxSession(tmp_path / "model.onnx").run(case.feeds)
    for one, (name, other) in zip(run(module, case.feeds), expected.items(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("form", [{"activations": ["Relu", "Tanh"]}, {"clip": 3.0}, {"layout": 1}])
def test_forms_that_pytorch_does_not_write_are_refused(form, tmp_path):
    module = lowered(layer("GRU", **form).model(), tmp_path)
    with pytest.raises(EngineError, match="a recurrent layer of this form is not lowered: GRU"):
        run(module, {"i0": f(STEPS, BATCH, WIDTH)})


def test_a_layer_of_pytorch_is_lowered(tmp_path):
    """As it is exported: the batch first, its own order of gates, the last state read."""

    class Ranker(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = torch.nn.GRU(WIDTH, HIDDEN, batch_first=True, bidirectional=True)
            self.lstm = torch.nn.LSTM(2 * HIDDEN, HIDDEN, batch_first=True)

        def forward(self, x):
            every, _ = self.gru(x)
            return self.lstm(every)[1][0][-1]

    module, x = Ranker().eval(), f(BATCH, STEPS, WIDTH)
    path = tmp_path / "raw.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sizes = {"x": {0: "batch"}}
        torch.onnx.export(
            module, (torch.from_numpy(x),), str(path), dynamo=False, input_names=["x"], dynamic_axes=sizes
        )
    with torch.no_grad():
        expected = module(torch.from_numpy(x)).numpy()
    program = exported(lowered(onnx.load(path), tmp_path), {"x": x})
    np.testing.assert_allclose(run(program, {"x": x})[0], expected, atol=2e-6)

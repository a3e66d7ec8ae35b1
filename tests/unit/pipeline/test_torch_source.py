"""What a builder of a torch model returns: the module and example inputs, as the run file's schema says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loka_onnx.config.schema import ModelConfig
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.errors import ModelError
from loka_onnx.pipeline.accepting import build_torch_model

pytest.importorskip("torch", reason="needs torch")

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

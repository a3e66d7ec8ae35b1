"""Refreshing a run of a PyTorch module from a checkpoint."""

from __future__ import annotations

import pytest
from fast8_backend import NO_REFINING, Fast8

import loka_onnx
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.engines import registry
from loka_onnx.operations.refresh.refreshing import RefreshOptions, refresh
from loka_onnx.pipeline.run import RunOptions, Stage, run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fast8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "maker_of", {"onnxruntime": Fast8}.__getitem__)


BUILDER = """
import numpy as np
import torch


class Ranker(torch.nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = torch.nn.ModuleList([torch.nn.Embedding(rows, 16) for rows in tables.values()])
        self.fc1 = torch.nn.Linear(16 * len(tables), 32)
        self.head = torch.nn.Linear(32, 1)

    def forward(self, ids):
        rows = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        return self.head(torch.relu(self.fc1(torch.cat(rows, 1)))).squeeze(-1)


def build(tables):
    torch.manual_seed(0)
    return Ranker(tables), {"ids": np.zeros((2, len(tables)), np.int64)}
"""


def test_a_checkpoint_of_a_torch_module(place, tmp_path):
    """Its builder is found beside the run file of the earlier run, wherever the refresh is started.

    The order of the builder's arguments is kept, which may be that of the embedding tables.
    """
    torch = pytest.importorskip("torch", reason="needs torch")
    from safetensors.torch import save_file

    (place.path / "my_ranker.py").write_text(BUILDER)
    layers = {
        "tables.0": torch.nn.Embedding(40, 16),
        "tables.1": torch.nn.Embedding(6000, 16),
        "fc1": torch.nn.Linear(32, 32),
        "head": torch.nn.Linear(32, 1),
    }
    state = {
        f"{layer}.{name}": value
        for layer, part in layers.items()
        for name, value in part.state_dict().items()
    }
    save_file(state, place.path / "sunday.safetensors")
    monday = {name: value * (2.0 if name == "fc1.weight" else 1.0) for name, value in state.items()}
    save_file(monday, tmp_path / "monday.safetensors")
    place.write_run_file(
        model={
            "onnx": None,
            "torch": "my_ranker:build",
            "arguments": {"tables": {"wide": 40, "narrow": 6000}},
            "checkpoint": "sunday.safetensors",
        },
        outputs=[{"name": "ctr", "kind": "logit", "label": "clicked", "budget": 0.05}],
        data={"inputs": {"ids": ["item_id", "request"]}},
        plan={"plans": ["fp32", "fp8-all"]},
        refine=NO_REFINING,
        # Which moves range between weights and activations, by what it measures on each model.
        mods={"smoothing": False},
    )
    run(place.run_file)
    result = refresh(place.output, tmp_path / "monday.safetensors", RefreshOptions(output=tmp_path / "new"))
    assert result.refresh.fallback == ""
    (moved,) = {move.weight for move in result.refresh.sites if "fc1" in move.site}
    assert moved == pytest.approx(2.0)
    # Weights were put into the earlier graph: the bytes that the exporter gives.
    anew = loka_onnx.load_run_file(
        place.run_file,
        {"output": str(tmp_path / "full"), "model.checkpoint": str(tmp_path / "monday.safetensors")},
    )
    run(anew, RunOptions(until=Stage.EXPORT))
    digests = {
        serde.read(ModelArtifact, tmp_path / name / "model/exported.json").digest for name in ("new", "full")
    }
    assert len(digests) == 1

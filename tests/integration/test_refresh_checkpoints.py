"""Refreshing a run of a PyTorch module from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from fast8_backend import NO_REFINING, Fast8
from synthetic_runs import Workplace, weights

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
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(16, 32)
        self.fc2 = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, 1)

    def forward(self, dense):
        return self.head(torch.relu(self.fc2(torch.relu(self.fc1(dense))))).squeeze(-1)


def build():
    torch.manual_seed(0)
    return Ranker(), {"dense": np.zeros((2, 16), np.float32)}
"""


def test_a_checkpoint_of_a_torch_module(place: Workplace, tmp_path: Path) -> None:
    """Its builder is found beside the run file of the earlier run, wherever the refresh is started."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from safetensors.torch import save_file

    (place.path / "my_ranker.py").write_text(BUILDER)
    module = torch.nn.Module()
    for name, sizes in (("fc1", (16, 32)), ("fc2", (32, 32)), ("head", (32, 1))):
        module.add_module(name, torch.nn.Linear(*sizes))
    state = module.state_dict()
    save_file(state, place.path / "sunday.safetensors")
    monday = {name: value * (2.0 if name == "fc2.weight" else 1.0) for name, value in state.items()}
    save_file(monday, tmp_path / "monday.safetensors")
    place.write_run_file(
        model={"onnx": None, "torch": "my_ranker:build", "checkpoint": "sunday.safetensors"},
        outputs=[{"name": "ctr", "kind": "logit", "label": "clicked", "budget": 0.05}],
        data={"inputs": {"dense": [f"d{i}" for i in range(len(weights()["fc1.w"]) // 2)]}},
        plan={"plans": ["fp32", "fp8-all"]},
        refine=NO_REFINING,
        # Which moves range between weights and activations, by what it measures on each model.
        mods={"smoothing": False},
    )
    run(place.run_file)
    result = refresh(place.output, tmp_path / "monday.safetensors", RefreshOptions(output=tmp_path / "new"))
    assert result.refresh.fallback == ""
    moved = {move.site: move.weight for move in result.refresh.sites}
    (fc2,) = [factor for site, factor in moved.items() if "fc2" in site]
    assert fc2 == pytest.approx(2.0)
    assert moved[next(site for site in moved if "fc1" in site)] == pytest.approx(1.0)
    # Weights were put into the earlier graph: the bytes that the exporter gives.
    anew = loka_onnx.load_run_file(
        place.run_file,
        {"output": str(tmp_path / "full"), "model.checkpoint": str(tmp_path / "monday.safetensors")},
    )
    run(anew, RunOptions(until=Stage.EXPORT))
    assert _digest(tmp_path / "new") == _digest(tmp_path / "full")


def _digest(directory: Path) -> str:
    return str(serde.read(ModelArtifact, directory / "model/exported.json").digest)


ORDERED = """
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


def test_the_order_of_a_builder_s_arguments_is_kept(place: Workplace, tmp_path: Path) -> None:
    """It may be the order of the embedding tables, as it is in the zoo; here the names are not in theirs."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from safetensors.torch import save_file

    (place.path / "my_tables.py").write_text(ORDERED)
    tables = {"wide": 40, "narrow": 6000}
    layers = {
        "tables.0": torch.nn.Embedding(40, 16),
        "tables.1": torch.nn.Embedding(6000, 16),
        "fc1": torch.nn.Linear(32, 32),
        "head": torch.nn.Linear(32, 1),
    }
    save_file(
        {
            f"{layer}.{name}": value
            for layer, part in layers.items()
            for name, value in part.state_dict().items()
        },
        place.path / "sunday.safetensors",
    )
    place.write_run_file(
        model={
            "onnx": None,
            "torch": "my_tables:build",
            "arguments": {"tables": tables},
            "checkpoint": "sunday.safetensors",
        },
        outputs=[{"name": "ctr", "kind": "logit", "label": "clicked", "budget": 0.05}],
        data={"inputs": {"ids": ["item_id", "request"]}},
        plan={"plans": ["fp32", "fp8-all"]},
        refine=NO_REFINING,
    )
    run(place.run_file)
    found = refresh(
        place.output, place.path / "sunday.safetensors", RefreshOptions(output=tmp_path / "new")
    ).refresh
    assert found.fallback == "" and found.model == found.earlier_model

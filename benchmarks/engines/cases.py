"""The models that engines are timed on, at production sizes, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.data.prepared import PreparedData
from loka_onnx.data.synthetic import LABEL, SyntheticOptions, prepare_synthetic
from loka_onnx.export.torch_module import export_torch
from loka_onnx.zoo import FeatureSpec, create

RECIPES = (PER_TENSOR,)
SPEC = OutputSpec("logit", OutputKind.LOGIT, LABEL)
TOWERS, TOWER = 64, 256
ROWS = (64, 1024, 64, 64)


@dataclass(frozen=True)
class Case:
    """A model and the batch sizes that it is timed at.

    Attributes:
        model: Name in the zoo.
        preset: Its sizes.
        categorical: Number of embeddings; with the bottom MLP's output, one token each.
        batches: Batch sizes.
        towers: Whether parallel towers of 256×256 read the tokens beside it.
    """

    model: str
    preset: str
    categorical: int
    batches: tuple[int, ...]
    towers: bool = False


CASES: Mapping[str, Case] = {
    "wukong-large": Case("wukong", "production", 127, (512, 2048)),
    "wukong-small": Case("wukong", "small", 63, (256, 1024)),
    "dlrm-dcnv2": Case("dcnv2", "production", 26, (256, 2048, 8192)),
    "interformer": Case("interformer", "production", 26, (1024,)),
    "dlrm": Case("dlrm", "production", 26, (2048,)),
    "wukong-large-towers": Case("wukong", "production", 127, (512, 2048), towers=True),
    "rehearsal": Case("wukong", "tiny", 7, (16, 64)),
    "rehearsal-towers": Case("wukong", "tiny", 31, (16,), towers=True),
    "rehearsal-dcnv2": Case("dcnv2", "tiny", 26, (16,)),
}


class WithTowers(nn.Module):
    """A ranker with parallel towers on its embeddings: small products, which FP8 slows down.

    Each tower maps 256 numbers of the embeddings to 256; what all of them give is averaged and adds to the
    logit through one more linear.

    Args:
        ranker: The ranker.
        width: Length of all embeddings together; 64 towers read as many slices of 256 of it, from the first
            again where it ends.
    """

    def __init__(self, ranker: nn.Module, width: int) -> None:
        super().__init__()
        self.ranker, self.width = ranker, width
        self.towers = nn.ModuleList(nn.Linear(TOWER, TOWER) for _ in range(TOWERS))
        self.join = nn.Linear(TOWER, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Maps dense (batch, numeric) and ids (batch, categorical) to logits (batch,)."""
        embeddings: Any = self.ranker.embeddings
        rows = torch.cat([each.flatten(1) for each in embeddings(ids)], dim=1)
        starts = [i * TOWER % (self.width - TOWER + 1) for i in range(TOWERS)]
        made = [
            torch.relu(tower(rows[:, start : start + TOWER]))
            for tower, start in zip(self.towers, starts, strict=True)
        ]
        logit: Tensor = self.ranker(dense, ids) + self.join(sum(made) / TOWERS).squeeze(-1)
        return logit


@dataclass(frozen=True)
class Exported:
    """A case, exported.

    Attributes:
        model: The model.
        data: Generated rows.
    """

    model: ModelArtifact
    data: PreparedData

    def rows(self, count: int) -> Mapping[str, npt.NDArray[Any]]:
        """The first calibration rows."""
        return next(self.data.open("calibration").batches(count)).inputs


def export_case(case: Case, directory: Path) -> Exported:
    """Create and export a model; its tables hold a few rows each, which is nothing to the dense part."""
    options = SyntheticOptions(rows=ROWS, cardinalities=(32,) * case.categorical, numeric=13)
    data = prepare_synthetic(directory / "data", options)
    features = FeatureSpec.of(data)
    if case.model == "interformer":
        # Half of the tokens are a behaviour sequence.
        names = [name for name, _ in features.categorical]
        features = replace(features, sequence=tuple(names[len(names) // 2 :]))
    module = create(case.model, features, case.preset)
    if case.towers:
        width = next(p for p in module.embeddings.parameters()).shape[1] * case.categorical  # type: ignore[union-attr]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            module = WithTowers(module, width).eval()
    example = next(data.open("calibration").batches(64)).inputs
    return Exported(export_torch(module, example, directory / "exported.onnx", (SPEC,)), data)

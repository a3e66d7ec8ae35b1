"""The models that engines are timed on, at production sizes, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.data.binding import InputBinding
from loka_onnx.export.torch_module import export_torch
from loka_zoo import FeatureSpec, create
from loka_zoo.layers import MLP, tokens_of
from loka_zoo.prepared import PreparedData
from loka_zoo.synthetic import LABEL, SyntheticOptions, prepare_synthetic

RECIPES = (PER_TENSOR,)
SPEC = OutputSpec("logit", OutputKind.LOGIT, LABEL)
ROWS = (64, 1024, 64, 64)
IDS = 32
"""Rows of each table: nothing to the dense part."""


@dataclass(frozen=True)
class Case:
    """A model and the batch sizes that it is timed at.

    Attributes:
        model: Name in the zoo.
        preset: Its sizes.
        categorical: Number of embeddings; with the bottom MLP's output, one token each.
        batches: Batch sizes.
        towers: Parallel towers that share out the tokens between them, beside the model; 0 for none.
        history: Length of a behaviour sequence; 0 for none.
    """

    model: str
    preset: str
    categorical: int
    batches: tuple[int, ...]
    towers: int = 0
    history: int = 0


CASES: Mapping[str, Case] = {
    "wukong-large": Case("wukong", "production", 127, (512, 2048)),
    "wukong-small": Case("wukong", "small", 63, (256, 1024)),
    "dlrm-dcnv2": Case("dcnv2", "production", 26, (256, 2048, 8192)),
    # A sequence as long as the paper's (arXiv 2411.09852, appendix B.1: 50 to 100 in public data).
    "interformer": Case("interformer", "production", 26, (1024,), history=100),
    "dlrm": Case("dlrm", "production", 26, (2048,)),
    # 128 tokens of 128 are 64 times 256 numbers.
    "wukong-large-towers": Case("wukong", "production", 127, (512, 2048), towers=64),
    "rehearsal": Case("wukong", "tiny", 7, (16, 64)),
    "rehearsal-towers": Case("wukong", "tiny", 31, (16,), towers=16),
    "rehearsal-dcnv2": Case("dcnv2", "tiny", 26, (16,)),
    "rehearsal-interformer": Case("interformer", "tiny", 7, (16,), history=5),
}


class WithTowers(nn.Module):
    """A Wukong with parallel towers on its tokens: small products, which FP8 slows down.

    Each tower maps its share of the tokens to as many numbers; what all of them give is averaged and adds to
    the logit through one more linear.

    Args:
        ranker: The Wukong.
        count: Number of towers.
        width: Numbers that each reads; all of them together read every token once.
    """

    def __init__(self, ranker: nn.Module, count: int, width: int) -> None:
        super().__init__()
        self.ranker, self.width = ranker, width
        self.towers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.join = nn.Linear(width, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Maps dense (batch, numeric) and ids (batch, categorical) to logits (batch,)."""
        ranker: Any = self.ranker
        x = tokens_of(ranker.bottom(dense), ranker.embeddings(ids))
        shares = torch.split(x.flatten(1), self.width, dim=1)
        made = [torch.relu(tower(share)) for tower, share in zip(self.towers, shares, strict=True)]
        for layer in ranker.layers:
            x = layer(x)
        beside = self.join(sum(made) / len(made))
        logit: Tensor = ranker.head(ranker.over(x.flatten(1))) + beside
        return logit.squeeze(-1)


@dataclass(frozen=True)
class WithHistory(PreparedData):
    """Generated rows of which some categorical columns are a behaviour sequence.

    Attributes:
        history: These columns, oldest first; ids of the first table.
    """

    history: tuple[str, ...] = ()

    @property
    def bindings(self) -> tuple[InputBinding, ...]:
        """As of every model of the zoo, and `history`."""
        ids = (range(IDS),) * len(self.history)
        return (*super().bindings, InputBinding("history", self.history, "int64", 2, ids))


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
    ids = (IDS,) * (case.categorical + case.history)
    data = prepare_synthetic(directory / "data", SyntheticOptions(ROWS, ids, numeric=13))
    if case.history:
        data = _with_history(data, case.categorical)
    module = module_of(case, data)
    example = next(data.open("calibration").batches(64)).inputs
    return Exported(export_torch(module, example, directory / "exported.onnx", (SPEC,)), data)


def module_of(case: Case, data: PreparedData) -> nn.Module:
    """The module of a case, with the same weights each time."""
    first, _ = data.categorical[0]
    history = (first, case.history) if case.history else None
    module = create(case.model, FeatureSpec(data.categorical, data.numeric, history=history), case.preset)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if case.towers:
            embeddings: Any = module.embeddings
            width = (1 + case.categorical) * next(embeddings.parameters()).shape[1] // case.towers
            module = WithTowers(module, case.towers, width).eval()
        _draw_weights(module)
    return module


def _with_history(data: PreparedData, categorical: int) -> WithHistory:
    """The same rows, with the categorical columns from some number on as the history."""
    known = {field.name: getattr(data, field.name) for field in fields(PreparedData)}
    names = tuple(name for name, _ in data.categorical[categorical:])
    return WithHistory(**known | {"categorical": data.categorical[:categorical]}, history=names)


def _draw_weights(module: nn.Module) -> None:
    """Draw the weights of MLPs so that rows stay apart from layer to layer (He et al., arXiv 1502.01852).

    By PyTorch's own rule the differences between rows shrink with each ReLU, until they are smaller than what
    rounding makes, and nobody could tell a right engine from a wrong one. Changes the module.
    """
    linears = [part for mlp in module.modules() if isinstance(mlp, MLP) for part in mlp.children()]
    for linear in linears:
        if isinstance(linear, nn.Linear):
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")

"""Rankers of FuxiCTR's model zoo, as its package brings them: profile, target and a history of items.

Its loader joins the target behind the history and gives the models one long vector of items for all rows. A
served model takes rows, so that the wrapper does with tensors what the loader does with arrays.
"""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.public_rankers.modeling import Built, Input
from benchmarks.public_rankers.rows import Rows
from loka_onnx.core.artifact import OutputKind

WIDTH = 16
SIZES: dict[str, dict[str, Any]] = {
    "DCNv2": {
        "model_structure": "parallel",
        "parallel_dnn_hidden_units": [512, 128, 64],
        "num_cross_layers": 3,
    },
    "FinalMLP": {"mlp1_hidden_units": [512, 128, 64], "mlp2_hidden_units": [512, 128, 64], "num_heads": 4},
    "DIN": {"dnn_hidden_units": [512, 128, 64], "attention_hidden_units": [64]},
    "TransAct": {"dcn_hidden_units": [512, 128, 64], "mlp_hidden_units": [64], "num_heads": 4},
}


class ByRow(nn.Module):
    """A model of the zoo that takes rows.

    Args:
        model: Of the library.
        profile: Names of the features that a row has once.
    """

    def __init__(self, model: nn.Module, profile: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.profile = profile

    def forward(self, *features: Tensor) -> Tensor:
        """Probabilities (batch, 1) of the profile, then item, its genre, and the histories of both."""
        *profile, item, genre, items, genres = features
        joined = {
            "item": torch.cat([items, item.unsqueeze(1)], dim=1).flatten(),
            "item_genre": torch.cat([genres, genre.unsqueeze(1)], dim=1).flatten(),
        }
        there = (items > 0).float()
        output = self.model((dict(zip(self.profile, profile, strict=True)), joined, there))
        return output["y_pred"]  # type: ignore[no-any-return]


def build_fuxi(model: str, rows: Rows) -> Built:
    """An untrained model.

    Args:
        model: Class of the zoo.
        rows: Sizes of the tables.
    """
    features = importlib.import_module("fuxictr.features")
    scratch = tempfile.gettempdir()
    described = features.FeatureMap("movielens", scratch)
    profile = tuple(name for name in rows.categorical if name not in ("item_id", "genre1"))
    for name in profile:
        described.features[name] = {
            "source": "user",
            "type": "categorical",
            "vocab_size": rows.categorical[name],
        }
    for name in rows.numeric:
        described.features[name] = {"source": "user", "type": "numeric"}
    for name, table in (("item", "item_id"), ("item_genre", "genre1")):
        described.features[name] = {
            "source": "item",
            "type": "categorical",
            "vocab_size": rows.categorical[table] + 1,
            "padding_idx": 0,
        }
    for one in described.features.values():
        one["emb_output_dim"] = WIDTH
    described.labels = ["clicked"]
    described.default_emb_dim = WIDTH
    described.num_fields = described.get_num_fields()
    zoo = importlib.import_module(f"model_zoo.LongCTR.{model}.{model}")
    module = getattr(zoo, model)(
        described,
        embedding_dim=WIDTH,
        gpu=-1,
        verbose=0,
        model_root=scratch,
        metrics=["logloss"],
        optimizer="adam",
        loss="binary_crossentropy",
        task="binary_classification",
        **SIZES[model],
    )
    module.eval()
    fields = (*profile, *rows.numeric)
    inputs = tuple(
        Input(name, (name,), "float32" if name in rows.numeric else "int64")
        for name in (*fields, "item", "item_genre", "history", "history_genre")
    )
    return Built(ByRow(module, fields), inputs, {"ctr": OutputKind.PROBABILITY})

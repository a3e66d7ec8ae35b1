"""Rankers of TorchRec. They take a KeyedJaggedTensor, which the exported model makes of an id matrix."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.public_rankers.modeling import Built, Input
from benchmarks.public_rankers.rows import Rows
from loka_onnx.core.artifact import OutputKind

WIDTH = 16


def build_torchrec(model: str, rows: Rows) -> Built:
    """An untrained model.

    Args:
        model: Class of the library.
        rows: Sizes of the tables.
    """
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.models.deepfm import SimpleDeepFMNN
    from torchrec.models.dlrm import DLRM, DLRM_DCN

    from benchmarks.public_rankers.torchrec_inputs import FromIds

    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=WIDTH, num_embeddings=size, feature_names=[name])
        for name, size in rows.categorical.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    numeric = len(rows.numeric)
    kind = OutputKind.LOGIT
    if model == "DLRM":
        made: nn.Module = DLRM(collection, numeric, [128, WIDTH], [256, 128, 1])
    elif model == "DLRM_DCN":
        made = DLRM_DCN(
            collection, numeric, [128, WIDTH], [256, 128, 1], dcn_num_layers=3, dcn_low_rank_dim=64
        )
    else:
        made = SimpleDeepFMNN(numeric, collection, hidden_layer_size=128, deep_fm_dimension=16)
        kind = OutputKind.PROBABILITY
    inputs = (
        Input("numbers", tuple(rows.numeric), "float32"),
        Input("ids", tuple(rows.categorical)),
    )
    return Built(FromIds(made, list(rows.categorical)), inputs, {"ctr": kind})

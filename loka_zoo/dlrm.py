"""DLRM: "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (1906.00091)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loka_zoo.layers import MLP, EmbeddingTables, PairwiseDots, tokens_of
from loka_zoo.spec import DLRMConfig, FeatureSpec


class DLRM(nn.Module):
    """Bottom MLP, embeddings, pairwise inner products, over MLP."""

    def __init__(self, features: FeatureSpec, config: DLRMConfig) -> None:
        super().__init__()
        width = config.embedding
        self.embeddings = EmbeddingTables(features, width)
        self.bottom = MLP((len(features.numeric), *config.bottom, width))
        self.dots = PairwiseDots(1 + len(features.categorical))
        self.over = MLP((width + self.dots.width, *config.over))
        self.head = nn.Linear(config.over[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Maps dense (batch, numeric) float32 and ids (batch, categorical) int64 to logits (batch,)."""
        bottom = self.bottom(dense)
        pairs = self.dots(tokens_of(bottom, self.embeddings(ids)))
        logit: Tensor = self.head(self.over(torch.cat([bottom, pairs], dim=1)))
        return logit.squeeze(-1)

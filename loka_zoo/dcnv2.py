"""DCNv2: "DCN V2: Improved Deep & Cross Network" (arXiv 2008.13535), stacked, with DLRM's bottom MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loka_zoo.layers import MLP, Cross, EmbeddingTables
from loka_zoo.spec import DCNv2Config, FeatureSpec


class DCNv2(nn.Module):
    """Bottom MLP, embeddings, cross layers on their concatenation, over MLP."""

    def __init__(self, features: FeatureSpec, config: DCNv2Config) -> None:
        super().__init__()
        width = config.embedding * (1 + len(features.categorical))
        self.embeddings = EmbeddingTables(features, config.embedding)
        self.bottom = MLP((len(features.numeric), *config.bottom, config.embedding))
        self.cross = nn.ModuleList(Cross(width, config.cross_rank) for _ in range(config.cross_layers))
        self.over = MLP((width, *config.over), norm=config.norm)
        self.head = nn.Linear(config.over[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Maps dense (batch, numeric) float32 and ids (batch, categorical) int64 to logits (batch,)."""
        x0 = torch.cat([self.bottom(dense), *self.embeddings(ids)], dim=1)
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        logit: Tensor = self.head(self.over(x))
        return logit.squeeze(-1)

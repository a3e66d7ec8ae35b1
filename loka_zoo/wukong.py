"""Wukong: "Towards a Scaling Law for Large-Scale Recommendation" (arXiv 2403.02545).

A layer maps tokens X (n, d) to X' = LN(concat(FMB(X), LCB(X)) + residual(X)), with

    FMB(X) = MLP(LN(flatten(X·(Xᵀ·Y))))  and  LCB(X) = W·X,

Y (n, k) and W (n_L, n) learned (section 3; X·(XᵀY) is its form of X·Xᵀ·Y that is linear in n). The residual
is X itself, or a learned mix of its tokens where their number changes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loka_zoo.layers import MLP, EmbeddingTables, tokens_of
from loka_zoo.spec import FeatureSpec, WukongConfig


class TokenMix(nn.Module):
    """Learned linear combinations of tokens, W·X."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mix = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, inputs, d) to (batch, outputs, d)."""
        mixed: Tensor = self.mix(x.transpose(1, 2))
        return mixed.transpose(1, 2)


class FactorizationMachineBlock(nn.Module):
    """FMB, the interaction half of a layer."""

    def __init__(self, tokens: int, config: WukongConfig) -> None:
        super().__init__()
        flat = tokens * config.rank
        self.shape = (config.fmb_tokens, config.embedding)
        self.project = nn.Linear(tokens, config.rank, bias=False)
        self.norm = nn.LayerNorm(flat)
        self.mlp = MLP((flat, *config.hidden, config.fmb_tokens * config.embedding), final=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, n, d) to (batch, n_F, d)."""
        interaction = torch.matmul(x, self.project(x.transpose(1, 2)))
        mapped: Tensor = self.mlp(self.norm(interaction.flatten(1)))
        return mapped.reshape(-1, *self.shape)


class WukongLayer(nn.Module):
    """One layer."""

    def __init__(self, tokens: int, config: WukongConfig) -> None:
        super().__init__()
        outputs = config.fmb_tokens + config.lcb_tokens
        self.fmb = FactorizationMachineBlock(tokens, config)
        self.lcb = TokenMix(tokens, config.lcb_tokens)
        self.residual = nn.Identity() if tokens == outputs else TokenMix(tokens, outputs)
        self.norm = nn.LayerNorm(config.embedding)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, n, d) to (batch, n_F + n_L, d)."""
        mapped: Tensor = self.norm(torch.cat([self.fmb(x), self.lcb(x)], dim=1) + self.residual(x))
        return mapped


class Wukong(nn.Module):
    """Bottom MLP and embeddings as tokens, layers, over MLP."""

    def __init__(self, features: FeatureSpec, config: WukongConfig) -> None:
        super().__init__()
        first, later = 1 + len(features.categorical), config.fmb_tokens + config.lcb_tokens
        self.embeddings = EmbeddingTables(features, config.embedding)
        self.bottom = MLP((len(features.numeric), *config.bottom, config.embedding))
        counts = [first, *[later] * (config.layers - 1)]
        self.layers = nn.ModuleList(WukongLayer(tokens, config) for tokens in counts)
        self.over = MLP((later * config.embedding, *config.over))
        self.head = nn.Linear(config.over[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Maps dense (batch, numeric) float32 and ids (batch, categorical) int64 to logits (batch,)."""
        x = tokens_of(self.bottom(dense), self.embeddings(ids))
        for layer in self.layers:
            x = layer(x)
        logit: Tensor = self.head(self.over(x.flatten(1)))
        return logit.squeeze(-1)

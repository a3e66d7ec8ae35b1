"""InterFormer: "Effective Heterogeneous Interaction Learning for Click-Through Rate Prediction" (2411.09852).

Each layer runs three archs over non-sequence tokens X and sequence tokens S:

- cross arch: summaries, X_sum = gate(mix(X)) and S_sum = gate([CLS, PMA, recent tokens] of S);
- interaction arch: X' = LN(X + MLP([DOT(Z), DCN(Z)])) of Z = [X, S_sum];
- sequence arch: S' = LN(S + MHA(PFFN(X_sum, S))), where PFFN multiplies S by a matrix made from X_sum.

The first X_sum is prepended to the sequence as its CLS tokens. gate(x) = x ⊙ σ(linear(x)). Without a history
in the data, embeddings of some categorical fields are the sequence (`FeatureSpec.sequence`); they remain
among the non-sequence tokens as well. The recent tokens are the last of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loka_onnx.errors import ConfigError
from loka_zoo.layers import MLP, Cross, EmbeddingTables, PairwiseDots, tokens_of
from loka_zoo.spec import FeatureSpec, InterFormerConfig
from loka_zoo.wukong import TokenMix


class SelfGate(nn.Module):
    """x ⊙ σ(linear(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, n, d) to (batch, n, d)."""
        gated: Tensor = x * torch.sigmoid(self.linear(x))
        return gated


class Attention(nn.Module):
    """Multi-head attention; written out so that each product is a site of its own.

    Args:
        width: Length d of a token.
        heads: Heads; divides the width.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """Maps queries (batch, q, d) and tokens (batch, t, d) to (batch, q, d)."""
        query, key, value = self.query(queries), self.key(tokens), self.value(tokens)
        q, k, v = (self._split(part) for part in (query, key, value))
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * self.scale, dim=-1)
        attended: Tensor = self.out(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        return attended

    def _split(self, x: Tensor) -> Tensor:
        """Maps (batch, n, d) to (batch, heads, n, d / heads)."""
        return x.reshape(-1, x.shape[1], self.heads, x.shape[2] // self.heads).transpose(1, 2)


class InteractionArch(nn.Module):
    """X' = LN(X + MLP([DOT(Z), DCN(Z)]))."""

    def __init__(self, tokens: int, summary: int, config: InterFormerConfig) -> None:
        super().__init__()
        width, every = config.embedding, tokens + summary
        self.dots = PairwiseDots(every)
        self.cross = Cross(every * width, config.cross_rank)
        self.fc = nn.Linear(self.dots.width + every * width, tokens * width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, summary: Tensor) -> Tensor:
        """Maps X (batch, n, d) and a summary (batch, s, d) to (batch, n, d)."""
        z = torch.cat([x, summary], dim=1)
        flat = z.flatten(1)
        mapped: Tensor = self.fc(torch.cat([self.dots(z), self.cross(flat, flat)], dim=1))
        normed: Tensor = self.norm(x + torch.relu(mapped).reshape(-1, x.shape[1], x.shape[2]))
        return normed


class SequenceArch(nn.Module):
    """S' = LN(S + MHA(PFFN(X_sum, S))).

    Args:
        config: The sizes.
    """

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        width = config.embedding
        self.width = width
        self.personal = nn.Linear(config.cls * width, width * width)
        self.attention = Attention(width, config.heads)
        self.norm = nn.LayerNorm(width)

    def forward(self, s: Tensor, summary: Tensor) -> Tensor:
        """Maps S (batch, t, d) and X_sum (batch, c, d) to (batch, t, d)."""
        matrix: Tensor = self.personal(summary.flatten(1))
        personal = torch.matmul(s, matrix.reshape(-1, self.width, self.width))
        normed: Tensor = self.norm(s + self.attention(personal, personal))
        return normed


class CrossArch(nn.Module):
    """The summary of the sequence, S_sum = gate([CLS, PMA, recent])."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.cls, self.recent = config.cls, config.recent
        self.seeds = nn.Parameter(torch.randn(1, config.pma, config.embedding) * 0.05)
        self.pma = Attention(config.embedding, config.heads)
        self.gate = SelfGate(config.embedding)

    def forward(self, s: Tensor) -> Tensor:
        """Maps S (batch, cls + t, d), CLS first, to (batch, cls + pma + recent, d)."""
        pooled = self.pma(self.seeds.expand(s.shape[0], -1, -1), s[:, self.cls :])
        summary: Tensor = self.gate(torch.cat([s[:, : self.cls], pooled, s[:, -self.recent :]], dim=1))
        return summary


class InterFormerLayer(nn.Module):
    """One layer of the three archs."""

    def __init__(self, tokens: int, config: InterFormerConfig) -> None:
        super().__init__()
        self.cross_arch = CrossArch(config)
        self.interaction_arch = InteractionArch(tokens, config.cls + config.pma + config.recent, config)
        self.summary = Summary(tokens, config)
        self.sequence_arch = SequenceArch(config)

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Maps X (batch, n, d) and S (batch, cls + t, d) to new ones of the same shapes."""
        return self.interaction_arch(x, self.cross_arch(s)), self.sequence_arch(s, self.summary(x))


class Summary(nn.Module):
    """X_sum = gate(mix(X))."""

    def __init__(self, tokens: int, config: InterFormerConfig) -> None:
        super().__init__()
        self.tokens = TokenMix(tokens, config.cls)
        self.gate = SelfGate(config.embedding)

    def forward(self, x: Tensor) -> Tensor:
        """Maps X (batch, n, d) to (batch, cls, d)."""
        summary: Tensor = self.gate(self.tokens(x))
        return summary


class InterFormer(nn.Module):
    """Bottom MLP and embeddings as tokens, a sequence, layers, over MLP."""

    def __init__(self, features: FeatureSpec, config: InterFormerConfig) -> None:
        super().__init__()
        names = [name for name, _ in features.categorical]
        self.history = None if features.history is None else features.history[0]
        self.fields = [names.index(name) for name in features.sequence or names]
        length = len(self.fields) if features.history is None else features.history[1]
        if config.recent > length or config.embedding % config.heads:
            raise ConfigError(
                "the sizes of InterFormer do not fit together",
                evidence=f"{config.recent} recent tokens of a sequence of {length}; "
                f"{config.heads} heads of a width of {config.embedding}",
                remedy="lower `recent`, or choose heads that divide the width",
            )
        tokens, width = 1 + len(names), config.embedding
        self.embeddings = EmbeddingTables(features, width)
        self.bottom = MLP((len(features.numeric), *config.bottom, width))
        self.positions = nn.Parameter(torch.randn(1, length, width) * 0.05)
        self.summary = Summary(tokens, config)
        self.layers = nn.ModuleList(InterFormerLayer(tokens, config) for _ in range(config.layers))
        self.last = CrossArch(config)
        every = tokens + config.cls + config.pma + config.recent
        self.over = MLP((every * width, *config.over))
        self.head = nn.Linear(config.over[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor, history: Tensor | None = None) -> Tensor:
        """Map dense (batch, numeric) float32 and ids (batch, categorical) int64 to logits (batch,).

        `history` is (batch, length) int64, oldest first, exactly when the features have a history.
        """
        embedded = self.embeddings(ids)
        x = tokens_of(self.bottom(dense), embedded)
        if self.history is None or history is None:
            sequence = torch.stack([embedded[field] for field in self.fields], dim=1)
        else:
            sequence = self.embeddings[self.history](history)
        s = torch.cat([self.summary(x), sequence + self.positions], dim=1)
        for layer in self.layers:
            x, s = layer(x, s)
        logit: Tensor = self.head(self.over(torch.cat([x, self.last(s)], dim=1).flatten(1)))
        return logit.squeeze(-1)

"""Parts that the models share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from loka_zoo.spec import FeatureSpec


class EmbeddingTables(nn.ModuleDict):
    """One embedding table for each categorical feature, under its name."""

    def __init__(self, features: FeatureSpec, width: int) -> None:
        tables = {name: nn.Embedding(size, width) for name, size in features.categorical}
        # The default N(0, 1) drowns the interactions of a product model at the start.
        for table in tables.values():
            nn.init.normal_(table.weight, std=0.05)
        super().__init__(tables)

    def forward(self, ids: Tensor) -> list[Tensor]:
        """Looks up (batch, features) int64; returns one (batch, width) for each feature."""
        return [table(ids[:, position]) for position, table in enumerate(self.values())]


class MLP(nn.Module):
    """Linear layers fc1, fc2, …, each followed by ReLU, and by LayerNorm in front of it when asked.

    Args:
        widths: Input width, then the output width of each layer.
        norm: Whether a LayerNorm stands between each layer and its ReLU.
        final: Whether the last layer, too, is followed by ReLU (and LayerNorm).
    """

    def __init__(self, widths: Sequence[int], *, norm: bool = False, final: bool = True) -> None:
        super().__init__()
        self.depth, self.final = len(widths) - 1, final
        self.norm = norm
        for position, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1):
            self.add_module(f"fc{position}", nn.Linear(inputs, outputs))
            if norm and (final or position < self.depth):
                self.add_module(f"norm{position}", nn.LayerNorm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (…, widths[0]) to (…, widths[-1])."""
        for position in range(1, self.depth + 1):
            x = self.get_submodule(f"fc{position}")(x)
            if position == self.depth and not self.final:
                break
            if self.norm:
                x = self.get_submodule(f"norm{position}")(x)
            x = torch.relu(x)
        return x


class Cross(nn.Module):
    """A cross layer, x' = x0 ⊙ (W·x + b) + x (arXiv 2008.13535, equation 1).

    With a rank r, W = U·Vᵀ (its equation 2): `down` is Vᵀ, `up` is U with b.
    """

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        if rank is None:
            self.linear: nn.Module = nn.Linear(width, width)
        else:
            self.linear = nn.Sequential()
            self.linear.add_module("down", nn.Linear(width, rank, bias=False))
            self.linear.add_module("up", nn.Linear(rank, width))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Maps two (batch, width) to (batch, width)."""
        crossed: Tensor = x0 * self.linear(x) + x
        return crossed


class PairwiseDots(nn.Module):
    """Inner products of all pairs of different tokens (DLRM, arXiv 1906.00091, section 2)."""

    positions: Tensor

    def __init__(self, tokens: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(tokens, tokens, offset=-1)
        # Flat positions keep the selection a plain Gather in ONNX.
        self.register_buffer("positions", rows * tokens + columns, persistent=False)

    @property
    def width(self) -> int:
        """n·(n-1)/2, the number of pairs."""
        return int(self.positions.numel())

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, n, d) to (batch, n·(n-1)/2), pairs in row order of the lower triangle."""
        return torch.matmul(x, x.transpose(1, 2)).flatten(1).index_select(1, self.positions)


def tokens_of(bottom: Tensor, embedded: Sequence[Tensor]) -> Tensor:
    """Stacks the bottom MLP's output and the embeddings, each (batch, d), to (batch, n, d)."""
    return torch.stack([bottom, *embedded], dim=1)

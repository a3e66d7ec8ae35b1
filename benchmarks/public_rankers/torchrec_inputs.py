"""The input of TorchRec's models from an id matrix; a module of its own, because it imports TorchRec."""

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor


class FromIds(nn.Module):
    """A model with one id a feature, from an id matrix.

    Args:
        model: Of the library.
        keys: Its features, in the order of the columns.
    """

    def __init__(self, model: nn.Module, keys: list[str]) -> None:
        super().__init__()
        self.model = model
        self.keys = keys

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """(batch, 1) of numbers (batch, numeric) and ids (batch, features)."""
        values = ids.t().reshape(-1)
        jagged = KeyedJaggedTensor(self.keys, values, lengths=torch.ones_like(values))
        return self.model(numbers, jagged)  # type: ignore[no-any-return]

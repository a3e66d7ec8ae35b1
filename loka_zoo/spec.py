"""Features, sizes and presets of the models, as data. No framework is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from loka_onnx.errors import ConfigError
from loka_zoo.prepared import PreparedData

# An embedding table becomes an entry of a torch.nn.ModuleDict, where these names are taken.
_RESERVED = frozenset({"clear", "forward", "items", "keys", "pop", "training", "type", "update", "values"})


@dataclass(frozen=True)
class FeatureSpec:
    """The features of a model.

    Attributes:
        categorical: Name and number of ids of each categorical feature, in the order of the input `ids`.
        numeric: Numeric features, in the order of the input `dense`.
        sequence: Categorical features that stand in for a history in a model that takes one, when there is
            no `history`; empty for all of them.
        history: The categorical feature whose table the input `history` (batch, length) looks up, and its
            length; None when the data have no history. Short histories are padded with an id kept for it.

    Raises:
        ConfigError: When a list is empty, or a name cannot name a module.
    """

    categorical: tuple[tuple[str, int], ...]
    numeric: tuple[str, ...]
    sequence: tuple[str, ...] = ()
    history: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        names = [name for name, _ in self.categorical]
        if not names or not self.numeric:
            raise ConfigError(
                "a model of the zoo needs categorical and numeric features",
                evidence=f"{len(names)} categorical, {len(self.numeric)} numeric",
                remedy="add a constant column for the kind that is missing",
            )
        wrong = [n for n in names if not n.isidentifier() or n in _RESERVED or names.count(n) > 1]
        if wrong:
            raise ConfigError(
                f"categorical feature '{wrong[0]}' cannot name an embedding table",
                evidence="it is repeated, reserved, or not an identifier",
                remedy="rename the column",
            )
        unknown = [n for n in (*self.sequence, *(self.history or ())[:1]) if n not in names]
        if unknown:
            raise ConfigError(
                f"the sequence is made of '{unknown[0]}', which is no categorical feature",
                evidence=f"there are {', '.join(names)}",
                remedy="name one of these",
            )

    @classmethod
    def of(cls, data: PreparedData) -> FeatureSpec:
        """The features of a prepared data set.

        For MovieLens, which has no history column, the genres and the title word of the item are the
        sequence.
        """
        names = [name for name, _ in data.categorical]
        sequence = tuple(name for name in names if name.startswith("genre") or name == "title_word")
        return cls(data.categorical, data.numeric, sequence)


@dataclass(frozen=True)
class DLRMConfig:
    """Sizes of DLRM (arXiv 1906.00091).

    Attributes:
        embedding: Width of an embedding.
        bottom: Widths of the bottom MLP's hidden layers; its last layer has the embedding's width.
        over: Widths of the hidden layers of the MLP above the interaction.
    """

    embedding: int
    bottom: tuple[int, ...]
    over: tuple[int, ...]


@dataclass(frozen=True)
class DCNv2Config:
    """Sizes of DCNv2 (arXiv 2008.13535), stacked: the deep network follows the cross layers.

    Attributes:
        embedding: Width of an embedding.
        bottom: Widths of the bottom MLP's hidden layers; its last layer has the embedding's width.
        cross_layers: Number of cross layers.
        cross_rank: Rank of a cross layer's matrix; None for full rank.
        over: Widths of the hidden layers of the deep network.
        norm: Whether a LayerNorm follows each hidden layer of the deep network.
    """

    embedding: int
    bottom: tuple[int, ...]
    cross_layers: int
    cross_rank: int | None
    over: tuple[int, ...]
    norm: bool


@dataclass(frozen=True)
class WukongConfig:
    """Sizes of Wukong (arXiv 2403.02545).

    Attributes:
        embedding: Width d of a token.
        bottom: Widths of the bottom MLP's hidden layers; its last layer has the embedding's width.
        layers: l, number of layers.
        fmb_tokens: n_F, tokens that a factorization machine block gives.
        lcb_tokens: n_L, tokens that a linear compression block gives.
        rank: k, columns of the projection Y.
        hidden: Widths of the hidden layers of a block's MLP.
        over: Widths of the hidden layers of the MLP above the layers.
    """

    embedding: int
    bottom: tuple[int, ...]
    layers: int
    fmb_tokens: int
    lcb_tokens: int
    rank: int
    hidden: tuple[int, ...]
    over: tuple[int, ...]


@dataclass(frozen=True)
class InterFormerConfig:
    """Sizes of InterFormer (arXiv 2411.09852).

    Attributes:
        embedding: Width d of a token; a multiple of `heads`.
        bottom: Widths of the bottom MLP's hidden layers; its last layer has the embedding's width.
        layers: Number of layers.
        heads: Attention heads.
        cls: CLS tokens, which are also the number of tokens that summarize the non-sequence features.
        pma: Tokens of pooling by multi-head attention.
        recent: Recent tokens of the sequence that enter its summary.
        cross_rank: Rank of the cross layer inside the interaction arch.
        over: Widths of the hidden layers of the MLP above the layers.
    """

    embedding: int
    bottom: tuple[int, ...]
    layers: int
    heads: int
    cls: int
    pma: int
    recent: int
    cross_rank: int
    over: tuple[int, ...]


ModelConfig = DLRMConfig | DCNv2Config | WukongConfig | InterFormerConfig

_PRESETS: dict[str, dict[str, ModelConfig]] = {
    "dlrm": {
        "tiny": DLRMConfig(8, (16,), (32, 16)),
        "reference": DLRMConfig(32, (64,), (512, 256)),
        # MLPerf DLRM on Criteo Terabyte.
        "production": DLRMConfig(128, (512, 256), (1024, 1024, 512, 256)),
    },
    "dcnv2": {
        "tiny": DCNv2Config(8, (16,), 2, None, (32, 16), norm=True),
        "reference": DCNv2Config(16, (64,), 3, None, (512, 256), norm=True),
        # MLPerf DLRM-DCNv2.
        "production": DCNv2Config(128, (512, 256), 3, 512, (1024, 1024, 512, 256), norm=False),
    },
    "wukong": {
        "tiny": WukongConfig(8, (16,), 2, 4, 4, 4, (16,), (16,)),
        "reference": WukongConfig(32, (64,), 3, 8, 8, 16, (256, 256), (256,)),
        # The smallest and the largest of the paper.
        "paper-small": WukongConfig(128, (512, 256), 2, 8, 8, 24, (2048, 2048), (1024, 512)),
        "paper-large": WukongConfig(128, (512, 256), 8, 96, 96, 96, (8192, 8192), (1024, 512)),
        # The stacks measured on an H100.
        "small": WukongConfig(128, (512, 256), 4, 32, 32, 32, (2048, 2048), (1024, 512)),
        "production": WukongConfig(128, (512, 256), 3, 64, 64, 64, (4096, 4096), (1024, 512)),
    },
    "interformer": {
        "tiny": InterFormerConfig(8, (16,), 1, 2, 2, 1, 1, 8, (32, 16)),
        "reference": InterFormerConfig(32, (64,), 2, 4, 4, 2, 2, 32, (512, 256)),
        "production": InterFormerConfig(128, (512, 256), 3, 8, 4, 2, 2, 256, (1024, 512, 256, 128)),
    },
}
PRESETS: Mapping[str, Mapping[str, ModelConfig]] = MappingProxyType(_PRESETS)


def config_of(name: str, preset: str) -> Any:
    """The sizes of a preset of a model; `ConfigError` when there is none."""
    if name not in PRESETS:
        raise ConfigError(
            f"there is no model '{name}' in the zoo",
            evidence=f"there are {', '.join(PRESETS)}",
            remedy="name one of these",
        )
    if preset not in PRESETS[name]:
        raise ConfigError(
            f"the model '{name}' has no preset '{preset}'",
            evidence=f"there are {', '.join(PRESETS[name])}",
            remedy="name one of these",
        )
    return PRESETS[name][preset]

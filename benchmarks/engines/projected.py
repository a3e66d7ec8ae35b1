"""Rankers of production size on data with few features, and their training on a GPU.

The dense part of a ranker of the zoo asks for many tokens; the data have a few categorical columns. A learned
matrix P (tokens, features) makes the ones of the others, P·E with E (features, d) the embeddings of a row,
and everything behind it is the ranker as it stands in the zoo. P·E is less than a thousandth of the
arithmetic of the dense part, and it is in every engine alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from loka_onnx.data import Dataset
from loka_onnx.errors import ModelError
from loka_onnx.numerics.task_metrics import auc, normalized_entropy
from loka_zoo import FeatureSpec, create
from loka_zoo.layers import EmbeddingTables
from loka_zoo.spec import config_of
from loka_zoo.training import TrainOptions
from loka_zoo.wukong import TokenMix

READ_ROWS = 65536
WARM_UP = 0.1
"""Part of the steps over which the learning rate rises: deep stacks of this width diverge without."""
NORM = 1.0
"""Largest norm of a gradient."""
TABLE_RATE = 4e-3
"""Learning rate of embeddings: a row of a table is seen in few steps, a dense layer in all."""


class ProjectedTokens(nn.Module):
    """Embeddings of the features, mixed to any number of tokens.

    Args:
        features: The features.
        tokens: Number of tokens.
        width: Length d of each.
    """

    def __init__(self, features: FeatureSpec, tokens: int, width: int) -> None:
        super().__init__()
        self.tables = EmbeddingTables(features, width)
        self.project = TokenMix(len(features.categorical), tokens)
        # Tokens as large as the embeddings that they are made of.
        nn.init.normal_(self.project.mix.weight, std=len(features.categorical) ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps ids (batch, features) int64 to tokens (batch, tokens, d)."""
        tokens: Tensor = self.project(torch.stack(self.tables(ids), dim=1))
        return tokens


class Projected(nn.Module):
    """A ranker of the zoo whose tokens are projected.

    Args:
        name: In the zoo.
        preset: Its sizes.
        features: The features of the data.
        tokens: Tokens beside that of the bottom MLP.
    """

    def __init__(self, name: str, preset: str, features: FeatureSpec, tokens: int) -> None:
        super().__init__()
        asked_for = FeatureSpec(tuple((f"token{i}", 1) for i in range(tokens)), features.numeric)
        self.ranker: Any = create(name, asked_for, preset)
        del self.ranker.embeddings
        self.tokens = ProjectedTokens(features, tokens, config_of(name, preset).embedding)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Maps dense (batch, numeric) float32 and ids (batch, features) int64 to logits (batch,)."""
        bottom = self.ranker.bottom(dense).unsqueeze(1)
        over = self.ranker.over(self.interact(torch.cat([bottom, self.tokens(ids)], dim=1)))
        logit: Tensor = self.ranker.head(over)
        return logit.squeeze(-1)

    def interact(self, x: Tensor) -> Tensor:
        """Maps all tokens (batch, n, d) to what the last MLP reads, (batch, width)."""
        raise NotImplementedError


class ProjectedWukong(Projected):
    """Wukong."""

    def interact(self, x: Tensor) -> Tensor:
        """See `Projected.interact`; as `zoo.wukong.Wukong`."""
        for layer in self.ranker.layers:
            x = layer(x)
        return x.flatten(1)


class ProjectedDCNv2(Projected):
    """DCNv2."""

    def interact(self, x: Tensor) -> Tensor:
        """See `Projected.interact`; as `zoo.dcnv2.DCNv2`."""
        x0 = x = x.flatten(1)
        for layer in self.ranker.cross:
            x = layer(x0, x)
        return x


CLASSES: Mapping[str, type[Projected]] = {"wukong": ProjectedWukong, "dcnv2": ProjectedDCNv2}


def create_projected(name: str, preset: str, features: FeatureSpec, tokens: int, seed: int) -> Projected:
    """A ranker with random weights; `CLASSES` says of which models there are any."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CLASSES[name](name, preset, features, tokens)


@dataclass(frozen=True)
class Rows:
    """Rows of a data set on a device.

    Attributes:
        inputs: Of the model, by name, the batch on axis 0.
        labels: (rows,) float32.
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor

    @classmethod
    def of(cls, data: Dataset, label: str, device: str) -> Rows:
        """All rows of a data set."""
        batches = list(data.batches(READ_ROWS))

        def tensor(parts: Sequence[npt.NDArray[Any]]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(device)

        inputs = {name: tensor([batch.inputs[name] for batch in batches]) for name in batches[0].inputs}
        return cls(inputs, tensor([batch.columns[label].astype(np.float32) for batch in batches]))

    @property
    def count(self) -> int:
        """How many."""
        return len(self.labels)

    def take(self, which: Tensor) -> Rows:
        """Some of them."""
        return Rows({name: values[which] for name, values in self.inputs.items()}, self.labels[which])


@dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
        module: The model, in evaluation mode.
        facts: How it was trained and what came of it, for the record.
        entropy: Normalized entropy on the rows that trials are compared on.
    """

    module: Projected
    facts: dict[str, Any]
    entropy: float


def train(module: nn.Module, rows: Rows, options: TrainOptions) -> list[float]:
    """Train a model where it lies, with AdamW, on a GPU in BF16 with FP32 weights.

    Returns:
        Mean loss of each epoch, nats, over the rows as they were trained on.

    Raises:
        ModelError: The loss stops being finite.
    """
    groups = _groups(module, options)
    steps = rows.count // options.batch_size
    optimizer = torch.optim.AdamW(groups, fused=rows.labels.is_cuda)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        [float(group["lr"]) for group in groups],
        total_steps=steps * options.epochs,
        pct_start=WARM_UP,
        cycle_momentum=False,
    )
    generator = torch.Generator(rows.labels.device).manual_seed(options.seed)
    kind = rows.labels.device.type
    losses: list[float] = []
    module.train()
    for epoch in range(options.epochs):
        order = torch.randperm(rows.count, generator=generator, device=rows.labels.device)
        summed = torch.zeros((), device=rows.labels.device)
        for step in range(steps):
            batch = rows.take(order[step * options.batch_size : (step + 1) * options.batch_size])
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                logits = module(**batch.inputs)
            loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(module.parameters(), NORM)
            optimizer.step()
            schedule.step()
            summed += loss.detach()
        losses.append(float(summed) / steps)
        if not np.isfinite(losses[-1]):
            raise ModelError(
                "training diverged",
                evidence=f"the mean loss of epoch {epoch + 1} is {losses[-1]}",
                remedy="lower the learning rate",
            )
    module.eval()
    return losses


def _groups(module: nn.Module, options: TrainOptions) -> list[dict[str, Any]]:
    """Tables, matrices and the rest, as `zoo.training` has them, tables at a rate of their own."""
    tables = {id(m.weight): m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    rest = [p for p in module.parameters() if id(p) not in tables]
    rate = options.learning_rate
    matrices, vectors = [p for p in rest if p.ndim >= 2], [p for p in rest if p.ndim < 2]
    return [
        {"params": [*tables.values()], "weight_decay": options.embedding_decay, "lr": TABLE_RATE},
        {"params": matrices, "weight_decay": options.weight_decay, "lr": rate},
        {"params": vectors, "weight_decay": 0.0, "lr": rate},
    ]


@torch.inference_mode()
def logits_of(module: nn.Module, rows: Rows, batch: int = 2048) -> npt.NDArray[np.float32]:
    """(rows,) logits in FP32."""
    with exact_products():
        parts = [
            module(**{name: values[start : start + batch] for name, values in rows.inputs.items()})
            for start in range(0, rows.count, batch)
        ]
        return torch.cat(parts).cpu().numpy().astype(np.float32)


@contextmanager
def exact_products() -> Iterator[None]:
    """FP32 products without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def best_trial(
    make: Callable[[], Projected],
    rows: Mapping[str, Rows],
    trials: Sequence[TrainOptions],
    tell: Callable[[str], None],
) -> Trial:
    """Train with each of the options; the one with the smallest normalized entropy on selection.

    Args:
        make: A model with the same random weights every time, on the device of the rows.
        rows: ``train`` and ``selection``.
        trials: The options.
        tell: Told of each.

    Raises:
        ModelError: All of them diverged.
    """
    found: Trial | None = None
    facts: list[dict[str, Any]] = []
    labels = rows["selection"].labels.cpu().numpy()
    for options in trials:
        began, module = time.perf_counter(), make()
        entry: dict[str, Any] = {
            "epochs": options.epochs,
            "batch_size": options.batch_size,
            "learning_rate": options.learning_rate,
            "table_rate": TABLE_RATE,
            "weight_decay": options.weight_decay,
            "embedding_decay": options.embedding_decay,
        }
        facts.append(entry)
        try:
            entry["losses"] = train(module, rows["train"], options)
        except ModelError as error:
            entry["failed"] = str(error)
            tell(f"trained: {entry}")
            continue
        logits = logits_of(module, rows["selection"])
        entropy = float(normalized_entropy(logits, labels))
        entry |= {"selection_ne": entropy, "selection_auc": auc(logits, labels)}
        entry["seconds"] = time.perf_counter() - began
        tell(f"trained: {entry}")
        if found is None or entropy < found.entropy:
            found = Trial(module, entry, entropy)
    if found is None:
        raise ModelError(
            "every training diverged", evidence=f"{len(facts)} were tried", remedy="lower the rates"
        )
    return Trial(found.module, {"chosen": found.facts, "trials": facts}, found.entropy)

"""Training a model of the zoo on rows that fit in memory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from loka_onnx.data import Dataset
from loka_onnx.errors import ConfigError, DataError, ModelError

Progress = Callable[[int, int, float], None]
_READ_ROWS = 65536


@dataclass(frozen=True)
class TrainOptions:
    """Options of training.

    Attributes:
        epochs: Passes over the rows.
        batch_size: Rows of a step; rows that do not fill the last batch of an epoch sit that epoch out.
        learning_rate: Peak of the learning rate, which falls to 0 along a half cosine.
        seed: Orders the rows.
        weight_decay: AdamW's decay of weight matrices; biases and norms have none.
        embedding_decay: AdamW's decay of embedding tables, far stronger: a row is wrong mostly by having
            learned its few examples by heart.
        threads: Threads of PyTorch; None leaves them as they are. Another number of threads sums in
            another order, so that losses agree to rounding only.
        label: Label column of the data set.
    """

    epochs: int = 2
    batch_size: int = 512
    learning_rate: float = 2e-3
    seed: int = 0
    weight_decay: float = 0.1
    embedding_decay: float = 5.0
    threads: int | None = None
    label: str = "label"

    def __post_init__(self) -> None:
        decays = (self.weight_decay, self.embedding_decay)
        if min(self.epochs, self.batch_size) < 1 or self.learning_rate <= 0 or min(decays) < 0:
            raise ConfigError(
                "training options are out of range",
                evidence=f"epochs {self.epochs}, batch size {self.batch_size}, learning rate "
                f"{self.learning_rate}, decays {decays}",
                remedy="use positive numbers; a decay may be 0",
            )


@dataclass(frozen=True)
class TrainResult:
    """Mean binary cross entropy (nats) of each epoch over rows as trained on, and wall-clock time."""

    losses: tuple[float, ...]
    seconds: float
    rows: int


def train(
    model: nn.Module, data: Dataset, options: TrainOptions | None = None, progress: Progress | None = None
) -> TrainResult:
    """Train a model, which takes inputs of the data set by keyword and gives logits (batch,), in place with
    AdamW.

    Deterministic given the model's weights, the options and the machine. All rows are held in memory.
    `progress` is called after each step with the step, the number of steps and the step's loss (nats).

    Raises:
        ConfigError: When the data set lacks the label column or has fewer rows than a batch.
        DataError: When a label is outside [0, 1].
        ModelError: When the loss stops being finite.
    """
    options = options or TrainOptions()
    started = time.perf_counter()
    with _threads(options.threads):
        inputs, label = _load(data, options)
        steps = label.shape[0] // options.batch_size
        total = steps * options.epochs
        optimizer = torch.optim.AdamW(_groups(model, options), lr=options.learning_rate, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _pace(step, total))
        generator = torch.Generator().manual_seed(options.seed)
        loss_of = nn.BCEWithLogitsLoss()
        losses = []
        model.train()
        for epoch in range(options.epochs):
            order = torch.randperm(label.shape[0], generator=generator)
            summed = 0.0
            for step in range(steps):
                rows = order[step * options.batch_size : (step + 1) * options.batch_size]
                optimizer.zero_grad(set_to_none=True)
                loss = loss_of(model(**{name: x[rows] for name, x in inputs.items()}), label[rows])
                loss.backward()
                optimizer.step()
                schedule.step()
                summed += _finite(loss, epoch * steps + step)
                if progress is not None:
                    progress(epoch * steps + step + 1, total, float(loss.detach()))
            losses.append(summed / steps)
        model.eval()
    return TrainResult(tuple(losses), time.perf_counter() - started, int(label.shape[0]))


def predict(model: nn.Module, data: Dataset, batch_size: int = 8192) -> npt.NDArray[np.float32]:
    """Logits (rows,) float32 of all rows of a data set, of a model as for `train`."""
    with torch.inference_mode():
        parts = [
            model(**{name: torch.from_numpy(x) for name, x in batch.inputs.items()}).numpy()
            for batch in data.batches(batch_size)
        ]
    return np.concatenate(parts).astype(np.float32)


def _load(data: Dataset, options: TrainOptions) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and the label (rows,) float32 as tensors."""
    if options.label not in data.layout.columns or data.rows < options.batch_size:
        raise ConfigError(
            "the data set cannot be trained on",
            where=data.name,
            evidence=f"its columns are {data.layout.columns}, the label is '{options.label}'; it has "
            f"{data.rows} rows, a batch {options.batch_size}",
            remedy="open it with the label column, and use a batch no larger than the data",
        )
    batches = list(data.batches(_READ_ROWS))
    label = np.concatenate([batch.columns[options.label] for batch in batches]).astype(np.float32)
    if label.min() < 0 or label.max() > 1:
        raise DataError(
            f"label '{options.label}' of '{data.name}' is outside [0, 1]",
            evidence=f"it ranges from {label.min():g} to {label.max():g}",
            remedy="train on a click-like label, 0 or 1",
        )
    names = batches[0].inputs
    inputs = {name: torch.from_numpy(np.concatenate([b.inputs[name] for b in batches])) for name in names}
    return inputs, torch.from_numpy(label)


def _groups(model: nn.Module, options: TrainOptions) -> list[dict[str, object]]:
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    rest = [p for p in model.parameters() if id(p) not in tables]
    return [
        {"params": list(tables.values()), "weight_decay": options.embedding_decay},
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]


def _pace(step: int, total: int) -> float:
    """Factor of the learning rate: linear up over the first twentieth, then a half cosine down to 0."""
    warm = max(1, total // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


def _finite(loss: Tensor, step: int) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise ModelError(
            "training diverged",
            evidence=f"the loss of step {step} is {value}",
            remedy="lower the learning rate",
        )
    return value


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

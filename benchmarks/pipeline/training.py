"""The models of the zoo that the benchmarks on MovieLens 1M run on, trained once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from loka_onnx.core.digests import digest_json
from loka_onnx.export.checkpoint import save_checkpoint
from loka_zoo.builders import build
from loka_zoo.prepared import PreparedData
from loka_zoo.training import TrainOptions, train

GROUP = "user_id"
"""Column of rows that belong together."""

TRAINING = {
    "dcnv2": TrainOptions(epochs=3, batch_size=2048, learning_rate=1e-2),
    "wukong": TrainOptions(epochs=2, batch_size=2048, learning_rate=4e-3),
    "dlrm": TrainOptions(epochs=2, batch_size=2048, learning_rate=4e-3),
    "interformer": TrainOptions(epochs=2, batch_size=2048, learning_rate=4e-3),
}


def arguments_of(model: str, data: PreparedData) -> dict[str, Any]:
    """Arguments of the builder."""
    return {
        "architecture": model,
        "size": "reference",
        "categorical": dict(data.categorical),
        "numeric": list(data.numeric),
    }


def checkpoint_path(model: str, directory: Path) -> Path:
    """Where the checkpoint of a model is, under its options."""
    return directory / f"{model}-{digest_json(vars(TRAINING[model]))[:8]}.safetensors"


def trained(model: str, data: PreparedData, directory: Path) -> Path:
    """A checkpoint of the model, trained once per set of options."""
    options, path = TRAINING[model], checkpoint_path(model, directory)
    if not path.exists():
        module, _ = build(**arguments_of(model, data))
        began = time.perf_counter()
        result = train(module, data.open("train"), options)
        print(f"{model}: trained in {time.perf_counter() - began:.0f} s, losses {result.losses}", flush=True)
        save_checkpoint(path, module.state_dict())
    return path

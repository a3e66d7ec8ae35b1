"""Click-through models of a public library, DeepCTR-Torch, trained on MovieLens 1M and exported.

Layers have the library's default sizes; embeddings have 16 numbers, where its default is 4. Two things are
ours, because an engine below FP32 would be judged on something else without them:

* The library keeps ids and numbers in one FP32 matrix and turns the ids back into integers. BF16 holds
  integers up to 256 and FP16 up to 2,048, so that a converter which narrows that matrix looks up other rows.
  `Columns` stands in its place and keeps ids as integers.
* The last layer leaves out its sigmoid: the output is the logit, as in the zoo.

The library lies in a directory of its own (``$LOKA_ONNX_DEEPCTR``, else beside the checkpoints, where pip
puts it) and runs on this project's torch and numpy, which all its models were seen to export with. To train
them beforehand and see that they rank::

    python -m benchmarks.peers.ctr_models --checkpoints DIRECTORY

Needs the files under ``$LOKA_ONNX_DATA`` (research use; checkpoints are never committed).
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.digests import digest_json
from loka_onnx.export.checkpoint import load_checkpoint, save_checkpoint
from loka_onnx.export.torch_module import export_torch
from loka_onnx.numerics.task_metrics import auc
from loka_zoo.movielens1m import movielens_1m
from loka_zoo.prepared import PreparedData
from loka_zoo.training import TrainOptions, predict, train

CTR_MODELS: tuple[str, ...] = ("deepfm", "pnn", "nfm", "fibinet", "wdl")
CLASSES = {"deepfm": "DeepFM", "pnn": "PNN", "nfm": "NFM", "fibinet": "FiBiNET", "wdl": "WDL"}
DEEPCTR_ENVIRONMENT = "LOKA_ONNX_DEEPCTR"
"""Variable that holds the directory of DeepCTR-Torch and of what it imports."""
LIBRARY = "deepctr-torch==0.3.0"
PINS = Path(__file__).with_name("environments") / "deepctr.txt"
EMBEDDING = 16
OUTPUT = "logit"
EXPORT_ROWS = 2048
TRAINING = TrainOptions(epochs=4, batch_size=4096, learning_rate=4e-3)


# The library ----------------------------------------------------------------------------------------------


def library_directory(checkpoints: Path) -> Path:
    """Where DeepCTR-Torch lies; it is installed there first where it is not.

    Args:
        checkpoints: The directory beside whose files it is put without ``$LOKA_ONNX_DEEPCTR``.
    """
    given = os.environ.get(DEEPCTR_ENVIRONMENT)
    directory = Path(given) if given else checkpoints / "deepctr-torch"
    if not (directory / "deepctr_torch").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", os.fspath(directory), "-r", os.fspath(PINS)], check=True)
    return directory


def import_library(directory: Path) -> Any:
    """`deepctr_torch.models`, with this project's packages before those of the directory."""
    if os.fspath(directory) not in sys.path:
        sys.path.append(os.fspath(directory))
    if "deepctr_torch" not in sys.modules:
        # Its own `__init__` asks PyPI for a newer version of itself; a package without one does not.
        package = types.ModuleType("deepctr_torch")
        package.__path__ = [os.fspath(directory / "deepctr_torch")]
        sys.modules["deepctr_torch"] = package
    return importlib.import_module("deepctr_torch.models")


# Models ---------------------------------------------------------------------------------------------------


class Columns:
    """What the library's models read their columns from, in place of one FP32 matrix.

    Args:
        ids: (batch, categorical) int64.
        dense: (batch, numeric) float32; its columns follow those of `ids`.
    """

    def __init__(self, ids: Tensor, dense: Tensor) -> None:
        self._ids, self._dense = ids, dense
        self.shape = (ids.shape[0], ids.shape[1] + dense.shape[1])

    def __getitem__(self, where: tuple[slice, slice]) -> Tensor:
        """(batch, columns) of one kind."""
        rows, columns = where
        width = self._ids.shape[1]
        if columns.stop <= width:
            return self._ids[rows, columns]
        return self._dense[rows, columns.start - width : columns.stop - width]

    def new_zeros(self, shape: tuple[int, ...]) -> Tensor:
        """As of the matrix."""
        return self._dense.new_zeros(shape)


class CtrModel(nn.Module):
    """A model of the library behind the inputs and the output of the zoo's.

    Args:
        ranker: A model of DeepCTR-Torch, whose categorical columns come first.
    """

    def __init__(self, ranker: Any) -> None:
        super().__init__()
        ranker.out.task = "regression"  # the bias without the sigmoid
        self.ranker = ranker

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits (batch,) of dense (batch, numeric) float32 and ids (batch, categorical) int64."""
        return self.ranker(Columns(ids, dense)).squeeze(-1)  # type: ignore[no-any-return]


def build_ctr(name: str, data: PreparedData, library: Any) -> CtrModel:
    """An untrained model for the columns of a data set.

    Args:
        name: One of `CTR_MODELS`.
        data: Names and sizes of the columns.
        library: `import_library`.
    """
    inputs = importlib.import_module("deepctr_torch.inputs")
    features = [
        *(inputs.SparseFeat(column, size, embedding_dim=EMBEDDING) for column, size in data.categorical),
        *(inputs.DenseFeat(column, 1) for column in data.numeric),
    ]
    make = getattr(library, CLASSES[name])
    # PNN has no linear part.
    return CtrModel(make(features) if name == "pnn" else make(features, features))


# Trained and exported -------------------------------------------------------------------------------------


def ctr_checkpoint(name: str, directory: Path) -> Path:
    """Where the checkpoint of a model is, under its options."""
    options = vars(TRAINING) | {"embedding": EMBEDDING, "library": LIBRARY}
    return directory / f"{name}-{digest_json(options)[:8]}.safetensors"


def trained_ctr(name: str, data: PreparedData, checkpoints: Path) -> CtrModel:
    """The trained model; it is trained first where there is no checkpoint."""
    model = build_ctr(name, data, import_library(library_directory(checkpoints)))
    path = ctr_checkpoint(name, checkpoints)
    if not path.exists():
        checkpoints.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        result = train(model, data.open("train"), TRAINING)
        print(f"{name}: trained in {time.perf_counter() - began:.0f} s, losses {result.losses}", flush=True)
        save_checkpoint(path, model.state_dict())
    model.load_state_dict(load_checkpoint(path))
    return model.eval()


def exported_ctr(name: str, data: PreparedData, checkpoints: Path, directory: Path) -> ModelArtifact:
    """The trained model as ONNX, parity with PyTorch checked on 2,048 rows.

    Inputs and output are those of the zoo: `dense`, `ids` and `logit`, with a dynamic batch.

    Args:
        name: One of `CTR_MODELS`.
        data: MovieLens 1M.
        checkpoints: Where checkpoints are kept.
        directory: Where `<name>.onnx` is written.
    """
    model = trained_ctr(name, data, checkpoints)
    rows = next(data.open("calibration").batches(EXPORT_ROWS)).inputs
    spec = OutputSpec(OUTPUT, OutputKind.LOGIT, data.label, budget=0.0)
    return export_torch(model, rows, directory / f"{name}.onnx", (spec,))


def auc_on(name: str, data: PreparedData, checkpoints: Path, split: str = "selection") -> float | None:
    """Area under the ROC curve of the trained model on a split."""
    rows = data.open(split)
    labels = np.concatenate([batch.columns[data.label] for batch in rows.batches(65536)])
    return auc(predict(trained_ctr(name, data, checkpoints), rows), labels)


def main() -> None:
    """Train what is not trained yet, and print how well each ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(CTR_MODELS), choices=CTR_MODELS)
    options = parser.parse_args()
    data = movielens_1m()
    for name in options.models:
        print(f"{name}: AUC {auc_on(name, data, options.checkpoints):.4f} on the selection rows", flush=True)


if __name__ == "__main__":
    main()

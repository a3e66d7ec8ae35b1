"""A torch model that a run file names: `module:function`, with a checkpoint or without."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loka_onnx.config import ModelConfig
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.digests import digest_file, digest_json
from loka_onnx.errors import ModelError
from loka_onnx.export.torch_module import import_torch, load_builder

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TorchModel:
    """Module and inputs that a builder returned; the key is of its source, arguments and checkpoint."""

    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    key: str


def build_torch_model(config: ModelConfig, directory: Path) -> TorchModel:
    """Call the builder and load the checkpoint.

    Args:
        directory: The run file's directory, where builders are looked for beside the import path.

    Raises:
        ModelError: The builder cannot be imported, fails, or does not return a module and its inputs; or
            the checkpoint does not fit.
        MissingPackage: PyTorch is not installed.
    """
    import_torch()
    reference = config.torch or ""
    with _importable(directory):
        builder = load_builder(reference)
        source = inspect.getsourcefile(builder)
        try:
            built = builder(**config.arguments)
        except TypeError as error:
            raise ModelError(f"E1530 the model builder '{reference}' failed", evidence=str(error)) from error
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], Mapping)):
        raise ModelError(
            f"E1531 the model builder '{reference}' must return a module and its example inputs",
            evidence=f"it returned a {type(built).__name__}",
            remedy="return (module, {'dense': array, 'ids': array}): it tells names, types and widths",
        )
    module, example = built
    if config.checkpoint is not None:
        _load_weights(module, config.checkpoint, reference)
    key = {
        "builder": reference,
        "source": digest_file(Path(source)) if source else "",
        # As text: the order of a mapping may be that of the model's tables, and digests sort keys.
        "arguments": json.dumps(config.arguments),
        "checkpoint": digest_file(config.checkpoint) if config.checkpoint else "",
    }
    inputs = tuple(_spec(name, array) for name, array in example.items())
    return TorchModel(module.eval(), inputs, digest_json(key))


def _load_weights(module: nn.Module, checkpoint: Path, reference: str) -> None:
    from loka_onnx.export.checkpoint import load_checkpoint

    state = load_checkpoint(checkpoint)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(
            f"E1532 checkpoint '{checkpoint}' does not fit the model of '{reference}'",
            evidence=" ".join(str(error).split())[:300],
            remedy="build the model with the sizes that the checkpoint was trained with",
        ) from error


def _spec(name: str, array: npt.NDArray[Any]) -> TensorSpec:
    values = np.asarray(array)
    return TensorSpec(name, values.dtype.name, (None, *(int(d) for d in values.shape[1:])))


@contextlib.contextmanager
def _importable(directory: Path) -> Iterator[None]:
    """Let modules beside the run file be imported, as a script's own directory is."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))

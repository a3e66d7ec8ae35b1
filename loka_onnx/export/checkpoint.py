"""Checkpoints on disk. Nothing that is loaded here can run code."""

from __future__ import annotations

import importlib
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loka_onnx.errors import MissingPackage, ModelError

_SAFETENSORS = ".safetensors"
_ADVICE = re.compile(
    "Weights only load failed|In PyTorch 2|Re-running|Do it only if|file an issue|safe_globals"
)
"""Advice of `torch.load` on trusting the file, and its bare refusal."""


def save_checkpoint(path: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights, as safetensors or by `torch.save` after the suffix; the whole file or none."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.partial")
    # Copies: safetensors refuses shared memory, torch.save would write all of it.
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}
    try:
        if path.suffix == _SAFETENSORS:
            _safetensors(path).save_file(own, temporary)
        else:
            torch.save(own, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Read weights onto the CPU, by name, from a .safetensors file or one written by `torch.save`.

    The latter may hold them under the one key "state_dict" or "model". Raises ModelError if the file is
    missing, broken, holds more than weights, or no tensors; MissingPackage without safetensors.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError(
            "E0401 the checkpoint does not exist",
            where=str(path),
            evidence=f"looked in {path.parent.absolute()}",
            remedy="correct the path",
        )
    loaded = _load_safetensors(path) if path.suffix == _SAFETENSORS else _load_torch(path)
    if not isinstance(loaded, dict):
        raise _no_weights(path, f"it holds a {type(loaded).__name__}")
    nested = (loaded.get(key) for key in ("state_dict", "model"))
    loaded = next((inner for inner in nested if isinstance(inner, dict)), loaded)
    wrong = [name for name, value in loaded.items() if not isinstance(value, Tensor)]
    if wrong or not loaded:
        raise _no_weights(path, f"entry {wrong[0]!r} is no tensor" if wrong else "it is empty")
    return {str(name): value for name, value in loaded.items()}


def _load_torch(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            "E0402 the checkpoint holds more than weights, or is broken; loading it could run code",
            where=str(path),
            evidence=_first_sentence(error),
            remedy="save the weights alone: torch.save(model.state_dict(), path), or a .safetensors file",
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise _broken(path, error) from error


def _load_safetensors(path: Path) -> object:
    try:
        return _safetensors(path).load_file(path)
    except Exception as error:
        # SafetensorError cannot be named where safetensors is not installed.
        if isinstance(error, MissingPackage):
            raise
        raise _broken(path, error) from error


def _safetensors(path: Path) -> Any:
    with MissingPackage(
        "E0403 a .safetensors checkpoint needs the package safetensors",
        where=str(path),
        remedy="pip install safetensors",
    ).in_place_of(ModuleNotFoundError):
        return importlib.import_module("safetensors.torch")


def _broken(path: Path, error: Exception) -> ModelError:
    return ModelError(
        "E0404 the checkpoint cannot be read",
        where=str(path),
        evidence=_first_sentence(error),
        remedy="copy or write it again",
    )


def _no_weights(path: Path, evidence: str) -> ModelError:
    return ModelError(
        "E0405 the checkpoint is not a table of weights",
        where=str(path),
        evidence=evidence,
        remedy="save the weights alone: torch.save(model.state_dict(), path)",
    )


def _first_sentence(error: Exception) -> str:
    """Return the finding of an error, without PyTorch's advice on loading the file anyway."""
    text = str(error).rpartition("WeightsUnpickler error:")[2]
    sentences = (part.strip() for part in re.split(r"(?<=[.!])\s+|\n", text))
    findings = (part[:200] for part in sentences if part and not _ADVICE.search(part))
    return next(findings, type(error).__name__)

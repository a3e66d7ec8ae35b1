"""ONNX file of an engine, with its external data."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import onnx

from loka_onnx.errors import ModelError
from loka_onnx.sessions.model_files import data_locations

ENGINE_FILE = "engine.onnx"


def copy_model(model: Path, into: Path) -> Path:
    """Copy a model into a directory as `ENGINE_FILE`, hard-linking external data where possible; return the
    copy.

    Raises:
        ModelError: External data is missing or outside the model's directory.
    """
    engine = into / ENGINE_FILE
    shutil.copyfile(model, engine)
    source = Path(os.path.realpath(model.parent))
    for location in data_locations(onnx.load(os.fspath(model), load_external_data=False)):
        data = Path(os.path.realpath(source / location))
        if not data.is_relative_to(source) or not data.is_file() or Path(location).name == ENGINE_FILE:
            raise ModelError(
                "external data is missing, or outside the model's directory",
                where=str(model),
                evidence=f"location '{location}'",
                remedy="export the model again",
            )
        place = into / location
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(data, place)
        except OSError:
            shutil.copyfile(data, place)
    return engine


def model_files(engine: Path) -> tuple[Path, ...]:
    """Return the ONNX file and its external data; a file that is not ONNX alone, which its digest exposes."""
    try:
        locations = data_locations(onnx.load(os.fspath(engine), load_external_data=False))
    except Exception:
        # The type of error depends on the protobuf implementation.
        return (engine,)
    return (engine, *(engine.parent / location for location in locations))

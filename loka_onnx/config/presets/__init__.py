"""Named settings, kept as data beside this file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from loka_onnx.config.loading import build_run_config
from loka_onnx.config.schema import RunConfig
from loka_onnx.config.yaml_tree import read_yaml
from loka_onnx.errors import ConfigError


@dataclass(frozen=True)
class Preparation:
    """The built-in model and data of a preset.

    Attributes:
        dataset: Name of the data set.
        architecture: Name of the model in the zoo.
        size: Name of its sizes in the zoo.
        seed: Seed of weights and training.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    dataset: str
    architecture: str
    size: str
    seed: int


@dataclass(frozen=True)
class Preset:
    """A run file that lacks only what is prepared for it.

    Attributes:
        prepare: The built-in model and data.
        run: The run file without `model` and `data`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    prepare: Preparation
    run: dict[str, Any]

    def run_config(self, values: Mapping[str, object], directory: str | Path) -> RunConfig:
        """The whole configuration.

        Args:
            values: Top-level keys that complete or replace those of the preset: `model`, `data`, …
            directory: What relative paths start at.

        Raises:
            ConfigError: The result does not fit the schema.
        """
        return build_run_config({**self.run, **values}, directory, source="preset")


def preset_names() -> tuple[str, ...]:
    """Names of the presets, sorted."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def load_preset(name: str) -> Preset:
    """A preset by name.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in preset_names():
        raise ConfigError(
            f"there is no preset '{name}'",
            evidence=f"the presets are {', '.join(preset_names())}",
            remedy="name one of them",
        )
    text = resources.files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return TypeAdapter(Preset).validate_json(json.dumps(read_yaml(text, f"{name}.yaml").data))

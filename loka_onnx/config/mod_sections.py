"""The section of the run file about mods: rewrites that a run leaves out."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from loka_onnx.config.fields import Strict, Text, fault


class ModsConfig(Strict):
    """Mods that rewrite the model; the transform stage knows their names."""

    skip: tuple[Text, ...] = Field(
        (), description="names of mods that are not run, as `loka-onnx transform` prints them"
    )
    smoothing: bool = Field(
        True,
        description="whether range is moved from activations to weights (and from numeric features to the "
        "first layer) where that lowers the FP8 error that is measured on calibration rows",
    )

    split_channels: bool = Field(
        True,
        description="whether the few input channels that make most of the error of a site are split off as a "
        "product of their own, so that the rest can run in FP8; in a plan where it does not, they are one "
        "product again",
    )

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for index, name in enumerate(self.skip):
            if name in self.skip[:index]:
                raise fault(
                    f"the mod '{name}' is skipped twice",
                    at=("skip", index),
                    evidence=f"`skip[{self.skip.index(name)}]` has it already",
                    remedy="list each mod once",
                )
        return self

"""Which mods a run applies: what the run file skips, and whether smoothing follows."""

from pathlib import Path

import numpy as np
import pytest
from small_configs import config_of

from loka_onnx.config import RunConfig
from loka_onnx.errors import ConfigError
from loka_onnx.pipeline.mods import ChosenMods
from loka_onnx.transforms.sequence import DEFAULT_MODS

ALL = [kind.name for kind in DEFAULT_MODS]


def names(config: RunConfig, folder: Path) -> list[str]:
    return [mod.name for mod in ChosenMods(config).make({"x": np.zeros((1, 1))}, folder)]


def test_by_default_every_mod_and_then_smoothing(tmp_path):
    assert names(config_of(tmp_path), tmp_path) == [*ALL, "smooth-by-error"]


def test_what_is_skipped_is_not_run(tmp_path):
    config = config_of(tmp_path, mods={"skip": ["pad-sites", "fuse-layer-norm"], "smoothing": False})
    assert names(config, tmp_path) == [name for name in ALL if name not in {"pad-sites", "fuse-layer-norm"}]


def test_the_key_follows_what_is_run_and_what_is_measured(tmp_path):
    keys = [
        ChosenMods(config_of(tmp_path, **sections)).key
        for sections in (
            {},
            {"mods": {"skip": ["pad-sites"]}},
            {"mods": {"smoothing": False}},
            {"plan": {"weight_granularity": "per_tensor"}},
            {"plan": {"formats": ["fp8"], "format": "E5M2"}},
            {"plan": {"formats": ["fp8", "int8"]}},
        )
    ]
    assert all(key not in keys[:index] for index, key in enumerate(keys))
    # Smoothing measures nothing then.
    off = [
        ChosenMods(config_of(tmp_path, mods={"smoothing": False}, plan={"format": format})).key
        for format in ("E4M3FN", "E5M2")
    ]
    assert off[0] == off[1]


@pytest.mark.parametrize("skip", [["pad-sites", "fuse-layernorm"], ["smooth-by-error"], ["zzz"]])
def test_an_unknown_name_is_refused(tmp_path, skip):
    with pytest.raises(ConfigError) as caught:
        ChosenMods(config_of(tmp_path, mods={"skip": skip}))
    assert caught.value.code == "E1520"

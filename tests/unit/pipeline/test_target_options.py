"""Settings of backends: from the run file to the request, and refused before anything is done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small_configs import config_of

from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.errors import ConfigError
from loka_onnx.pipeline.candidates import EngineBuilder
from loka_onnx.pipeline.plans import check_options
from loka_onnx.pipeline.run import run

FP32 = PrecisionPlan("fp32", "", Precision.FP32, (), {}, 0.0)


def test_options_reach_the_candidates_of_their_backend_and_device(tmp_path: Path) -> None:
    gpu = {
        "device": "nvidia-h100",
        "backends": ["inductor", "tensorrt"],
        "options": {"inductor": {"static": 0, "max_autotune": 1}},
    }
    config = config_of(tmp_path, targets=[gpu, {"device": "cpu", "backends": ["inductor"]}])
    check_options(config)
    judging = SimpleNamespace(context=SimpleNamespace(config=config))
    builder = EngineBuilder(cast(Any, judging), CorrectionSet())
    given = {(c.target, c.backend.name): c.options for c in builder._candidates(PlanSet((FP32,)))}
    assert given == {
        ("nvidia-h100", "inductor"): {"static": 0, "max_autotune": 1},
        ("nvidia-h100", "tensorrt"): {},
        ("cpu", "inductor"): {},
    }


KNOWN = (
    "it takes choose (0 to 1), fast_accumulation (0 to 1), fuse (0 to 1), max_autotune (0 to 1), "
    "static (0 to 1)"
)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"statik": 1},
            ("backend 'inductor' has no option 'statik'", KNOWN, "did you mean 'static'?"),
        ),
        ({"zzz": 1}, ("backend 'inductor' has no option 'zzz'", KNOWN, "leave it out")),
        (
            {"static": 2},
            (
                "option 'static' of backend 'inductor' is out of range",
                "it is 2",
                "give 0 to 1, or leave it out for the default",
            ),
        ),
    ],
)
def test_a_setting_that_a_backend_lacks_is_refused_at_once(
    options: dict[str, int], said: tuple[str, str, str], tmp_path: Path
) -> None:
    targets = [
        {"device": "nvidia-h100", "backends": ["inductor"]},
        {"device": "cpu", "backends": ["inductor"], "options": {"inductor": options}},
    ]
    config = config_of(tmp_path, targets=targets)
    with pytest.raises(ConfigError) as caught:
        run(config)
    what, evidence, remedy = said
    assert str(caught.value) == (
        f"`targets[1].options.inductor` (device 'cpu'): {what}\n  evidence: {evidence}\n  remedy: {remedy}"
    )
    assert not config.output.exists()


def test_settings_of_a_backend_that_does_not_build_are_refused(tmp_path: Path) -> None:
    target = {"device": "cpu", "backends": ["onnxruntime"], "options": {"inductor": {"static": 1}}}
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, targets=[target])
    said = str(caught.value)
    assert "`options` has settings of backend 'inductor', which this target does not build with" in said
    assert "its backends are onnxruntime" in said and "run.yaml:" in said

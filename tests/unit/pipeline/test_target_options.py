"""Settings of backends: from the run file to the request, and refused before anything is done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from small_configs import config_of, plan_of

from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.plan import PlanSet
from loka_onnx.errors import ConfigError
from loka_onnx.pipeline.candidates import EngineBuilder
from loka_onnx.pipeline.plans import check_options
from loka_onnx.pipeline.run import run


def test_options_reach_the_candidates_of_their_backend_and_device(tmp_path):
    gpu = {
        "device": "nvidia-h100",
        "backends": ["inductor", "tensorrt"],
        "options": {"inductor": {"static": 0, "max_autotune": 1}},
    }
    config = config_of(tmp_path, targets=[gpu, {"device": "cpu", "backends": ["inductor"]}])
    check_options(config)
    judging = SimpleNamespace(context=SimpleNamespace(config=config))
    builder = EngineBuilder(cast(Any, judging), CorrectionSet())
    given = {(c.target, c.backend.name): c.options for c in builder._candidates(PlanSet((plan_of("fp32"),)))}
    assert given == {
        ("nvidia-h100", "inductor"): {"static": 0, "max_autotune": 1},
        ("nvidia-h100", "tensorrt"): {},
        ("cpu", "inductor"): {},
    }


@pytest.mark.parametrize("options", [{"statik": 1}, {"zzz": 1}, {"static": 2}])
def test_a_setting_that_a_backend_lacks_is_refused_at_once(options, tmp_path):
    targets = [
        {"device": "nvidia-h100", "backends": ["inductor"]},
        {"device": "cpu", "backends": ["inductor"], "options": {"inductor": options}},
    ]
    config = config_of(tmp_path, targets=targets)
    with pytest.raises(ConfigError) as caught:
        run(config)
    assert "`targets[1].options.inductor` (device 'cpu')" in caught.value.where
    assert not config.output.exists()

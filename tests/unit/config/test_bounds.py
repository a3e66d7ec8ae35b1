"""Numbers and paths of a run file that nothing could be done with are refused where they are read."""

from __future__ import annotations

from typing import Any

import pytest

from loka_onnx.calibration.effects.sensitivity import StoppingSchedule
from loka_onnx.config.loading import build_run_config
from loka_onnx.errors import ConfigError

VALUES: dict[str, Any] = {
    "model": {"torch": "a:b"},
    "outputs": [{"name": "y", "kind": "logit", "label": "l"}],
    "data": {"path": __file__, "split": {"by": "hash", "column": "u"}},
    "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("threads", 1000000),
        ("batch.max", 100000000),
        ("batch.max", 10**400),
        ("calibration.batch_size", 100000000),
        ("calibration.rows", 10**400),
        ("calibration.confidence", 0.9999999999999999),
        ("calibration.error_precision", 5e-324),
        ("build.memory_gb", 1e300),
        ("build.cache_gb", 1e300),
        ("build.timeout_seconds", 1e300),
        ("build.timeout_seconds", 1e-300),
        ("build.parallel", 1000000),
        ("refine.plans", 100000000),
        ("serving.trial_seconds", 1e300),
        ("outputs.0.budget", 1e300),
        ("data.split.fractions.calibration", 5e-324),
        ("output", "x" * 256),
        ("output", "/".join(["x" * 200] * 30)),
        ("output", "a\0b"),
        ("build.cache", "é" * 200),
        ("name", "x" * 300),
    ],
)
def test_a_value_beyond_its_bound_is_refused_at_its_key(key, value, tmp_path):
    build_run_config(VALUES, tmp_path)
    with pytest.raises(ConfigError) as caught:
        build_run_config(VALUES, tmp_path, overrides={key: value})
    named = f"{caught.value.what} {caught.value.where}"
    assert key.rsplit(".", maxsplit=1)[-1] in named and len(str(caught.value)) < 4000


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_looks_end_at_every_limit(limit):
    looks = StoppingSchedule(limit, may_stop=True)
    for done in range(1, limit + 2):
        if looks.is_due(done):
            looks.take(done)
    assert looks.taken >= 1

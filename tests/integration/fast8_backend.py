"""ONNX Runtime on the CPU, as if FP8 were faster there."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend
from loka_onnx.sessions.runner import Runner

NO_REFINING = {"rounds": 0}
"""Engines that are as if FP8 were faster would be refined, which takes longer than all else."""


class Slow(Runner):
    """Takes 4 ms longer."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(0.004)
        return self._inner.run(inputs)

    def close(self) -> None:
        self._inner.close()


class Fast8(OnnxRuntimeBackend):
    """As if FP8 were faster here: what runs without it takes longer."""

    def is_simulated(self, plan: PrecisionPlan, architecture: str) -> bool:
        return False

    def load(self, engine: Path, architecture: str) -> Runner:
        runner = super().load(engine, architecture)
        return runner if b"QuantizeLinear" in engine.read_bytes() else Slow(runner)

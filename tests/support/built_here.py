"""Engines of ONNX Runtime built in the process of the test: a child takes a second to import what it needs.

`tests/contract/test_isolated_builds.py` and runs in processes of their own show that builds are isolated.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loka_onnx.engines import base, worker
from loka_onnx.engines.isolation import ChildOutcome, Ending
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend
from loka_onnx.sessions.backends import resolve


def build_here(patch: pytest.MonkeyPatch) -> None:
    """Have the worker serve its requests here."""
    in_a_child = base.run_child

    def serve(module: str, arguments: Sequence[str], log: Path, *more: Any) -> ChildOutcome:
        if not issubclass(resolve(arguments[0]), OnnxRuntimeBackend):
            return in_a_child(module, arguments, log, *more)
        log.touch()
        return ChildOutcome(Ending.EXITED, worker.main(arguments), 0.0, 0)

    patch.setattr(base, "run_child", serve)
    patch.setattr(worker, "_die_with_parent", lambda: None)

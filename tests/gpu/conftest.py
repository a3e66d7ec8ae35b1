"""What only a GPU runs: our Triton kernels as it compiles them, and packages that hold them.

The formulas are those that the interpreter's tests use on a CPU (`tests/unit/engines/inductor`), here with
the types and sizes that are served; graphs are written as in `tests/contract`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Pytest puts the directory of a test there, which is not enough when this one runs alone.
sys.path.append(str(Path(__file__).parents[1] / "contract"))

FLOAT8_FROM = (8, 9)


@pytest.fixture
def float8_gpu() -> None:
    """Skips where PyTorch has no GPU that multiplies FP8."""
    torch = pytest.importorskip("torch", reason="needs a GPU: PyTorch is not even installed")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < FLOAT8_FROM:
        pytest.skip("needs a GPU of compute capability 8.9 or later")
    torch.manual_seed(5)

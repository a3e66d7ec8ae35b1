"""The Triton kernels against float64, in Triton's own interpreter, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")
pytest.importorskip("triton", reason="needs triton: pip install triton")


@pytest.mark.parametrize(
    "kernel",
    [
        "factorization",
        "token_norm",
        "product",
        "half_product",
        "concat",
        "token_concat",
        "attention",
        "attention_masks",
    ],
)
def test_a_kernel_computes_what_it_says(kernel: str) -> None:
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script), kernel], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]

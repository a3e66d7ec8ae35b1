"""A stand-in for FBGEMM GenAI: a distribution in a folder that registers its operators, computed on the CPU.

It refuses what the CUTLASS kernels refuse or would misread, so that only arguments pass which the vendor's
operators take. It is found and imported under the vendor's names, by the code under test.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from loka_onnx.engines.inductor.operator_packages import PACKAGES, FoundPackage
from loka_onnx.sessions.backends import release

FBGEMM = PACKAGES[0]
FITTING = next(version for version, built in FBGEMM.built_for.items() if built == release(torch.__version__))
"""Release that is built for the PyTorch that runs the tests."""
SOURCE = """
import torch

CALLS = []
LIBRARY = torch.library.Library("fbgemm", "DEF")
LIBRARY.define(
    "f8f8bf16_rowwise(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor? bias=None, "
    "bool use_fast_accum=True) -> Tensor"
)
LIBRARY.define("f8f8bf16(Tensor XQ, Tensor WQ, Tensor scale, bool use_fast_accum=True) -> Tensor")

def check(x, w, *wide):
    assert x.dim() == w.dim() == 2 and x.shape[1] == w.shape[1]
    assert x.dtype == w.dtype == torch.float8_e4m3fn
    assert x.shape[1] % 16 == 0 and w.shape[0] % 8 == 0, "cutlass cannot implement"
    assert all(each.dtype == torch.float32 for each in wide)
    assert all(each.is_contiguous() for each in (x, w, *wide))

def product(x, w):
    return x.to(torch.float32) @ w.to(torch.float32).t()

def rowwise(XQ, WQ, x_scale, w_scale, bias=None, use_fast_accum=True):
    check(XQ, WQ, x_scale, w_scale, *(() if bias is None else (bias,)))
    assert x_scale.shape == XQ.shape[:1] and w_scale.shape == WQ.shape[:1]
    CALLS.append(("f8f8bf16_rowwise", use_fast_accum))
    made = product(XQ, WQ) * w_scale * x_scale[:, None]
    return (made if bias is None else made + bias).to(torch.bfloat16)

def tensorwise(XQ, WQ, scale, use_fast_accum=True):
    check(XQ, WQ, scale)
    assert scale.numel() == 1
    CALLS.append(("f8f8bf16", use_fast_accum))
    return (product(XQ, WQ) * scale).to(torch.bfloat16)

def meta(XQ, WQ, *others, **named):
    return XQ.new_empty((XQ.shape[0], WQ.shape[0]), dtype=torch.bfloat16)

for name, function in (("f8f8bf16_rowwise", rowwise), ("f8f8bf16", tensorwise)):
    LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"fbgemm::{name}", meta, lib=LIBRARY)
"""


def write_distribution(folder: Path, version: str, source: str = SOURCE) -> Path:
    """The files of an installed package."""
    inside = folder / "fbgemm_gpu" / "experimental" / "gen_ai"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text(source)
    facts = folder / f"fbgemm_gpu_genai-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fbgemm-gpu-genai\nVersion: {version}\n")
    return folder


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """The package can be imported; afterwards neither it nor its operators are left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        try:
            yield
        finally:
            forget()
    importlib.invalidate_caches()


def forget() -> None:
    """The operators are gone, as in a process that has not imported the package."""
    module = sys.modules.get(FBGEMM.module)
    if module is not None:
        module.LIBRARY._destroy()
    for name in [name for name in sys.modules if name.split(".")[0] == "fbgemm_gpu"]:
        del sys.modules[name]


def calls() -> list[tuple[str, bool]]:
    """Operators that were called, with their flag."""
    module: Any = sys.modules[FBGEMM.module]
    found: list[tuple[str, bool]] = module.CALLS
    return found


FOUND = FoundPackage(FBGEMM)

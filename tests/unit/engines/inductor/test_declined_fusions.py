"""Fusions that a build declined reach the artifact and the report, by way of what the build printed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import onnx.parser
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from loka_onnx.engines.inductor import compile as compiling
from loka_onnx.engines.inductor.backend import InductorBackend
from loka_onnx.engines.inductor.compile import planned_graph
from loka_onnx.engines.inductor.fusions import FusionReport, products

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[batch, 8] x) => (float[batch, 8] y) { y = Relu(x) }
"""


def test_what_is_printed_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "planned.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), path)
    declined = {
        "factorization-norm": ("norm/0: the kernel multiplies BF16 and FP16", "norm/1: 40000 elements"),
        "float8-product": ("fc: its activation has several scales",),
    }
    monkeypatch.setattr(compiling, "fuse", lambda graph: FusionReport({}, declined))
    planned_graph(path, fuses=True)
    log = f"before\n{capsys.readouterr().out}fc: scaled_mm: declined by nobody\nnorm: a: declined b\n"
    assert InductorBackend().read_remarks(log) == (
        "factorization-norm: norm/0: the kernel multiplies BF16 and FP16",
        "factorization-norm: norm/1: 40000 elements",
        "float8-product: fc: its activation has several scales",
    )


@pytest.mark.parametrize(
    ("addend", "end", "is_bias"),
    [
        ((True, (16,), "bf16"), ("batch", 16), True),
        ((True, (1, 16), "bf16"), ("batch", 16), True),
        ((False, (16,), "bf16"), ("batch", 16), False),  # computed: its numbers are not known
        ((True, (16,), "float"), ("batch", 16), False),
        ((True, (16,), "bf16"), None, False),
        ((True, (1,), "bf16"), ("batch", 16), False),
        ((True, (4, 16), "bf16"), (4, 16), False),
        ((True, (1, 1, 16), "bf16"), ("batch", 16), False),
    ],
)
def test_a_bias_is_one_constant_a_column(
    addend: tuple[bool, tuple[int, ...], str], end: tuple[object, ...] | None, is_bias: bool
) -> None:
    is_constant, shape, kind = addend
    tensor = SimpleNamespace(is_constant=is_constant, shape=shape, kind=kind)
    assert products._is_bias(tensor, SimpleNamespace(shape=end, kind="bf16")) is is_bias  # type: ignore[arg-type]

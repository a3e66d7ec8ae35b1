"""The tools that are compared, and what each is asked for.

Every one is given the same ONNX file and the same calibration rows. Beside its defaults a tool has rows with
options that its documentation offers for such a model: products alone, a scale for each channel of a weight,
and without the products that no kernel takes in FP8. Searches that a tool has for better plans were not
tried.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loka_onnx.core.artifact import ModelArtifact

CHILDREN = Path(__file__).with_name("children")
OWN, NONE = "loka-onnx", "none"
"""Peers that need no environment of their own: this project, and nothing at all."""
LINEAR_OPERATORS = ("MatMul", "Gemm")


@dataclass(frozen=True)
class Variant:
    """One tool with one set of options.

    Attributes:
        name: Directory of its graph, and key in the record.
        label: What the table calls it.
        peer: The tool; its environment has that name.
        call: What a user would write, for the record.
        child: Script in `children`; empty for this project's own child.
        options: Of the call.
        job: Further keys of the job.
        narrow: Name of the row of the same plan with BF16 in place of FP32; empty for none.
    """

    name: str
    label: str
    peer: str
    call: str
    child: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    narrow: str = ""

    def command(self, python: Path | None) -> list[str | Path]:
        """What starts its child.

        Args:
            python: Of its environment; None for this project's own.
        """
        if python is None:
            return [sys.executable, "-m", "benchmarks.peers.own_child"]
        return [python, CHILDREN / self.child]

    def options_for(self, exported: ModelArtifact, batch: int) -> dict[str, Any]:
        """Options of the call, with the model's input shapes where they are asked for."""
        shapes = ",".join(
            f"{spec.name}:{'x'.join(str(batch if size is None else size) for size in spec.shape)}"
            for spec in exported.inputs
        )
        small = [site.name for site in exported.linear_sites if not site.is_fp8_able]
        stands_for = {SHAPES: shapes, SMALL: small}
        return {
            key: stands_for[value] if isinstance(value, str) and value in stands_for else value
            for key, value in self.options.items()
        }


SHAPES, SMALL = "<input shapes>", "<sites too small for FP8>"
"""In options: shapes of the model's inputs, as Model Optimizer writes them; sites that are not FP8-able."""

_FLOAT8 = "activation_type=QFLOAT8E4M3FN, weight_type=QFLOAT8E4M3FN"
_STATIC = (
    "onnxruntime.quantization.quantize_static(model, output, reader, quant_format=QDQ, "
    f"{_FLOAT8}, calibrate_method=Distribution{{}})"
)
_QUARK = "quark.onnx.ModelQuantizer(Config(QuantizationConfig({}))).quantize_model(model, output, reader)"
_QUARK_E4M3 = f"quant_format=QDQ, calibrate_method=MinMax, {_FLOAT8}{{}}"
_MODELOPT = (
    'modelopt.onnx.quantization.quantize(model, quantize_mode="fp8", calibration_data=rows, '
    "output_path=output{})"
)

_BEST = ', calibration_shapes="dense:512x8,ids:512x11", calibration_method="max", calibration_eps=["cpu"]'
_BEST_OPTIONS = {"calibration_shapes": SHAPES, "calibration_method": "max", "calibration_eps": ["cpu"]}

VARIANTS: tuple[Variant, ...] = (
    Variant(
        "bf16",
        "BF16, nothing quantized",
        NONE,
        "every node in BF16",
        job={"kind": "precision", "precision": "bf16"},
    ),
    Variant(
        "fp16",
        "FP16, nothing quantized",
        NONE,
        "every node in FP16",
        job={"kind": "precision", "precision": "fp16"},
    ),
    Variant(
        "loka-wide",
        "LoKA-ONNX (mods, nothing in FP8, BF16)",
        OWN,
        "the mods of a run by default, but smoothing, which serves FP8 alone; everything in BF16",
        job={"kind": "mods"},
    ),
    Variant(
        "loka",
        "LoKA-ONNX (plan fp8-safe, rest FP32)",
        OWN,
        "loka-onnx run RUN.yaml (target cpu, onnxruntime; plans fp32 and fp8-safe; "
        "`mods: {split_channels: false}`; the rest as it comes)",
        job={"kind": "pipeline", "sections": {"mods": {"split_channels": False}}},
        narrow="loka-bf16",
    ),
    Variant(
        "loka-split",
        "LoKA-ONNX, loud channels split off (plan fp8-safe, rest FP32)",
        OWN,
        "the same with `mods: {split_channels: true}`, which is the default",
        job={"kind": "pipeline"},
        narrow="loka-split-bf16",
    ),
    Variant(
        "blanket",
        "Blanket FP8 (every linear site, no mods, rest FP32)",
        OWN,
        "ranges of the calibration rows, plan fp8-all, Q/DQ; no mods, no corrections",
        job={"kind": "blanket"},
        narrow="blanket-bf16",
    ),
    Variant(
        "modelopt-default",
        "NVIDIA Model Optimizer, default options",
        "model-optimizer",
        _MODELOPT.format(""),
        "quantize_model_optimizer.py",
    ),
    Variant(
        "modelopt-best",
        "NVIDIA Model Optimizer, shapes given, max calibration",
        "model-optimizer",
        _MODELOPT.format(_BEST),
        "quantize_model_optimizer.py",
        _BEST_OPTIONS,
    ),
    Variant(
        "modelopt-fp32",
        "NVIDIA Model Optimizer, the same with the rest in FP32",
        "model-optimizer",
        _MODELOPT.format(f'{_BEST}, high_precision_dtype="fp32"'),
        "quantize_model_optimizer.py",
        {**_BEST_OPTIONS, "high_precision_dtype": "fp32"},
    ),
    Variant(
        "modelopt-linears",
        "NVIDIA Model Optimizer, the same, MatMul and Gemm only, simplified",
        "model-optimizer",
        _MODELOPT.format(f'{_BEST}, op_types_to_quantize=["MatMul", "Gemm"], simplify=True'),
        "quantize_model_optimizer.py",
        {**_BEST_OPTIONS, "op_types_to_quantize": list(LINEAR_OPERATORS), "simplify": True},
    ),
    Variant(
        "onnxruntime-default",
        "ONNX Runtime quantize_static, default options",
        "onnxruntime",
        _STATIC.format(""),
        "quantize_onnxruntime.py",
    ),
    Variant(
        "onnxruntime-linears",
        "ONNX Runtime quantize_static, preprocessed, MatMul and Gemm only",
        "onnxruntime",
        "quant_pre_process(model, prepared); " + _STATIC.format(', op_types_to_quantize=["MatMul", "Gemm"]'),
        "quantize_onnxruntime.py",
        {"preprocess": True, "op_types_to_quantize": list(LINEAR_OPERATORS)},
    ),
    Variant(
        "onnxruntime-channels",
        "ONNX Runtime quantize_static, the same by channel, without small products",
        "onnxruntime",
        "quant_pre_process(model, prepared); "
        + _STATIC.format(
            ', op_types_to_quantize=["MatMul", "Gemm"], per_channel=True, nodes_to_exclude=small'
        ),
        "quantize_onnxruntime.py",
        {
            "preprocess": True,
            "op_types_to_quantize": list(LINEAR_OPERATORS),
            "per_channel": True,
            "nodes_to_exclude": SMALL,
        },
    ),
    Variant(
        "quark-default",
        "AMD Quark, E4M3FN at all operators that it takes",
        "quark",
        _QUARK.format(_QUARK_E4M3.format("")),
        "quantize_quark.py",
    ),
    Variant(
        "quark-linears",
        "AMD Quark, E4M3FN, MatMul and Gemm only",
        "quark",
        _QUARK.format(_QUARK_E4M3.format(', op_types_to_quantize=["MatMul", "Gemm"]')),
        "quantize_quark.py",
        {"op_types_to_quantize": list(LINEAR_OPERATORS)},
    ),
    Variant(
        "quark-channels",
        "AMD Quark, E4M3FN, the same by channel, biases exact, without small products",
        "quark",
        _QUARK.format(
            _QUARK_E4M3.format(
                ', op_types_to_quantize=["MatMul", "Gemm"], per_channel=True, nodes_to_exclude=small, '
                'extra_options={"QuantizeBias": False}'
            )
        ),
        "quantize_quark.py",
        {
            "op_types_to_quantize": list(LINEAR_OPERATORS),
            "per_channel": True,
            "nodes_to_exclude": SMALL,
            "extra_options": {"QuantizeBias": False},
        },
    ),
    Variant(
        "quark-mxfp8",
        "AMD Quark, its preset MXFP8E4M3",
        "quark",
        'ModelQuantizer(Config(get_default_config("MXFP8E4M3"))).quantize_model(model, output, reader)',
        "quantize_quark.py",
        {"preset": "MXFP8E4M3"},
    ),
)
NARROW_LABELS = {
    "loka-split-bf16": "LoKA-ONNX, loud channels split off (plan fp8-safe, rest BF16)",
    "loka-bf16": "LoKA-ONNX (plan fp8-safe, rest BF16)",
    "blanket-bf16": "Blanket FP8 (every linear site, no mods, rest BF16)",
}
"""Rows that come with another: the same plan, as a GPU gets it."""
KERNELS, SAME_GRAPH = "bf16-kernels", {"bf16-kernels": "bf16"}
"""What `on_device` adds, and the row whose graph it is."""
EXPORTED = "fp32"
EXPORTED_LABEL = "FP32, as exported"


def chosen(names: Sequence[str]) -> tuple[Variant, ...]:
    """Variants by name, in the order of the table; all where none is named."""
    known = {variant.name for variant in VARIANTS}
    wrong = sorted(set(names) - known)
    if wrong:
        raise SystemExit(f"no such variant: {json.dumps(wrong)}; there are {json.dumps(sorted(known))}")
    return tuple(variant for variant in VARIANTS if not names or variant.name in names)

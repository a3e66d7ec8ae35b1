"""Norms as PyTorch exports them: each is exported here, by both exporters, and fused."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from norm_models import DYNAMO, EXPORTERS, Exporter, Outcome, assert_equal, fused, taken_in
from rewrite_models import random_rows

torch = pytest.importorskip("torch", reason="needs torch")
nn, functional = torch.nn, torch.nn.functional

TIERS = [pytest.param(e, marks=pytest.mark.slow) if e is DYNAMO else e for e in EXPORTERS]
"""torch.export takes two seconds for each model."""
EPSILON = 1e-3
LAYER, RMS = "LayerNormalization", "RMSNormalization"


class Written(nn.Module):
    """A norm written by hand, with γ and β of eight elements."""

    def __init__(self, body: Callable[[Any, Any, Any], Any], width: int = 8) -> None:
        super().__init__()
        self.body = body
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.shift = nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, x: Any) -> Any:
        return self.body(x, self.gain, self.shift)


def spread(module: Any) -> Any:
    """Parameters other than ones and zeros, so that a lost one shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            count = parameter.numel()
            parameter.copy_(torch.linspace(-0.5, 1.7, count).reshape(parameter.shape))
    return module


def deviation(x: Any) -> Any:
    return x - x.mean(-1, keepdim=True)


def with_variance(x: Any, gain: Any, shift: Any) -> Any:
    return deviation(x) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + EPSILON) * gain + shift


def with_variance_and_mean(x: Any, gain: Any, shift: Any) -> Any:
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) * torch.rsqrt(variance + EPSILON) * gain + shift


def without_kept_dimensions(x: Any, gain: Any, shift: Any) -> Any:
    centred = x - x.mean(-1).unsqueeze(-1)
    variance = (centred * centred).mean(-1)
    return gain * (centred / torch.sqrt(variance + EPSILON)[..., None]) + shift


def with_second_moment(x: Any, gain: Any, shift: Any) -> Any:
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return gain * (x - mean) / torch.sqrt(variance + EPSILON) + shift


def with_clamped_second_moment(x: Any, gain: Any, shift: Any) -> Any:
    mean = x.mean(-1, keepdim=True)
    variance = (x.pow(2).mean(-1, keepdim=True) - mean.pow(2)).clamp(min=0)
    return gain * (x - mean) * (variance + EPSILON).pow(-0.5) + shift


def with_a_sum(x: Any, gain: Any, shift: Any) -> Any:
    centred = x - x.sum(-1, keepdim=True) / 8
    return centred / torch.sqrt(centred.pow(2).sum(-1, keepdim=True) / 8 + EPSILON) * gain + shift


def llama(x: Any, gain: Any, _: Any) -> Any:
    """`LlamaRMSNorm.forward` of a model in FP16: normalized in FP32, scaled in FP16."""
    half = x.to(torch.float16)
    wide = half.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return (gain.to(torch.float16) * wide.to(torch.float16)).float()


def t5(x: Any, gain: Any, _: Any) -> Any:
    """`T5LayerNorm.forward` of a model in BF16: only the variance is computed from a conversion."""
    half = x.to(torch.bfloat16)
    variance = half.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return (half * torch.rsqrt(variance + EPSILON)).to(torch.bfloat16).float() * gain


def layer_in_single(x: Any, gain: Any, shift: Any) -> Any:
    half = x.to(torch.float16)
    wide = half.float()
    wide = (wide - wide.mean(-1, keepdim=True)) / torch.sqrt(
        wide.var(-1, keepdim=True, correction=0) + EPSILON
    )
    return (wide * gain + shift).to(torch.float16).float()


def root_of_sum(x: Any, _: Any, __: Any) -> Any:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


@dataclass(frozen=True)
class Form:
    module: Callable[[], Any]
    shape: tuple[int, ...] = (8,)
    ops: tuple[str, ...] = (LAYER,)


def written(body: Callable[[Any, Any, Any], Any], width: int = 8) -> Callable[[], Any]:
    return lambda: Written(body, width)


FUSED = {
    "layer_norm": Form(lambda: spread(nn.LayerNorm(8, eps=EPSILON))),
    "layer_norm_without_affine": Form(lambda: nn.LayerNorm(8, eps=EPSILON, elementwise_affine=False)),
    "variance": Form(written(with_variance)),
    "variance_and_mean": Form(written(with_variance_and_mean)),
    "without_kept_dimensions": Form(written(without_kept_dimensions), (4, 8)),
    "second_moment": Form(written(with_second_moment)),
    "clamped_second_moment": Form(written(with_clamped_second_moment)),
    "a_sum": Form(written(with_a_sum)),
    "root_of_a_sum_of_16": Form(written(root_of_sum, 16), (16,), (RMS,)),
}
MIXED = {
    "llama": Form(written(llama), (8,), (RMS,)),
    "t5": Form(written(t5), (8,), (RMS,)),
    "layer_in_single": Form(written(layer_in_single), (8,), (LAYER,)),
}


@cache
def exported(name: str, exporter: Exporter) -> onnx.ModelProto:
    form = (FUSED | MIXED)[name]
    return exporter.export(form.module(), random_rows(4, *form.shape))


def outcome(name: str, exporter: Exporter, folder: Path) -> Outcome:
    return fused(taken_in(exported(name, exporter), folder), folder)


@pytest.mark.parametrize("exporter", TIERS, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_every_form_becomes_one_operator(name, exporter, tmp_path):
    result = outcome(name, exporter, tmp_path)
    assert tuple(result.ops) == FUSED[name].ops, result.reasons
    assert_equal(result)


@pytest.mark.slow
@pytest.mark.parametrize("exporter", [DYNAMO, Exporter("dynamo", 18)], ids=str)
def test_rms_norm_of_pytorch(exporter, tmp_path):
    """The TorchScript exporter has no form of `aten::rms_norm`."""
    module = spread(nn.RMSNorm(8, eps=EPSILON))
    result = fused(taken_in(exporter.export(module, random_rows(4, 8)), tmp_path), tmp_path)
    assert result.ops == [RMS]
    gain = module.weight.detach().numpy().astype(np.float64)
    epsilon = float(np.float32(EPSILON))
    assert_equal(result, lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * gain)


@pytest.mark.parametrize("exporter", TIERS, ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_conversions_stay_around_the_norm_and_its_statistics_in_fp32(name, exporter, tmp_path):
    result = outcome(name, exporter, tmp_path)
    graph = result.after.graph
    norms = [node for node in graph.node if node.op_type.endswith("Normalization")]
    assert [node.op_type for node in norms] == list(MIXED[name].ops), result.reasons
    assert not {"ReduceMean", "Sqrt", "Pow"} & set(result.ops)
    types = {info.name: info.type.tensor_type.elem_type for info in graph.value_info}
    source = types.get(norms[0].input[0])
    assert source == onnx.TensorProto.FLOAT
    assert "Cast" in result.ops
    # What is rounded to FP16 or BF16 behind the norm may fall on the next number: 2⁻⁸ of 3 in BF16.
    assert_equal(result, single=2e-2)

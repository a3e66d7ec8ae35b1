"""The run file: its schema, its messages."""

from __future__ import annotations

from loka_onnx.config.data_sections import BatchConfig, DataConfig, OutputConfig, SplitConfig, SplitFractions
from loka_onnx.config.fields import (
    Backend,
    Executor,
    NullGroups,
    PlanId,
    ScaleRule,
    SplitBy,
    WeightGranularity,
)
from loka_onnx.config.loading import build_run_config, load_run_file, parse_overrides
from loka_onnx.config.precision_sections import CalibrationConfig, ModsConfig, PlanConfig
from loka_onnx.config.schema import BuildConfig, ModelConfig, RunConfig, TargetConfig, run_file_schema

__all__ = [
    "Backend",
    "BatchConfig",
    "BuildConfig",
    "CalibrationConfig",
    "DataConfig",
    "Executor",
    "ModelConfig",
    "ModsConfig",
    "NullGroups",
    "OutputConfig",
    "PlanConfig",
    "PlanId",
    "RunConfig",
    "ScaleRule",
    "SplitBy",
    "SplitConfig",
    "SplitFractions",
    "TargetConfig",
    "WeightGranularity",
    "build_run_config",
    "load_run_file",
    "parse_overrides",
    "run_file_schema",
]

"""The run file as types: every key, its default and the rules between keys, which report by `fault`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, JsonValue, PrivateAttr, StringConstraints, ValidationInfo, model_validator

from loka_onnx.config.data_sections import BatchConfig, DataConfig, OutputConfig
from loka_onnx.config.fields import (
    Backend,
    Executor,
    Gigabytes,
    NullGroups,
    ResolvedPath,
    Seconds,
    Seed,
    Strict,
    Text,
    Threads,
    fault,
)
from loka_onnx.config.precision_sections import CalibrationConfig, ModsConfig, PlanConfig
from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.backends import backend_names
from loka_onnx.core.evaluation import InputPlace


class ModelConfig(Strict):
    """The model: an ONNX file, or a function that builds a torch module."""

    onnx: ResolvedPath | None = Field(None, description="the .onnx file")
    torch: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = Field(
        None,
        description="'package.module:function'; the function returns a pair: an nn.Module, and a mapping "
        "of example inputs (arrays, the batch on axis 0) in the order of its forward(), which tells their "
        "names, types and widths",
    )
    checkpoint: ResolvedPath | None = Field(None, description="weights for the torch module, .safetensors")
    arguments: dict[str, JsonValue] = Field(
        default_factory=dict, description="keyword arguments of the torch function"
    )
    split_sparse: bool = Field(
        False,
        description="true cuts the model at its embeddings: engines take looked-up rows in place of ids, and "
        "the bundle carries a lookup model beside them; a model that cannot be cut stays whole, and the "
        "report says why",
    )
    require_independent_rows: bool = Field(
        True,
        description="true refuses a model that gives the same row another output among other rows, in "
        "another batch size, or each time (random operators, norms over the batch, Dropout in training); "
        "false goes on, and the report says so",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in ("onnx", "torch") if getattr(self, name) is not None]
        if len(sources) != 1:
            raise fault(
                "`model` needs exactly one of `onnx` and `torch`",
                evidence="both are sources" if sources else "neither is sources",
                remedy="write `model: {onnx: ranker.onnx}` or `model: {torch: 'package.module:build'}`",
            )
        for key in ("checkpoint", "arguments"):
            if self.onnx is not None and getattr(self, key):
                raise fault(
                    f"`model.{key}` belongs to a torch model",
                    at=(key,),
                    evidence="the model is an ONNX file, which holds its weights",
                    remedy=f"remove `{key}`, or give `torch` instead of `onnx`",
                )
        return self


class TargetConfig(Strict):
    """A device to build for."""

    device: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)] = Field(
        description="name of the device, for example cpu, nvidia-h100 or nvidia-rtx-ada; lower-case letters, "
        "digits and hyphens, because it names a directory"
    )
    backends: tuple[Backend, ...] = Field(
        min_length=1, description=f"engine makers: {', '.join(backend_names())}"
    )
    architectures: tuple[Text, ...] = Field(
        (), description="architectures to compile for, as the backend names them; empty for the device's own"
    )
    options: dict[Backend, dict[Text, int]] = Field(
        default_factory=dict,
        description="settings of backends, as in {inductor: {static: 0}}; what is left out has its default",
    )

    @model_validator(mode="after")
    def _options_of_own_backends(self) -> Self:
        for backend in self.options:
            if backend not in self.backends:
                raise fault(
                    f"`options` has settings of backend '{backend}', which this target does not build with",
                    at=("options", str(backend)),
                    evidence=f"its backends are {', '.join(self.backends)}",
                    remedy="add the backend, or remove its settings",
                )
        return self


class BuildConfig(Strict):
    """Engine builds: limits of each, parallelism, and host."""

    timeout_seconds: Seconds = Field(
        900.0, description="a build that takes longer is stopped and counts as failed"
    )
    memory_gb: Annotated[Gigabytes, Field(gt=0.0)] = Field(
        16.0, description="a build that holds more memory is stopped and counts as failed (10⁹ bytes)"
    )
    parallel: Threads | None = Field(
        None,
        description="most builds at once; null for half of the cores. Never more than the free memory "
        "allows, each at its memory limit",
    )
    cache: ResolvedPath | None = Field(
        None,
        description="directory of engines that were built before, taken over where everything that they "
        "depend on is the same; null for `engines` in $LOKA_ONNX_CACHE or in the user's cache directory",
    )
    cache_gb: Gigabytes = Field(
        20.0,
        description="size of that directory beyond which what was not used for longest is removed "
        "(10⁹ bytes); 0 keeps no engines",
    )
    jobs: bool = Field(
        True,
        description="true writes a build job for every engine that cannot be built on this host but may be "
        "on another (`loka-onnx build --job`); false declines it",
    )
    job_data: bool = Field(
        False,
        description="true lets build jobs carry the model inputs of the selection and certification splits, "
        "so that accuracy is measured where the engine runs; labels stay here",
    )
    executor: Executor = Field(
        Executor.LOCAL,
        description="who executes build jobs: local leaves them to `loka-onnx build --job`, ray hands them "
        "to the nodes of a Ray cluster that have the device as a resource, as in {nvidia-h100: 1}",
    )
    ray_address: Text | None = Field(
        None, description="address of that cluster; null for the one that this machine belongs to"
    )


class RefineConfig(Strict):
    """Plans made from measurements of built engines."""

    rounds: Annotated[int, Field(ge=0, le=20)] = Field(
        3,
        description="most rounds of building, timing and judging more plans, where a device here runs FP8 "
        "or INT8; 0 for none",
    )
    plans: Annotated[int, Field(ge=1, le=100)] = Field(
        3, description="most plans that are built in one round"
    )
    seconds: Seconds = Field(
        600.0, description="no round begins after so much time in rounds, for each device"
    )


class ServingConfig(Strict):
    """Serving of engines: one or several, and the load of throughput measurements."""

    by_batch: bool = Field(
        True,
        description="whether batch sizes may get engines of their own, which the bundle then carries all",
    )
    margin: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.03,
        description="least gain at a batch size, beyond what the measurement leaves open, that is worth one "
        "more engine; 0.03 is 3 %",
    )
    inputs: InputPlace = Field(
        InputPlace.HOST,
        description="where the inputs of a request lie when engines are timed, which decides what is chosen: "
        "host for arrays in memory of the process, as a loaded bundle takes them, with the copies to the "
        "device and back; device for servers that put them there themselves, which times the engine alone "
        "(an engine that cannot take them there is timed from the host, and the report says so)",
    )
    p99_ms: Annotated[float, Field(ge=1e-6, le=1e9)] | None = Field(
        None,
        description="limit on the 99th percentile of latency, in milliseconds, at which requests per second "
        "are measured for the chosen engine and the best one without FP8; null measures none",
    )
    streams: Annotated[int, Field(ge=1, le=64)] = Field(
        2, description="copies of an engine that answer at once under that load"
    )
    trial_seconds: Seconds = Field(2.0, description="time of one trial of that load; about ten make a result")
    seed: Seed = Field(0, description="seed of the arrivals")


class RunConfig(Strict):
    """A run file, checked, its paths absolute."""

    name: Annotated[str, StringConstraints(pattern=r"^[\w][\w.-]*$", max_length=60)] = Field(
        description="name of the run, of letters, digits, '_', '-' and '.'; the run file's own name "
        "without its suffix by default"
    )
    model: ModelConfig = Field(description="the model, as ONNX or as a torch module")
    outputs: tuple[OutputConfig, ...] = Field(min_length=1, description="the outputs that are judged")
    data: DataConfig = Field(description="where the rows come from")
    batch: BatchConfig = Field(default_factory=BatchConfig, description="batch sizes of the engines")
    calibration: CalibrationConfig = Field(
        default_factory=CalibrationConfig, description="how ranges, errors and sensitivities are measured"
    )
    mods: ModsConfig = Field(default_factory=ModsConfig, description="which mods rewrite the model")
    plan: PlanConfig = Field(default_factory=PlanConfig, description="what plans may do, and which compete")
    targets: tuple[TargetConfig, ...] = Field(min_length=1, description="devices and backends to build for")
    build: BuildConfig = Field(default_factory=BuildConfig, description="how engines are built")
    refine: RefineConfig = Field(
        default_factory=RefineConfig,
        description="further plans, from what engines were measured to do on a device here",
    )
    serving: ServingConfig = Field(
        default_factory=ServingConfig,
        description="engines by batch size, and the load that throughput is measured under",
    )
    threads: Threads | None = Field(None, description="CPU threads; null for all cores")
    output: ResolvedPath = Field(description="the run directory; runs/<name> by default")

    _directory: Path = PrivateAttr(default_factory=Path.cwd)

    @model_validator(mode="after")
    def _distinct(self, info: ValidationInfo) -> Self:
        _refuse_repeats([output.name for output in self.outputs], "outputs", "name")
        _refuse_repeats([target.device for target in self.targets], "targets", "device")
        if self.data.request is not None and self.model.split_sparse:
            raise fault(
                "`data.request` and `model.split_sparse` exclude each other",
                at=("data", "request"),
                evidence="a model that is cut at its embeddings takes looked-up rows of candidates",
                remedy="remove one of them",
            )
        self._directory = Path((info.context or {}).get("directory", Path())).absolute()
        return self

    @property
    def directory(self) -> Path:
        """The run file's directory: start of relative paths, and home of a torch builder."""
        return self._directory

    @property
    def output_specs(self) -> tuple[OutputSpec, ...]:
        """The judged outputs as core types."""
        return tuple(output.spec for output in self.outputs)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns wanted beside the inputs: labels, weights, group and slices, each once."""
        group = [self.data.group] if self.data.group is not None else []
        return tuple(dict.fromkeys([*self._numbers, *group, *self.data.slices]))

    @property
    def nullable_columns(self) -> frozenset[str]:
        """Those of `columns` in which a null is a value: slices, and a group whose nulls are told apart."""
        strict = set(self._numbers)
        if self.data.group is not None and self.data.null_groups is NullGroups.UNGROUP:
            return (frozenset(self.data.slices) | {self.data.group}) - strict
        return frozenset(self.data.slices) - strict - {self.data.group}

    @property
    def column_keys(self) -> dict[str, str]:
        """Map each of `columns`, and of a split, to the first key that names it."""
        named: list[tuple[str | None, str]] = []
        for index, output in enumerate(self.outputs):
            named += [(output.label, f"outputs[{index}].label"), (output.weight, f"outputs[{index}].weight")]
        named.append((self.data.group, "data.group"))
        named += [(name, "data.slices") for name in self.data.slices]
        named.append(
            (self.data.request.column if self.data.request is not None else None, "data.request.column")
        )
        named.append((self.data.split.column if self.data.split is not None else None, "data.split.column"))
        return {name: key for name, key in reversed(named) if name is not None}

    @property
    def _numbers(self) -> list[str]:
        named = [output.label for output in self.outputs]
        named += [output.weight for output in self.outputs]
        return [name for name in named if name is not None]


def _refuse_repeats(values: list[str], key: str, field: str) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise fault(
                f"the {field} '{value}' is given twice",
                at=(key, index, field),
                evidence=f"`{key}[{values.index(value)}]` has it already",
                remedy=f"each entry of `{key}` needs its own {field}; merge the two entries",
            )


def run_file_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the run file, for editors and for the messages of `explain`."""
    schema = RunConfig.model_json_schema()
    # `loading` fills both in when the file leaves them out.
    schema["required"] = [key for key in schema["required"] if key not in ("name", "output")]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "loka-onnx run file",
    }

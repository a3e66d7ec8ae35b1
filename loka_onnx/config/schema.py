"""The run file as types: every key, its default and the rules between keys.

Unknown keys fail and values are never coerced. The types are filled by `loading`, which knows the lines of
the file; a rule between keys reports through `fault`, which names the key at fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PrivateAttr,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from loka_onnx.config.choices import Backend, Executor, PlanId, ScaleRule, SplitBy, WeightGranularity
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.formats import Float8, Precision

FAULT = "loka_fault"
"""Type of the validation errors that `fault` makes."""


class FaultError(PydanticCustomError):
    """A broken rule between keys; see `fault`."""


def fault(what: str, *, at: tuple[str | int, ...] = (), evidence: str = "", remedy: str = "") -> Exception:
    """A validation error that a rule between keys raises.

    Args:
        what: What is wrong.
        at: The key at fault, relative to the type that holds the rule.
        evidence: The values that show it.
        remedy: What the reader can do.
    """
    context = {"what": what, "at": at, "evidence": evidence, "remedy": remedy}
    return FaultError(FAULT, "{what}", context)


def _resolve(path: Path, info: ValidationInfo) -> Path:
    base = (info.context or {}).get("directory", Path())
    return Path(base, path.expanduser()).absolute()


def _one_or_more(value: Any) -> Any:
    # What a validator hands on counts as Python, where strict mode tells lists from tuples.
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        raise fault(
            "an input is fed from a column or from a list of columns",
            evidence=f"found {value!r}",
            remedy="write for example `dense: [age, price]` or `country: country_id`",
        )
    return (value,)


Text = Annotated[str, StringConstraints(min_length=1)]
ResolvedPath = Annotated[Path, AfterValidator(_resolve)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Columns = Annotated[
    tuple[Text, ...],
    BeforeValidator(_one_or_more),
    Field(min_length=1),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            ]
        }
    ),
]


class _Strict(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )


class ModelConfig(_Strict):
    """The model: an ONNX file, or a function that builds a torch module."""

    onnx: ResolvedPath | None = Field(None, description="the .onnx file")
    torch: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = Field(
        None,
        description="'package.module:function'; the function returns an nn.Module, or a pair of it and a "
        "mapping of example inputs",
    )
    checkpoint: ResolvedPath | None = Field(None, description="weights for the torch module, .safetensors")
    arguments: dict[str, JsonValue] = Field(
        default_factory=dict, description="keyword arguments of the torch function"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("onnx", "torch") if getattr(self, name) is not None]
        if len(given) != 1:
            raise fault(
                "`model` needs exactly one of `onnx` and `torch`",
                evidence="both are given" if given else "neither is given",
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


class OutputConfig(_Strict):
    """One graph output that is judged."""

    name: Text = Field(description="name of the graph output")
    kind: OutputKind = Field(
        description="logit, probability or regression; it decides the loss and is never guessed, because a "
        "logit read as a probability gives a loss that looks plausible and is wrong"
    )
    label: Text | None = Field(
        description="column of the data that holds the label; null where there is none: a logit or "
        "probability is then judged on KL, the part of the loss increase that needs no label, over the mean "
        "entropy of the predictions, and the labelled first-order part is not seen"
    )
    weight: Text | None = Field(None, description="column of the data that holds a weight for each row")
    budget: Annotated[float, Field(gt=0.0)] = Field(
        0.0002, description="largest accepted relative increase of the loss; 0.0002 is 0.02 %"
    )
    clip: Annotated[float, Field(gt=0.0, lt=0.5)] = Field(
        1e-7, description="a probability is clipped to [clip, 1-clip] before it is turned into a logit"
    )

    @model_validator(mode="after")
    def _clip_has_a_use(self) -> Self:
        if "clip" in self.model_fields_set and self.kind is not OutputKind.PROBABILITY:
            raise fault(
                "`clip` belongs to an output of kind 'probability'",
                at=("clip",),
                evidence=f"output '{self.name}' is a {self.kind}",
                remedy="remove `clip`, or correct `kind`",
            )
        return self

    @model_validator(mode="after")
    def _regression_has_a_label(self) -> Self:
        if self.label is None and self.kind is OutputKind.REGRESSION:
            raise fault(
                f"a regression needs a label, and output '{self.name}' has none",
                at=("label",),
                evidence="without labels a change is relative to the mean entropy of the predictions, which "
                "a regression does not have",
                remedy="name the column of its label, or remove this output from `outputs`",
            )
        return self

    @property
    def spec(self) -> OutputSpec:
        """The same as the core type."""
        return OutputSpec(self.name, self.kind, self.label, self.weight, self.budget, self.clip)


class SplitFractions(_Strict):
    """Shares of one file, of its rows or of its keys."""

    calibration: Fraction = Field(0.2, description="share that ranges and errors are measured on")
    selection: Fraction = Field(0.3, description="share that plans, corrections and the choice are made on")
    certification: Fraction = Field(0.5, description="share that is looked at once, at the end")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        total = self.calibration + self.selection + self.certification
        if total > 1 + 1e-9:
            raise fault(
                "the fractions of a split sum to more than 1",
                evidence=f"{self.calibration} + {self.selection} + {self.certification} = {total:g}",
                remedy="for example 0.2, 0.3 and 0.5",
            )
        return self


class SplitConfig(_Strict):
    """How one file is divided into the three disjoint splits."""

    by: SplitBy = Field(
        description="'order' for contiguous rows, 'hash' to keep rows that share a key together"
    )
    column: Text | None = Field(None, description="key column of a split by hash")
    fractions: SplitFractions = Field(
        default_factory=SplitFractions, description="shares of the three splits"
    )
    seed: Seed = Field(0, description="chooses the hash function")

    @model_validator(mode="after")
    def _key(self) -> Self:
        if self.by is SplitBy.HASH and self.column is None:
            raise fault(
                "a split by hash needs a key column",
                evidence="`column` is not given",
                remedy="name the column whose equal values belong together, for example the request id",
            )
        for key in ("column", "seed"):
            if self.by is SplitBy.ORDER and key in self.model_fields_set:
                raise fault(
                    f"`{key}` belongs to a split by hash",
                    at=(key,),
                    evidence="the split is by order",
                    remedy=f"remove `{key}`, or write `by: hash`",
                )
        return self


class DataConfig(_Strict):
    """Where the rows come from: three files, or one with a rule that divides it."""

    calibration: ResolvedPath | None = Field(None, description="Parquet or npz file that ranges come from")
    selection: ResolvedPath | None = Field(None, description="file that plans and engines are chosen on")
    certification: ResolvedPath | None = Field(None, description="file that is looked at once, at the end")
    path: ResolvedPath | None = Field(None, description="one file for all three; needs `split`")
    split: SplitConfig | None = Field(None, description="how `path` is divided")
    inputs: dict[Text, Columns] = Field(
        default_factory=dict,
        description="for each graph input the column, or the list of columns, that it is fed from; an input "
        "that is not listed is fed from the column of its name",
    )
    group: Text | None = Field(
        None, description="column whose equal values belong together (a request, a user)"
    )
    slices: tuple[Text, ...] = Field(
        (),
        description="columns whose values (countries, devices) accuracy is reported for separately, each of "
        "the 50 most frequent and null too; they do not enter the choice",
    )
    synthetic: bool = Field(
        False, description="true declares the rows generated, which is stamped on everything downstream"
    )

    SPLITS: ClassVar[tuple[str, ...]] = ("calibration", "selection", "certification")

    @model_validator(mode="after")
    def _slices_once(self) -> Self:
        for index, column in enumerate(self.slices):
            if column in self.slices[:index]:
                raise fault(
                    f"the slice column '{column}' is listed twice",
                    at=("slices", index),
                    evidence=f"slices is {list(self.slices)}",
                    remedy="list each column once",
                )
        return self

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        files = [name for name in self.SPLITS if getattr(self, name) is not None]
        if self.path is not None and files:
            raise fault(
                f"`data.path` and `data.{files[0]}` exclude each other",
                at=(files[0],),
                evidence="one file with a split rule, or three files",
                remedy=f"remove `path` and `split`, or remove {_listed(files)}",
            )
        if (self.path is None) != (self.split is None):
            given, absent = ("path", "split") if self.split is None else ("split", "path")
            raise fault(
                f"`data.{given}` needs `data.{absent}`",
                at=(given,),
                evidence=f"`{absent}` is not given",
                remedy="for example `path: clicks.parquet` with `split: {by: hash, column: user_id}`",
            )
        if self.path is None and len(files) < len(self.SPLITS):
            absent = _listed([name for name in self.SPLITS if name not in files])
            raise fault(
                "`data` needs three disjoint splits: calibration, selection and certification",
                evidence=f"{absent} not given",
                remedy="give the three files, or one `path` with a `split` rule",
            )
        return self


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


class BatchConfig(_Strict):
    """Batch sizes of the engines, in rows."""

    min: Count = Field(1, description="smallest batch an engine must take")
    serve: tuple[Count, ...] = Field(
        (256, 1024, 2048), min_length=1, description="batch sizes that latency is measured and optimized at"
    )
    max: Count = Field(4096, description="largest batch an engine must take")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise fault(
                "`batch.min` is larger than `batch.max`",
                at=("min",),
                evidence=f"min is {self.min}, max is {self.max}",
                remedy="swap them or widen the range",
            )
        for index, size in enumerate(self.serve):
            if not self.min <= size <= self.max:
                raise fault(
                    f"the serving batch {size} is outside of the range that engines are built for",
                    at=("serve", index),
                    evidence=f"min is {self.min}, max is {self.max}",
                    remedy="remove it, or widen `batch.min` and `batch.max`",
                )
            if size in self.serve[:index]:
                raise fault(
                    f"the serving batch {size} is listed twice",
                    at=("serve", index),
                    evidence=f"serve is {list(self.serve)}",
                    remedy="list each size once",
                )
        return self


class CalibrationConfig(_Strict):
    """How ranges, errors and sensitivities are measured."""

    batch_size: Count = Field(512, description="rows in one calibration batch")
    rows: Count | None = Field(None, description="rows that are used at all, the first ones; null for all")
    sensitivity_rows: Count | None = Field(
        None,
        description="most rows that the effect of each site on the outputs is measured on; null for as many "
        "as are used at all",
    )
    stop_when_decided: bool = Field(
        True,
        description="whether that ends before, when the verdict of every site is reached; verdicts then rest "
        "on intervals that hold at any number of rows, which are wider than those at a fixed one",
    )
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = Field(
        0.95, description="of the intervals that verdicts rest on, all of them together"
    )
    draws: Annotated[int, Field(ge=1, le=8)] = Field(
        4,
        description="draws of the rounding noise, 1 to 8: some rows are measured again under scales that "
        "were moved a little, and a site counts as the worst of its draws; 1 for no other",
    )
    error_precision: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        0.02,
        description="relative precision of each site's own error at which no further rows are taken for it; "
        "null to take it from all rows",
    )
    seed: Seed = Field(0, description="seed of everything that is drawn")
    executor: Executor = Field(
        Executor.LOCAL, description="local for threads of this process, ray for the machines of a Ray cluster"
    )
    ray_address: Text | None = Field(
        None,
        description="address of the Ray cluster that this machine belongs to, as in 10.0.0.5:6379, or auto; "
        "null starts one on this machine",
    )

    @model_validator(mode="after")
    def _address_has_a_use(self) -> Self:
        if self.ray_address is not None and self.executor is not Executor.RAY:
            raise fault(
                "`ray_address` belongs to the executor 'ray'",
                at=("ray_address",),
                evidence=f"`executor` is {self.executor}",
                remedy="remove it, or write `executor: ray`",
            )
        return self


class PlanConfig(_Strict):
    """What plans may do, and which compete. Patterns are those of a shell, over site names."""

    keep: tuple[Text, ...] = Field((), description="patterns of sites that stay in the base precision")
    force: tuple[Text, ...] = Field((), description="patterns of sites that run in FP8 whatever was measured")
    base: Literal[Precision.BF16, Precision.FP16, Precision.FP32] = Field(
        Precision.BF16, description="bf16, fp16 or fp32: precision of everything that does not run in FP8"
    )
    weight_granularity: WeightGranularity = Field(
        WeightGranularity.BEST,
        description="per_tensor, per_channel, or best to take at each site the one with the smaller error",
    )
    format: Float8 = Field(
        Float8.E4M3FN,
        description="E4M3FN, E4M3FNUZ or E5M2: FP8 format of both operands; an engine maker that cannot "
        "multiply it declines the plan",
    )
    scale: ScaleRule = Field(
        ScaleRule.AMAX,
        description="rule of activation scales: amax (no calibration row saturates), percentile (99.99 % of "
        "the values do not), mse (smallest squared error that the histogram predicts), or best to measure "
        "these and take at each site the one with the smallest error; weights are scaled by amax",
    )
    plans: tuple[PlanId, ...] = Field(
        (PlanId.FP32, PlanId.BF16, PlanId.FP8_ALL, PlanId.FP8_SAFE),
        description="plans that are built and compete: fp32, bf16, fp16, fp8-all, fp8-safe, fp8-fast",
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        for index, pattern in enumerate(self.force):
            if pattern in self.keep:
                raise fault(
                    f"the pattern '{pattern}' is both kept and forced",
                    at=("force", index),
                    evidence="`keep` leaves a site out of FP8, `force` puts it there",
                    remedy="remove it from one of the two",
                )
        for index, plan in enumerate(self.plans):
            if plan in self.plans[:index]:
                raise fault(
                    f"the plan '{plan}' is listed twice",
                    at=("plans", index),
                    evidence=f"plans are {', '.join(self.plans)}",
                    remedy="list each plan once",
                )
        if PlanId.FP32 not in self.plans:
            raise fault(
                "the plan 'fp32' must compete",
                at=("plans",),
                evidence=f"plans are {', '.join(self.plans) or 'none'}",
                remedy="add fp32: it is what is deployed when nothing else is inside of the budget",
            )
        return self


class TargetConfig(_Strict):
    """A device to build for."""

    device: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")] = Field(
        description="name of the device, for example cpu, nvidia-h100 or nvidia-rtx-ada; lower-case letters, "
        "digits and hyphens, because it names a directory"
    )
    backends: tuple[Backend, ...] = Field(
        min_length=1, description="engine makers: onnxruntime, tensorrt, tensorrt_rtx, migraphx, inductor"
    )
    architectures: tuple[Text, ...] = Field(
        (), description="architectures to compile for, as the backend names them; empty for the device's own"
    )


class BuildConfig(_Strict):
    """Limits of the child process that builds and first runs one engine."""

    timeout_seconds: Annotated[float, Field(gt=0.0)] = Field(
        900.0, description="a build that takes longer is stopped and counts as failed"
    )
    memory_gb: Annotated[float, Field(gt=0.0)] = Field(
        16.0, description="a build that holds more memory is stopped and counts as failed (10⁹ bytes)"
    )


class RunConfig(_Strict):
    """A run file, checked, its paths absolute."""

    name: Annotated[str, StringConstraints(pattern=r"^[\w][\w.-]*$")] = Field(
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
    plan: PlanConfig = Field(default_factory=PlanConfig, description="what plans may do, and which compete")
    targets: tuple[TargetConfig, ...] = Field(min_length=1, description="devices and backends to build for")
    build: BuildConfig = Field(default_factory=BuildConfig, description="limits of one build")
    threads: Count | None = Field(None, description="CPU threads; null for all cores")
    output: ResolvedPath = Field(description="the run directory; runs/<name> by default")

    _directory: Path = PrivateAttr(default_factory=Path.cwd)

    @model_validator(mode="after")
    def _distinct(self, info: ValidationInfo) -> Self:
        _refuse_repeats([output.name for output in self.outputs], "outputs", "name")
        _refuse_repeats([target.device for target in self.targets], "targets", "device")
        self._directory = Path((info.context or {}).get("directory", Path())).absolute()
        return self

    @property
    def directory(self) -> Path:
        """The run file's directory: what relative paths start at, and where a torch builder is looked for."""
        return self._directory

    @property
    def output_specs(self) -> tuple[OutputSpec, ...]:
        """The judged outputs as core types."""
        return tuple(output.spec for output in self.outputs)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns wanted beside the inputs: labels, weights, group and slices, each once."""
        return tuple(dict.fromkeys([*self._numbers_and_group, *self.data.slices]))

    @property
    def nullable_columns(self) -> frozenset[str]:
        """Those of `columns` in which a null is a value: slices that serve for nothing else."""
        return frozenset(self.data.slices) - set(self._numbers_and_group)

    @property
    def _numbers_and_group(self) -> list[str]:
        named = [output.label for output in self.outputs]
        named += [output.weight for output in self.outputs]
        return [name for name in (*named, self.data.group) if name is not None]


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
    """JSON Schema (2020-12) of the run file, for editors and for the messages of `explain`."""
    schema = RunConfig.model_json_schema()
    # Both are filled in by `loading` when the file leaves them out.
    schema["required"] = [key for key in schema["required"] if key not in ("name", "output")]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "loka-onnx run file",
    }

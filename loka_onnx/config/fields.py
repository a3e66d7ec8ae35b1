"""Base of all run-file sections: base type, kinds of fields, values to choose from, and `fault`."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from loka_onnx.core.backends import backend_names
from loka_onnx.core.formats import FORMATS, NumberFormat, Precision
from loka_onnx.core.plan import quantized_precisions
from loka_onnx.core.serde import MOST_NAME_BYTES, MOST_PATH_BYTES

FAULT = "loka_fault"
"""Type of the validation errors of `fault`."""


def fault(what: str, *, at: tuple[str | int, ...] = (), evidence: str = "", remedy: str = "") -> Exception:
    """Return a validation error for a rule between keys; `at` is the key at fault, relative to the type."""
    context = {"what": what, "at": at, "evidence": evidence, "remedy": remedy}
    return PydanticCustomError(FAULT, "{what}", context)


def _resolve(path: Path, info: ValidationInfo) -> Path:
    base = (info.context or {}).get("directory", Path())
    try:
        resolved = Path(base, path.expanduser()).absolute()
    except RuntimeError as error:
        raise fault("the home directory of a path is not known", evidence=str(error)) from error
    for what, length, most in (
        ("path", len(os.fsencode(resolved)), MOST_PATH_BYTES),
        ("file name", max(len(os.fsencode(part)) for part in resolved.parts), MOST_NAME_BYTES),
    ):
        if length > most:
            evidence = f"it has {length} bytes, of at most {most}"
            raise fault(f"the {what} is longer than Linux allows", evidence=evidence, remedy="shorten it")
    if "\0" in str(resolved):
        raise fault("a path holds the character NUL", remedy="write the path without it")
    return resolved


def _one_or_more(value: Any) -> Any:
    # A validator's result counts as Python, where strict mode tells lists from tuples.
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        raise fault(
            "an input is fed from a column or from a list of columns",
            evidence=f"found {value!r}",
            remedy="write for example `dense: [age, price]` or `country: country_id`",
        )
    return (value,)


def _each_once(values: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise fault(
                f"`{info.field_name}` lists '{value}' twice",
                at=(index,),
                evidence=f"it is {', '.join(map(str, values))}",
                remedy="list each entry once",
            )
    return values


EACH_ONCE = AfterValidator(_each_once)
"""For a list that repeats no entry."""
Text = Annotated[str, StringConstraints(min_length=1)]
ResolvedPath = Annotated[Path, AfterValidator(_resolve)]
MOST_ROWS = 1 << 20
"""Most rows of one batch: every stage holds all activations of a batch at once."""
CLOSEST = 1e-6
"""Least distance of a share from 0 and 1. Beyond, a split has no rows, and an interval no end."""
Count = Annotated[int, Field(ge=1, le=1 << 50)]
Batch = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Threads = Annotated[int, Field(ge=1, le=4096)]
Seconds = Annotated[float, Field(ge=1e-3, le=1e8)]
Gigabytes = Annotated[float, Field(ge=0.0, le=1e6)]
Fraction = Annotated[float, Field(ge=CLOSEST, le=1.0 - CLOSEST)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
_NAME = {"type": "string", "minLength": 1}
Columns = Annotated[
    tuple[Text, ...],
    BeforeValidator(_one_or_more),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [_NAME, {"type": "array", "items": _NAME, "minItems": 1}]}),
]


class Strict(BaseModel):
    """A section: unknown keys fail, values are never coerced, and nothing changes after reading."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )


# Values to choose from ------------------------------------------------------------------------------

if TYPE_CHECKING:
    Backend = str
else:
    Backend = Literal[backend_names()]
    """Name of a backend."""


class PlanId(StrEnum):
    """A precision assignment that competes."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    UNTOUCHED = "untouched"
    """The exported model without mods and fusions, in FP16 where it fits, else in BF16."""
    FP8_ALL = "fp8-all"
    FP8_SAFE = "fp8-safe"
    FP8_FAST = "fp8-fast"
    INT8_ALL = "int8-all"
    INT8_SAFE = "int8-safe"
    INT8_FAST = "int8-fast"
    MIXED = "mixed"

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """FP8, INT8 or both, in which its quantized sites may run; none in high precision."""
        return quantized_precisions(self)


class Executor(StrEnum):
    """Executor of calibration batches and build jobs."""

    LOCAL = "local"
    """Threads of this process; build jobs are left to be carried to their host."""
    RAY = "ray"
    """Machines of a Ray cluster."""


class Float8Format(StrEnum):
    """Name of an FP8 format (`core.formats`)."""

    E4M3FN = "E4M3FN"
    E4M3FNUZ = "E4M3FNUZ"
    E5M2 = "E5M2"

    @property
    def number_format(self) -> NumberFormat:
        """The format of that name."""
        return FORMATS[self.lower()]


class WeightGranularity(StrEnum):
    """Elements of a weight that share one scale."""

    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"
    BEST = "best"
    """Per site, the one with the smaller measured error."""


class ScaleRule(StrEnum):
    """Rule from the range of an activation to its scale."""

    AMAX = "amax"
    PERCENTILE = "percentile"
    MSE = "mse"
    BEST = "best"
    """Per site, the one with the smallest measured error."""


class NullGroups(StrEnum):
    """Treatment of rows without a group."""

    REFUSE = "refuse"
    UNGROUP = "ungroup"
    """Each is a group of its own."""


class SplitBy(StrEnum):
    """Rule that divides one file."""

    ORDER = "order"
    """Contiguous rows in file order."""
    HASH = "hash"
    """By a hash of a key column, so that rows with one key stay together."""

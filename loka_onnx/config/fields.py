"""What every section of the run file is made of: its base type, its kinds of fields, and `fault`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

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


class Strict(BaseModel):
    """A section: unknown keys fail, values are never coerced, and nothing changes after it was read."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )

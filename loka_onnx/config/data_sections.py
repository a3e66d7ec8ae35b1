"""The sections of the run file about rows: outputs with their labels, splits, batch sizes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from loka_onnx.config.fields import (
    EACH_ONCE,
    Batch,
    Columns,
    Fraction,
    NullGroups,
    ResolvedPath,
    Seed,
    SplitBy,
    Strict,
    Text,
    fault,
)
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.errors import ConfigError


class OutputConfig(Strict):
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
    budget: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.0002, description="largest accepted relative increase of the loss: 0.0002 is 0.02 %, and 1 is 100 %"
    )
    max_kl: Annotated[float, Field(gt=0.0, le=1e4)] | None = Field(
        None,
        description="largest accepted KL, the part of the loss increase that needs no label, over the FP32 "
        "loss (over the mean entropy without labels); held against the upper end of its interval, so that a "
        "lucky labelled part does not hide large changes; null for 5 times `budget`",
    )
    max_auc_drop: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="largest accepted decrease of AUC, held against the end of its interval that is worse; "
        "0.0001 is .01 points; null accepts any, and warns where the whole interval lies beyond .01 points",
    )
    clip: Annotated[float, Field(gt=0.0, lt=0.5)] = Field(
        1e-7, description="a probability is clipped to [clip, 1-clip] before it is turned into a logit"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if "clip" in self.model_fields_set and self.kind is not OutputKind.PROBABILITY:
            raise fault(
                "`clip` belongs to an output of kind 'probability'",
                at=("clip",),
                evidence=f"output '{self.name}' is a {self.kind}",
                remedy="remove `clip`, or correct `kind`",
            )
        try:
            _ = self.spec
        except ConfigError as error:
            raise fault(
                error.what, at=(error.where,), evidence=error.evidence, remedy=error.remedy
            ) from error
        return self

    @property
    def spec(self) -> OutputSpec:
        """The same as the core type."""
        return OutputSpec(**self.model_dump())


class SplitFractions(Strict):
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


class SplitConfig(Strict):
    """Division of one file into the three disjoint splits."""

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


class RequestConfig(Strict):
    """A request of one user and many candidates."""

    column: Text = Field(description="column of the request's id; rows that share it are one request")
    inputs: Annotated[tuple[Text, ...], EACH_ONCE, Field(min_length=1)] = Field(
        description="graph inputs that are equal within a request, as those of the user are"
    )


class DataConfig(Strict):
    """Source of the rows: three files, or one with a rule that divides it."""

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
    request: RequestConfig | None = Field(
        None,
        description="inputs that are equal within a request: engines of ONNX Runtime on the CPU compute what "
        "depends on these alone once for each user; null where a row is a request of its own",
    )
    null_groups: NullGroups = Field(
        NullGroups.REFUSE,
        description="rows whose group is null, NaN or an empty string: 'refuse' them, or 'ungroup', which "
        "takes each of them as a group of its own",
    )
    slices: Annotated[tuple[Text, ...], EACH_ONCE] = Field(
        (),
        description="columns whose values (countries, devices) accuracy is reported for separately, each of "
        "the 50 most frequent and null too; they do not enter the choice",
    )
    synthetic: bool = Field(
        False, description="true declares the rows generated, which is stamped on everything downstream"
    )

    SPLITS: ClassVar[tuple[str, ...]] = ("calibration", "selection", "certification")

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
            present, absent = ("path", "split") if self.split is None else ("split", "path")
            raise fault(
                f"`data.{present}` needs `data.{absent}`",
                at=(present,),
                evidence=f"`{absent}` is not present",
                remedy="for example `path: clicks.parquet` with `split: {by: hash, column: user_id}`",
            )
        if self.path is None and len(files) < len(self.SPLITS):
            absent = _listed([name for name in self.SPLITS if name not in files])
            raise fault(
                "`data` needs three disjoint splits: calibration, selection and certification",
                evidence=f"{absent} not present",
                remedy="give the three files, or one `path` with a `split` rule",
            )
        return self


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


class BatchConfig(Strict):
    """Batch sizes of the engines, in rows."""

    min: Batch = Field(1, description="smallest batch an engine must take")
    serve: Annotated[tuple[Batch, ...], EACH_ONCE] = Field(
        (256, 1024, 2048), min_length=1, description="batch sizes that latency is measured and optimized at"
    )
    max: Batch = Field(4096, description="largest batch an engine must take")

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
                    remedy="write `batch.serve` without it, or widen `batch.min` and `batch.max`",
                )
        return self

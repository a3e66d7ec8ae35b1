"""Applied and declined rewrites of a transform; a model cut at its embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from loka_onnx.core.artifact import ModelArtifact, TensorSpec
from loka_onnx.core.serde import STRICT


@dataclass(frozen=True)
class Applied:
    """One rewrite at a node, site or tensor.

    `origins` maps a new site to the sites that it replaces; to itself if its operands hold other values.
    """

    at: str
    what: str
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Declined:
    """A look-alike node, site or tensor that was not rewritten; `at` is empty for the whole model."""

    at: str
    reason: str


@dataclass(frozen=True)
class RewriteRecord:
    """The result of one transform, with wall times of matching and rewriting, and of the check on data.

    `max_abs` is the largest change of any output on the check rows, `tolerance` its limit; None when not
    checked (precision transforms change outputs on purpose). It is `rolled_back` where that was exceeded, or
    it failed.
    """

    transform: str
    applied: tuple[Applied, ...]
    declined: tuple[Declined, ...]
    max_abs: float | None = None
    tolerance: float | None = None
    rolled_back: bool = False
    seconds: float = 0.0
    check_seconds: float = 0.0


@dataclass(frozen=True)
class RewriteLog:
    """The records of a sequence of transforms."""

    SCHEMA: ClassVar[str] = "rewrites/1"
    __pydantic_config__ = STRICT

    records: tuple[RewriteRecord, ...]


@dataclass(frozen=True)
class RewriteLogs:
    """The logs of a run: the mods, and the precision of each planned model."""

    SCHEMA: ClassVar[str] = "rewrite-logs/1"
    __pydantic_config__ = STRICT

    logs: dict[str, RewriteLog]


@dataclass(frozen=True)
class HighErrorChannels:
    """Share of its FP8 error that each site to be split may keep, by name; a refresh repeats the request."""

    SCHEMA: ClassVar[str] = "loud-channels/1"

    __pydantic_config__ = STRICT

    left: dict[str, float]


TRANSFORM = "split_sparse"
"""Name of the cut among the rewrites of a report."""


class Part(StrEnum):
    """Part of a model that an engine was built from."""

    WHOLE = "whole"
    """Takes the model's own inputs, ids included."""
    DENSE = "dense"
    """Takes numeric inputs and rows looked up by a lookup model or a parameter server."""
    REQUEST = "request"
    """Takes a row for each user, a row for each candidate, and `INDEX`."""


INDEX = "user_of_candidate"
"""Input of an engine in request form: the user's row of each candidate, (candidates,) int64."""
USERS = "users"
"""Name of axis 0 of its inputs with a row for each user."""


@dataclass(frozen=True)
class SharedUsers:
    """The request form of a model whose `inputs` are equal within a request (`model/request.json`).

    `record` has the rewrites, or why there are none. `times_us` are median times of a request in FP32 in ONNX
    Runtime on the CPU: with a row for each candidate, then in request form; empty if it was not timed.
    """

    SCHEMA: ClassVar[str] = "request/1"
    __pydantic_config__ = STRICT

    inputs: tuple[str, ...]
    record: RewriteRecord
    times_us: tuple[float, ...] = ()

    @property
    def is_used(self) -> bool:
        """True if engines take requests in this form, as far as their backends do."""
        return bool(self.record.applied)

    @property
    def note(self) -> str:
        """Note for readers of the report."""
        names, reasons = ", ".join(self.inputs), "; ".join(each.reason for each in self.record.declined)
        times = " to ".join(f"{each:.0f}" for each in self.times_us) or "not timed"
        what = f"once for each user; other engines do for each candidate. In FP32, µs: {times}"
        if not self.is_used:
            what = f"for each candidate: {reasons}"
        return f"Engines of ONNX Runtime on the CPU compute what depends on {names} alone {what}."


@dataclass(frozen=True)
class SplitCheck:
    """Both halves in sequence against the whole: `equal` if all outputs had the same bits on all batches."""

    batches: tuple[int, ...]
    equal: bool

    @property
    def rows(self) -> int:
        """Rows that were compared."""
        return sum(self.batches)


@dataclass(frozen=True)
class Halves:
    """The two models that replace one, and the tensors cut between them, the batch on axis 0.

    `lookup` takes ids, returns the cut tensors and holds the tables; `dense` takes the other inputs, then the
    cut tensors, and holds every site of the whole.
    """

    lookup: ModelArtifact
    dense: ModelArtifact
    cut: tuple[TensorSpec, ...]

    @property
    def passed(self) -> tuple[str, ...]:
        """Inputs of the whole that the dense half reads itself."""
        looked_up = {spec.name for spec in self.cut}
        return tuple(spec.name for spec in self.dense.inputs if spec.name not in looked_up)


@dataclass(frozen=True)
class ModelSplit:
    """The cut of the model with digest `parent`, or where and why it was `declined` (`model/split.json`)."""

    SCHEMA: ClassVar[str] = "split/1"
    __pydantic_config__ = STRICT

    parent: str
    halves: Halves | None
    check: SplitCheck | None
    declined: Declined | None
    seconds: float = 0.0

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the lookup and the dense half; empty for a model that stays whole."""
        return () if self.halves is None else (self.halves.lookup.digest, self.halves.dense.digest)

    @property
    def log(self) -> RewriteLog:
        """Log of the cut for the rewrites of a report."""
        applied = () if self.halves is None else tuple(_applied(spec) for spec in self.halves.cut)
        moved = 0.0 if applied else None
        declined = () if self.declined is None else (self.declined,)
        return RewriteLog((RewriteRecord(TRANSFORM, applied, declined, moved, moved, seconds=self.seconds),))

    @property
    def note(self) -> str:
        """Note for readers of the report: where the model was cut, or why it went on whole."""
        if self.halves is None or self.check is None:
            where = "" if self.declined is None else f" '{self.declined.at}': {self.declined.reason}."
            return f"The run was asked to cut the model at its embeddings and went on whole:{where}"
        names = ", ".join(f"'{spec.name}'" for spec in self.halves.cut)
        return (
            f"The model is cut at its embeddings: engines take looked-up rows ({names}) in place of ids. The "
            f"halves gave the bits of the whole on {self.check.rows} rows. Accuracy is that of the lookup "
            "and the engine, one after the other. Latency is that of the engine alone, on rows that were "
            "looked up before; the median of the lookup, in ONNX Runtime on the CPU, is given beside it."
        )


def _applied(spec: TensorSpec) -> Applied:
    shape = ", ".join("rows" if size is None else str(size) for size in spec.shape)
    return Applied(spec.name, f"cut here: {spec.dtype} [{shape}] goes from the lookup model to the engine")

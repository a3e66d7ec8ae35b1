"""Models of a Triton repository as values, and their `config.pbtxt`.

A tensor of one number per row has no dimension left without the batch; `dims` must not be empty, so such a
tensor is declared as ``[1]`` and reshaped to nothing, and clients send it as (rows, 1).

Sources: `model_config.proto` of triton-inference-server/common, and what the server checks of it
(`model_config_utils.cc`, `ensemble_utils.cc` of triton-inference-server/core); protobuf.dev, "Text Format
Language Specification". Triton's messages come with its client, which an exporting host need not have.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Union

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.errors import BundleError, ConfigError

VERSION, WARMUP = "1", "warmup"
"""Directories of the only version of each model, and of rows for warming it up."""
PARAMETER = "loka_onnx."
"""Prefix of the parameters that state the origin of a model."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

DATA_TYPES: Mapping[str, str] = {
    name: f"TYPE_{name.upper().replace('FLOAT', 'FP')}"
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
}
"""Triton's name of an element type, by NumPy's."""

OPEN = -1
"""Size of an axis that each request chooses."""


class Symbol(str):
    """Name of an enumerator, written without quotes."""

    __slots__ = ()


Value = Union[str, int, "Fields"]
"""A string, an enumerator (`Symbol`), a number, a flag, or the fields of a message."""
Fields = tuple[tuple[str, Value], ...]
"""A message: names and values; a repeated field stands several times."""


@dataclass(frozen=True)
class Port:
    """One input or output of a served model; `tensor` is its name in the bundle, None in a shape is open."""

    name: str
    tensor: str
    dtype: str
    row_shape: tuple[int | None, ...]

    @property
    def data_type(self) -> Symbol:
        """Triton's name of its element type."""
        return Symbol(DATA_TYPES[self.dtype])

    def declared(self) -> Fields:
        """Fields of `ModelInput` or `ModelOutput` of a model that a backend runs."""
        reshape: Fields = () if self.row_shape else (("reshape", ()),)
        return (*self.seen_by_clients(), *reshape)

    def seen_by_clients(self) -> Fields:
        """The same of an ensemble: its steps reshape, so it must not."""
        shape = [OPEN if size is None else size for size in self.row_shape] or [1]
        # `dims` stays a list where it has one element: both forms are right, one is easier to read.
        return (("name", self.name), ("data_type", self.data_type), *(("dims", size) for size in shape))


def ports_of(specs: tuple[TensorSpec, ...], names: Mapping[str, str] | None = None) -> tuple[Port, ...]:
    """Ports of tensors of a bundle, under the same names in Triton unless `names` has others. Raises
    BundleError for a tensor without a batch, or of an element type that Triton's protocol lacks.
    """
    ports = []
    for spec in specs:
        if not spec.shape or spec.shape[0] is not None:
            raise BundleError(
                f"E2810 Triton cannot batch requests of a model whose '{spec.name}' has no batch",
                evidence=f"its shape is {spec.shape}",
                remedy="export the model with a dynamic axis 0 on every input and output",
            )
        if spec.dtype not in DATA_TYPES:
            raise BundleError(
                f"E2811 Triton's protocol has no element type for '{spec.name}'",
                evidence=f"its type is {spec.dtype}; known are {', '.join(DATA_TYPES)}",
                remedy="cast it inside the model",
            )
        name = spec.name if names is None else names[spec.name]
        ports.append(Port(name, spec.name, spec.dtype, spec.shape[1:]))
    return tuple(ports)


@dataclass(frozen=True)
class TritonOptions:
    """Options of a repository: name of the model that clients call, with which every other model's begins;
    ids of the engines to serve besides the FP32 model, all that Triton can serve if empty; instances of each
    model on each device; longest time that a request waits for others to share its batch, microseconds.
    """

    name: str
    engines: tuple[str, ...] = ()
    instances: int = 1
    queue_delay_us: int = 100

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"E2812 '{self.name}' cannot be the name of a model in Triton",
                evidence="it becomes a directory, and a part of the addresses that clients call",
                remedy="use up to 100 letters, digits and ._- with `--name`",
            )
        if not 1 <= self.instances <= 1024:
            raise ConfigError(
                f"E2813 {self.instances} instances of a model cannot be served",
                evidence="a model has 1 to 1024 instances on a device",
                remedy="choose `--instances` in that range",
            )
        if not 0 <= self.queue_delay_us <= 10_000_000:
            raise ConfigError(
                f"E2814 requests cannot wait {self.queue_delay_us} µs",
                evidence="they wait 0 to 10,000,000 µs",
                remedy="choose `--queue-delay-us` in that range",
            )


@dataclass(frozen=True)
class ModelFile:
    """One file of a model, relative to its directory: a copy of `source` in the bundle, or `content`.
    `program` is a program of an AOTInductor package that is renamed as it is copied.
    """

    path: str
    source: str = ""
    content: bytes = b""
    program: str = ""


@dataclass(frozen=True)
class BackendModel:
    """A model that a backend of Triton runs.

    Attributes:
        backend: Triton's name of the backend; `platform` of the kind of file, where it has several.
        file: Name of the model file within the version.
        kind: Place of its instances, ``KIND_CPU``, ``KIND_GPU`` or ``KIND_MODEL``.
        minimum: Fewest rows of a batch; the server knows no such bound.
        sizes: Batch sizes that it is served at, ascending.
        files: The engine first.
        warmup: File that holds the first row of an input, and that row's shape, by the input's name.
        optimization: Fields of `ModelOptimizationPolicy`.
        queues: Requests wait for others; those of a step in front of another do not.
    """

    name: str
    backend: str
    platform: str
    file: str
    kind: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    minimum: int
    maximum: int
    sizes: tuple[int, ...]
    files: tuple[ModelFile, ...]
    warmup: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    optimization: Fields = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    queues: bool = True

    def config(self, options: TritonOptions) -> str:
        """Its `config.pbtxt`."""
        platform: Fields = (("platform", self.platform),) if self.platform else ()
        optimization: Fields = (("optimization", self.optimization),) if self.optimization else ()
        sizes: Fields = tuple(("preferred_batch_size", size) for size in self.sizes)
        delay = options.queue_delay_us if self.queues else 0
        return render(
            (
                ("name", self.name),
                *platform,
                ("backend", self.backend),
                ("default_model_filename", self.file),
                ("version_policy", (("specific", (("versions", int(VERSION)),)),)),
                ("max_batch_size", self.maximum),
                *(("input", port.declared()) for port in self.inputs),
                *(("output", port.declared()) for port in self.outputs),
                ("dynamic_batching", (*sizes, ("max_queue_delay_microseconds", delay))),
                ("instance_group", (("count", options.instances), ("kind", Symbol(self.kind)))),
                *optimization,
                *(("model_warmup", self._warmup(size)) for size in sorted({self.minimum, *self.sizes})),
                *_parameters(self.parameters),
            )
        )

    def _warmup(self, size: int) -> Fields:
        rows: dict[str, Value] = {}
        for port in self.inputs:
            file, shape = self.warmup[port.name]
            dims = (("dims", length) for length in shape)
            rows[port.name] = (("data_type", port.data_type), *dims, ("input_data_file", file))
        return (("name", f"rows{size}"), ("batch_size", size), *map_field("inputs", rows), ("count", 1))


@dataclass(frozen=True)
class EnsembleStep:
    """One model of an ensemble, with the tensors of the ensemble by its inputs and outputs."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    def fields(self) -> Fields:
        """Fields of `ModelEnsembling.Step`; of whichever version is served."""
        return (
            ("model_name", self.model),
            ("model_version", -1),
            *map_field("input_map", self.inputs),
            *map_field("output_map", self.outputs),
        )


@dataclass(frozen=True)
class Ensemble:
    """Models one after the other, under one name; no step takes fewer rows than `maximum`. The server passes
    tensors on, and refuses an input that no step reads.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    maximum: int
    steps: tuple[EnsembleStep, ...]
    parameters: Mapping[str, str]

    def config(self) -> str:
        """Its `config.pbtxt`."""
        return render(
            (
                ("name", self.name),
                ("platform", "ensemble"),
                ("version_policy", (("specific", (("versions", int(VERSION)),)),)),
                ("max_batch_size", self.maximum),
                *(("input", port.seen_by_clients()) for port in self.inputs),
                *(("output", port.seen_by_clients()) for port in self.outputs),
                ("ensemble_scheduling", tuple(("step", step.fields()) for step in self.steps)),
                *_parameters(self.parameters),
            )
        )


def _parameters(values: Mapping[str, str]) -> Fields:
    return map_field("parameters", {key: (("string_value", value),) for key, value in values.items()})


def map_field(field: str, values: Mapping[str, Value]) -> Fields:
    """A field of type `map`, sorted by key."""
    return tuple((field, (("key", key), ("value", values[key]))) for key in sorted(values))


def render(fields: Fields) -> str:
    """A message as text, ending with a newline unless it is empty."""
    return "".join(f"{line}\n" for line in _lines(fields, 0))


def _lines(fields: Fields, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, group in itertools.groupby(fields, key=lambda field: field[0]):
        values = [value for _, value in group]
        if len(values) > 1 and not any(isinstance(value, tuple) for value in values):
            yield f"{indent}{name}: [{', '.join(map(_scalar, values))}]"
            continue
        for value in values:
            if not isinstance(value, tuple):
                yield f"{indent}{name}: {_scalar(value)}"
            elif not value:
                yield f"{indent}{name} {{}}"
            else:
                yield f"{indent}{name} {{"
                yield from _lines(value, depth + 1)
                yield f"{indent}}}"


def _scalar(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | Symbol):
        return str(value)
    return f'"{"".join(map(_escaped, str(value).encode()))}"'


def _escaped(byte: int) -> str:
    plain = chr(byte)
    if plain in {'"', "\\"}:
        return f"\\{plain}"
    return plain if plain.isascii() and plain.isprintable() else f"\\{byte:03o}"

"""Inputs and outputs as Triton's model configuration declares them: without the batch.

Source: Triton Inference Server user guide, "Model Configuration", sections "Inputs and Outputs", "Datatypes"
and "Reshape". A tensor of one number per row has no dimension left without the batch; `dims` must not be
empty, so such a tensor is declared as ``[1]`` and reshaped to nothing, and clients send it as (rows, 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.engines.triton.text_format import Fields, Symbol
from loka_onnx.errors import BundleError

DATA_TYPES: Mapping[str, str] = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}
"""Triton's name of an element type, by NumPy's."""

OPEN = -1
"""Size of an axis that each request chooses."""


@dataclass(frozen=True)
class Port:
    """One input or output of a served model; `tensor` is its name in the bundle, None in a shape is open."""

    name: str
    tensor: str
    dtype: str
    row_shape: tuple[int | None, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """Shape without the batch as clients see it."""
        return tuple(OPEN if size is None else size for size in self.row_shape) or (1,)

    def declared(self) -> Fields:
        """Fields of `ModelInput` or `ModelOutput` of a model that a backend runs."""
        reshape: Fields = () if self.row_shape else (("reshape", ()),)
        return (*self.seen_by_clients(), *reshape)

    def seen_by_clients(self) -> Fields:
        """The same of an ensemble: its steps reshape, so it must not."""
        dims: Fields = tuple(("dims", size) for size in self.dims)
        # `dims` stays a list where it has one element: both forms are right, one is easier to read.
        return (("name", self.name), ("data_type", Symbol(DATA_TYPES[self.dtype])), *dims)


def ports_of(specs: tuple[TensorSpec, ...], names: Mapping[str, str] | None = None) -> tuple[Port, ...]:
    """Ports of tensors of a bundle, under the same names in Triton unless `names` has others.

    Raises:
        BundleError: A tensor has no batch, or an element type that Triton's protocol lacks.
    """
    return tuple(_port(spec, spec.name if names is None else names[spec.name]) for spec in specs)


def _port(spec: TensorSpec, name: str) -> Port:
    if not spec.shape or spec.shape[0] is not None:
        raise BundleError(
            f"Triton cannot batch requests of a model whose '{spec.name}' has no batch",
            evidence=f"its shape is {spec.shape}",
            remedy="export the model with a dynamic axis 0 on every input and output",
        )
    if spec.dtype not in DATA_TYPES:
        raise BundleError(
            f"Triton's protocol has no element type for '{spec.name}'",
            evidence=f"its type is {spec.dtype}; known are {', '.join(DATA_TYPES)}",
            remedy="cast it inside the model",
        )
    return Port(name, spec.name, spec.dtype, spec.shape[1:])

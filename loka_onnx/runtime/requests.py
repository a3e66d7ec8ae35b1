"""Requests: a fast check of their layout, arrays of other libraries, and answers in them.

A request may hold arrays of NumPy or of any library with DLPack. Arrays in host memory are read in place.
Arrays on a CUDA device stay there for an engine on that device, and are otherwise copied to the host.

The answer has the library and device of the request if all of its arrays share one known library (PyTorch,
CuPy) and one device; otherwise it is NumPy's. No library is imported here: the caller has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.manifest import BatchRange
from loka_onnx.errors import DataError
from loka_onnx.sessions import dlpack
from loka_onnx.sessions.dlpack import CPU, CUDA, ROCM, Borrowed, device_of
from loka_onnx.sessions.runner import Allocate

NUMPY, TORCH, CUPY = "numpy", "torch", "cupy"
NOT_PLAIN = -1


@dataclass(frozen=True)
class Kind:
    """Library and device of arrays."""

    library: str = NUMPY
    device_type: int = CPU
    device: int = 0

    @property
    def is_host(self) -> bool:
        """True if they are in host memory."""
        return self.device_type in {CPU, dlpack.CUDA_HOST}


HOST, TORCH_HOST = Kind(), Kind(TORCH)


def kind_of(value: Any) -> Kind:
    """Library and device of an array (`DataError` for no array); an unknown library counts as NumPy."""
    if isinstance(value, np.ndarray):
        return HOST
    roots = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    library = next((name for name in (TORCH, CUPY) if name in roots), NUMPY)
    return Kind(library, *device_of(value))


def common_kind(kinds: Collection[Kind]) -> Kind:
    """Kind of the answer to a request with arrays of these kinds."""
    kind = next(iter(kinds), HOST)
    return kind if kind.library != NUMPY and all(each == kind for each in kinds) else HOST


def plain_tensors(inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]] | None:
    """View PyTorch host tensors as arrays, ten times as fast as `to_host`; None for others."""
    torch = sys.modules.get(TORCH)
    if torch is None:
        return None
    kind, arrays = getattr(torch, "Tensor", None), {}
    try:
        for name, value in inputs.items():
            if type(value) is not kind or not value.is_cpu:
                return None
            arrays[name] = value.numpy()
    except (TypeError, RuntimeError):
        return None
    return arrays


def to_host(value: Any, kind: Kind) -> npt.NDArray[Any]:
    """View an array in host memory, or copy one from elsewhere; `DataError` if it cannot be read."""
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(
            "E1301 an array is masked",
            evidence="the model has no masks: it would take what lies beneath",
            remedy="send `array.filled(…)`",
        )
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if kind.is_host:
        return dlpack.on_host(value)
    # The array's own library copies it, on a stream of its choice.
    if kind.library == TORCH:
        return dlpack.on_host(value.cpu())
    if kind.library == CUPY:
        return np.asarray(value.get())
    raise DataError(
        f"E1302 a {type(value).__name__} lies on a device that nothing here reads",
        evidence=f"device type {kind.device_type} of DLPack, number {kind.device}",
        remedy="copy it to the host first",
    )


def to_kind(array: npt.NDArray[Any], kind: Kind) -> Any:
    """Convert an answer to a kind, sharing memory on the host."""
    if kind.library == TORCH:
        torch = sys.modules[TORCH]
        tensor = _torch_view(torch, array if array.flags.writeable else array.copy())
        is_gpu = kind.device_type in {CUDA, ROCM}
        return tensor.to(torch.device("cuda", kind.device)) if is_gpu else tensor
    if kind.library == CUPY:
        cupy = sys.modules[CUPY]
        with cupy.cuda.Device(kind.device):
            return cupy.asarray(array)
    return array


def allocator(kind: Kind, stream: int) -> Allocate:
    """Return a function that makes empty arrays on the GPU `kind.device`, by PyTorch or CuPy. Their memory
    may be read by work that the library queued: `stream` waits for it, so write them on that stream.
    """
    library = sys.modules[kind.library]

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Borrowed:
        if kind.library == TORCH:
            output = library.empty(shape, dtype=getattr(library, dtype.name), device=f"cuda:{kind.device}")
        else:
            with library.cuda.Device(kind.device):
                output = library.empty(shape, dtype=dtype)
        return dlpack.borrow(output, stream)

    return allocate


def _torch_view(torch: Any, array: npt.NDArray[Any]) -> Any:
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    # NumPy exports only its own types: BF16 is passed as integers.
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))


class RequestSpec:
    """Inputs of a request, prepared for comparison; `whose` names their owner in messages."""

    def __init__(self, specs: Sequence[TensorSpec], batch: BatchRange, whose: str) -> None:
        self._specs, self._batch, self._whose = tuple(specs), batch, whose
        # A tail without a dynamic axis is compared at once, others axis by axis in `rows_of`.
        self._names = {spec.name for spec in specs}
        self._tails = tuple({tuple(spec.shape[1:]) for spec in specs})
        self._quick = tuple(
            (spec.name, np.dtype(spec.dtype), self._tails.index(tuple(spec.shape[1:]))) for spec in specs
        )
        self._is_quick = bool(specs) and all(
            spec.shape and spec.shape[0] is None and None not in spec.shape[1:] for spec in specs
        )

    def plain_rows(self, inputs: Mapping[str, Any]) -> int:
        """Rows of a valid request of NumPy arrays; `NOT_PLAIN` where it needs the full check."""
        try:
            if not self._is_quick or len(inputs) != len(self._quick):
                return NOT_PLAIN
            first = inputs[self._quick[0][0]]
            if type(first) is not np.ndarray:
                return NOT_PLAIN
            rows: int = first.shape[0]
            shapes = [(rows, *tail) for tail in self._tails]
            for name, dtype, tail in self._quick:
                value = inputs[name]
                if type(value) is not np.ndarray or value.shape != shapes[tail]:
                    return NOT_PLAIN
                # The identity of a built-in type is compared four times as fast as its value.
                if value.dtype is not dtype and value.dtype != dtype:
                    return NOT_PLAIN
        except (KeyError, TypeError, IndexError):
            # An input is missing, or this is no mapping.
            return NOT_PLAIN
        return rows if self._batch.min <= rows <= self._batch.max else NOT_PLAIN

    def check_names(self, inputs: Mapping[str, Any]) -> None:
        """Check that a request is a mapping with exactly the inputs."""
        names = self._names
        if not isinstance(inputs, Mapping):
            raise DataError(
                "E1314 a request is a mapping of names to arrays",
                evidence=f"this is a {type(inputs).__name__}",
                remedy=f"send {{'{min(names, default='name')}': array, …}}",
            )
        if inputs.keys() != names:
            raise DataError(
                f"E1315 the request does not hold the {self._whose}'s inputs",
                evidence=f"missing {sorted(names - set(inputs))}, unknown {sorted(set(inputs) - names)}",
                remedy=f"send {', '.join(sorted(names))}",
            )

    def rows_of(self, inputs: Mapping[str, Any]) -> int:
        """Rows of a valid request of arrays with NumPy's ``dtype`` and ``shape``; `DataError` for another."""
        self.check_names(inputs)
        rows = {spec.name: _rows(inputs[spec.name], spec) for spec in self._specs}
        if len(set(rows.values())) != 1 or not self._batch.min <= min(rows.values()) <= self._batch.max:
            raise DataError(
                "E1316 the request is not a batch that the engine was built for",
                evidence=f"rows {rows}, batches of {self._batch.min} to {self._batch.max}",
                remedy="send equally many rows of every input, and split larger requests",
            )
        return min(rows.values())


def repeated(value: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Return `rows` rows of an array, repeated as often as needed."""
    return value[np.arange(rows) % len(value)]


def typed(arrays: Mapping[str, npt.NDArray[Any]], specs: Sequence[TensorSpec]) -> dict[str, npt.NDArray[Any]]:
    """Restore the type of BF16 arrays of a sample, which an npz stores as raw bytes."""
    restored = {}
    for spec in specs:
        value, dtype = arrays[spec.name], np.dtype(spec.dtype)
        is_raw = value.dtype.kind == "V" and value.dtype.itemsize == dtype.itemsize
        restored[spec.name] = value.view(dtype) if is_raw else value
    return restored


def _rows(value: Any, spec: TensorSpec) -> int:
    fits = (
        value.dtype == np.dtype(spec.dtype)
        and len(value.shape) == len(spec.shape)
        and len(value.shape) > 0
        and all(want in {None, got} for want, got in zip(spec.shape, value.shape, strict=True))
    )
    if not fits:
        raise DataError(
            f"E1317 input '{spec.name}' has another type or shape",
            evidence=f"{value.dtype}{tuple(value.shape)}, the model takes {spec.dtype}{spec.shape}",
            remedy="None is the batch or another dynamic dimension; convert the array",
        )
    return int(value.shape[0])

"""Requests with arrays of other libraries, and answers in them.

A request may hold arrays of NumPy or of any library with DLPack. Arrays in host memory are read in place.
Arrays on a CUDA device stay there for an engine on that device, and are otherwise copied to the host.

The answer has the library and device of the request if all of its arrays share one known library (PyTorch,
CuPy) and one device; otherwise it is NumPy's. No library is imported here: the maker of a request's arrays
has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.errors import DataError
from loka_onnx.sessions import dlpack
from loka_onnx.sessions.dlpack import CPU, CUDA, ROCM, Borrowed, device_of
from loka_onnx.sessions.runner import Allocate

NUMPY, TORCH, CUPY = "numpy", "torch", "cupy"


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
    """Return a NumPy view of an array in host memory, or a copy of one elsewhere; `DataError` if it cannot be
    read.
    """
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


def from_host(array: npt.NDArray[Any], kind: Kind) -> Any:
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
    """Return a function that makes outputs on the request's device, by its library (not NumPy).

    Queued work of the library may still read recycled memory; because it is borrowed for `stream`, it is
    written later.
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

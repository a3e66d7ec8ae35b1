"""Requests in arrays of other libraries, and answers in theirs.

A request may hold arrays of NumPy, or anything that speaks DLPack. What lies in the host's memory is read
where it is, whoever made it. What lies on a CUDA device stays there for an engine that computes on that
device, and is copied to the host for one that does not.

Answers are of the library and on the device of the request, where all of its arrays are of one library
that is known here (PyTorch, CuPy) and lie on one device; otherwise they are of NumPy. No library is imported
here: one whose arrays are in a request has been imported by whoever made them.
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
    """Of which library arrays are, and where they lie.

    Attributes:
        library: Name of its module.
        device_type: As DLPack numbers it.
        device: Number of the device.
    """

    library: str = NUMPY
    device_type: int = CPU
    device: int = 0

    @property
    def is_host(self) -> bool:
        """Whether they lie in the host's memory."""
        return self.device_type in {CPU, dlpack.CUDA_HOST}


HOST, TORCH_HOST = Kind(), Kind(TORCH)


def kind_of(value: Any) -> Kind:
    """Library and device of an array; of a library that is not known here, that of NumPy.

    Raises:
        DataError: It is no array.
    """
    if isinstance(value, np.ndarray):
        return HOST
    roots = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    library = next((name for name in (TORCH, CUPY) if name in roots), NUMPY)
    return Kind(library, *device_of(value))


def common_kind(kinds: Collection[Kind]) -> Kind:
    """The kind of the answer to a request of arrays of these kinds."""
    kind = next(iter(kinds), HOST)
    return kind if kind.library != NUMPY and all(each == kind for each in kinds) else HOST


def plain_tensors(inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]] | None:
    """A request of tensors of PyTorch in the host's memory as arrays of the same memory.

    What `to_host` gives by DLPack, for a tenth of the time: a request may hold a tensor for each column.

    Returns:
        None where something of it is anything else, BF16 for example.
    """
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
    """An array as one of NumPy: a view where it lies in the host's memory, a copy of what lies elsewhere.

    Args:
        value: The array.
        kind: Its kind.

    Raises:
        DataError: It cannot be read.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(
            "an array is masked",
            evidence="the model has no masks: it would take what lies beneath",
            remedy="send `array.filled(…)`",
        )
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if kind.is_host:
        return dlpack.on_host(value)
    # The library that made it copies it, on a stream of its own choice.
    if kind.library == TORCH:
        return dlpack.on_host(value.cpu())
    if kind.library == CUPY:
        return np.asarray(value.get())
    raise DataError(
        f"a {type(value).__name__} lies on a device that nothing here reads",
        evidence=f"device type {kind.device_type} of DLPack, number {kind.device}",
        remedy="copy it to the host first",
    )


def from_host(array: npt.NDArray[Any], kind: Kind) -> Any:
    """An answer as an array of a kind; the same memory where the kind is in the host's."""
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
    """Makes outputs on the device of a request, by its library.

    Memory that a library hands out may still be read by what it has queued; being borrowed for `stream`, it
    is written after that.

    Args:
        kind: Of the answer; not of NumPy.
        stream: CUDA stream that writes the outputs.
    """
    library = sys.modules[kind.library]

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Borrowed:
        if kind.library == TORCH:
            made = library.empty(shape, dtype=getattr(library, dtype.name), device=f"cuda:{kind.device}")
        else:
            with library.cuda.Device(kind.device):
                made = library.empty(shape, dtype=dtype)
        return dlpack.borrow(made, stream)

    return allocate


def _torch_view(torch: Any, array: npt.NDArray[Any]) -> Any:
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    # NumPy exports no type that is not its own: BF16 goes as the integers of its bits.
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))

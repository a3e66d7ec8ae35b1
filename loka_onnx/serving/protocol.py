"""Requests and answers of the open inference protocol v2, apart from HTTP.

A request is a JSON object, and with the binary extension the bytes of its tensors behind it, in the order in
which the object lists them::

    {"id": "42", "inputs": [{"name": "dense", "shape": [2, 3], "datatype": "FP32",
                             "parameters": {"binary_data_size": 24}}],
     "outputs": [{"name": "ctr", "parameters": {"binary_data": true}}]}<24 bytes>

Parameters that we do not know are ignored, as the protocol has it. Those that would change what the answer is
(shared memory, classification) are refused: ignoring them would answer another question.

Sources: kserve/open-inference-protocol, `specification/protocol/inference_rest.md`;
triton-inference-server/server, `docs/protocol/extension_binary_data.md`: bytes are little-endian, row-major,
without padding, and a BOOL is a byte of 0 or 1.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.errors import ConfigError, DataError
from loka_onnx.sessions.runner import Arrays

_SIZE, _BINARY, _ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"
_REFUSED = ("shared_memory_region", "classification")

MAX_CONTAINERS = 1 << 20
"""Most arrays and objects of one request. They take up to 24 times their text in memory, anything else in
JSON up to 12 (measured on CPython 3.11); rows of a tensor are far fewer."""

MAX_ID = 1024
"""Most characters of a request's id, which goes back with the answer."""

MAX_ELEMENTS = 1 << 48
"""Most elements of a tensor, a size of 0 counted as 1: NumPy cannot have `[0, 2**62]`, though it is empty."""

_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_TYPES: dict[str, np.dtype[Any]] = {
    name.upper().replace("FLOAT", "FP"): np.dtype(name)
    for name in ("bool", *_INTEGERS, "float16", "float32", "float64")
} | {"BF16": np.dtype(ml_dtypes.bfloat16)}
"""NumPy's types by their names in the protocol."""
_NAMES = {dtype.name: name for name, dtype in _TYPES.items()}
_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}
_JSON_TYPES: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,)}
"""Types of JSON elements by kind of the array; both kinds of number where none is listed."""


@dataclass(frozen=True)
class Card:
    """The model that is served; `platform` is the backend and file format of its engine. Raises ConfigError
    if the protocol cannot carry an input or output.
    """

    name: str
    version: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        for spec in (*self.inputs, *self.outputs):
            _datatype_of(spec)

    def metadata(self) -> dict[str, Any]:
        """Return the model metadata object of the protocol."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": self.platform,
            "inputs": [_metadata(spec) for spec in self.inputs],
            "outputs": [_metadata(spec) for spec in self.outputs],
        }


@dataclass(frozen=True)
class InferRequest:
    """A request that was read; `outputs` are to be sent in this order, as bytes where True, else in JSON."""

    id: str | None
    inputs: Arrays
    outputs: dict[str, bool]


def read_request(body: bytes | bytearray, header_length: int | None, card: Card) -> InferRequest:
    """Read a request with so many bytes of JSON, None for all; check all but the number of rows."""
    if header_length is not None and header_length > len(body):
        raise DataError(
            "E1401 Inference-Header-Content-Length is larger than the body",
            evidence=f"{header_length} bytes of JSON, the body has {len(body)}",
        )
    view = memoryview(body)
    split = len(body) if header_length is None else header_length
    try:
        document = _expected(_parsed(view[:split]), dict, "the request")
        return InferRequest(_id(document), _inputs(document, view[split:], card), _outputs(document, card))
    except RecursionError:
        raise DataError("E1402 the JSON is nested too deeply") from None


def write_answer(
    request: InferRequest, values: Mapping[str, npt.NDArray[Any]], card: Card
) -> tuple[bytes, int | None]:
    """Write the answer to a request, of one array per output; `DataError` for NaN or infinity in JSON.
    Returns JSON with the bytes of tensors behind it, and the length of the JSON, None where it is all.
    """
    specs = {spec.name: spec for spec in card.outputs}
    outputs: list[dict[str, Any]] = []
    payload: list[bytes] = []
    for name, is_binary in request.outputs.items():
        value = values[name]
        output = {"name": name, "datatype": _datatype_of(specs[name]), "shape": list(value.shape)}
        if is_binary:
            payload.append(_to_bytes(value))
            outputs.append({**output, "parameters": {_SIZE: len(payload[-1])}})
        else:
            outputs.append({**output, "data": _to_json(value, name)})
    document: dict[str, Any] = {"model_name": card.name, "model_version": card.version, "outputs": outputs}
    if request.id is not None:
        document["id"] = request.id
    header = to_text(document)
    return b"".join([header, *payload]), len(header) if payload else None


def to_text(document: Any) -> bytes:
    """Return JSON in ASCII: a lone surrogate that came in as an escape goes out as one."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii")


def _metadata(spec: TensorSpec) -> dict[str, Any]:
    shape = [-1 if size is None else size for size in spec.shape]
    return {"name": spec.name, "datatype": _datatype_of(spec), "shape": shape}


def _parsed(raw: memoryview) -> Any:
    try:
        text = str(raw, "utf-8")
        if text.count("[") + text.count("{") > MAX_CONTAINERS:
            raise ValueError(
                f"it has more than {MAX_CONTAINERS} arrays and objects; send tensors flat, or as bytes"
            )
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        # Bytes that are not UTF-8, text that is not JSON, and integers of thousands of digits.
        raise DataError("E1403 the request cannot be read as JSON", evidence=str(error)) from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; send it as binary data")


def _id(document: Mapping[str, Any]) -> str | None:
    value = document.get("id")
    if value is not None and len(_expected(value, str, "`id`")) > MAX_ID:
        evidence = f"{len(value)} characters, at most {MAX_ID} are taken"
        raise DataError("E1404 `id` is too long", evidence=evidence)
    return value


def _inputs(document: Mapping[str, Any], payload: memoryview, card: Card) -> Arrays:
    specs = {spec.name: spec for spec in card.inputs}
    inputs: Arrays = {}
    start = 0
    for tensor in _objects(document, "inputs"):
        name = _name(tensor, specs, "input")
        if name in inputs:
            raise DataError(f"E1405 input '{name}' is there twice")
        try:
            shape = _shape(tensor, specs[name])
            size = _binary_size(tensor, shape, specs[name])
            if size is None:
                inputs[name] = _from_json(tensor.get("data"), _datatype_of(specs[name]), shape)
                continue
            if start + size > len(payload):
                raise DataError(
                    "E1406 the body ends before its data",
                    evidence=f"it needs {start + size} bytes behind the JSON, there are {len(payload)}",
                    remedy="give the length of the JSON in Inference-Header-Content-Length",
                )
            inputs[name] = _from_bytes(payload[start : start + size], _datatype_of(specs[name]), shape)
            start += size
        except DataError as error:
            error.restate(where=f"input '{name}'")
            raise
    if start != len(payload):
        raise DataError(
            "E1407 the body goes on behind its last tensor",
            evidence=f"tensors take {start} bytes behind the JSON, there are {len(payload)}",
            remedy=f"give `{_SIZE}` for each input that is sent as bytes",
        )
    missing = [spec.name for spec in card.inputs if spec.name not in inputs]
    if missing:
        raise DataError("E1408 inputs are missing", evidence=", ".join(missing))
    return inputs


def _shape(tensor: Mapping[str, Any], spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a tensor after checking that shape and type fit the model."""
    wanted, datatype = _datatype_of(spec), tensor.get("datatype")
    if datatype != wanted:
        evidence = f"{reprlib.repr(datatype)}, the model takes {wanted}"
        raise DataError("E1409 it has another datatype", evidence=evidence)
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise DataError("E1410 `shape` is no array of sizes", evidence=f"it is {reprlib.repr(shape)}")
    fits = len(shape) == len(spec.shape) and all(
        want in {None, got} for want, got in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        raise DataError(
            "E1411 it has another shape",
            evidence=f"{reprlib.repr(shape)}, the model takes {_metadata(spec)['shape']} (-1 is any size)",
        )
    if math.prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise DataError("E1412 `shape` is too large", evidence=f"it is {reprlib.repr(shape)}")
    return tuple(shape)


def _binary_size(tensor: Mapping[str, Any], shape: tuple[int, ...], spec: TensorSpec) -> int | None:
    """Return the bytes of a tensor behind the JSON; None where it is in the JSON."""
    size = _parameters(tensor).get(_SIZE)
    if size is None:
        if "data" not in tensor:
            raise DataError("E1413 it has no data", remedy=f"send `data`, or `{_SIZE}` and the bytes")
        return None
    needed = math.prod(shape) * _TYPES[_datatype_of(spec)].itemsize
    if type(size) is not int or size != needed:
        raise DataError(
            f"E1414 `{_SIZE}` does not fit the shape",
            evidence=f"it is {reprlib.repr(size)}, the shape {list(shape)} takes {needed} bytes",
        )
    if "data" in tensor:
        raise DataError(f"E1415 it has both `data` and `{_SIZE}`", remedy="send one of them")
    return size


def _outputs(document: Mapping[str, Any], card: Card) -> dict[str, bool]:
    default = _flag(_parameters(document), _ALL_BINARY, False)
    specs = {spec.name: spec for spec in card.outputs}
    outputs: dict[str, bool] = {}
    for output in _objects(document, "outputs") if document.get("outputs") is not None else ():
        name = _name(output, specs, "output")
        if name in outputs:
            raise DataError(f"E1416 output '{name}' is asked for twice")
        outputs[name] = _flag(_parameters(output), _BINARY, default)
    return outputs or dict.fromkeys(specs, default)


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(_expected(parameters.get(name, default), bool, f"`{name}`"))


def _name(tensor: Mapping[str, Any], known: Iterable[str], kind: str) -> str:
    name, evidence = tensor.get("name"), f"it has {', '.join(known)}"
    if not isinstance(name, str) or name not in known:
        raise DataError(f"E1417 the model has no {kind} {reprlib.repr(name)}", evidence=evidence)
    return name


def _parameters(owner: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = _expected(owner.get("parameters", {}), dict, "`parameters`")
    for name in _REFUSED:
        if name in parameters:
            raise DataError(f"E1418 this server does not do `{name}`", remedy="leave the parameter out")
    return parameters


def _objects(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    items = _expected(document.get(key), list, f"`{key}`")
    return [_expected(item, dict, f"an element of `{key}`") for item in items]


def _expected(value: Any, kind: type[Any], what: str) -> Any:
    if not isinstance(value, kind):
        raise DataError(f"E1419 {what} is not {_KINDS[kind]}", evidence=f"it is {reprlib.repr(value)}")
    return value


def _datatype_of(spec: TensorSpec) -> str:
    """Return the name of a tensor's type in the protocol, ``FP32`` for example."""
    try:
        return _NAMES[spec.dtype]
    except KeyError:
        raise ConfigError(
            f"E1420 the open inference protocol cannot carry '{spec.name}'",
            evidence=f"its type is {spec.dtype}, the protocol has {', '.join(_TYPES)}",
            remedy="call the bundle through `loka_onnx.load`",
        ) from None


def _from_bytes(raw: memoryview, datatype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a tensor of the binary extension; a copy, because its bytes in a request are not aligned."""
    dtype = _TYPES[datatype]
    stored = np.frombuffer(raw, f"<u{dtype.itemsize}").astype(f"=u{dtype.itemsize}")
    if dtype == np.bool_ and stored.size and stored.max() > 1:
        raise DataError("E1421 a BOOL is a byte of 0 or 1", evidence=f"a byte is {stored.max()}")
    return stored.view(dtype).reshape(shape)


def _to_bytes(value: npt.NDArray[Any]) -> bytes:
    size = value.dtype.itemsize
    return np.ascontiguousarray(value).view(f"=u{size}").astype(f"<u{size}", copy=False).tobytes()


def _from_json(data: Any, datatype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a tensor of a JSON array, flat or nested as its shape."""
    if datatype == "BF16":
        raise DataError("E1422 JSON cannot hold BF16 exactly", remedy="send it as binary data")
    array = np.array(_expected(data, list, "`data`"), object)
    if array.shape not in {shape, (math.prod(shape),)}:
        evidence = f"it has the shape {list(array.shape)}, which is neither {list(shape)} nor flat"
        raise DataError("E1425 `data` does not fill the shape", evidence=evidence)
    elements: list[Any] = array.ravel().tolist()
    dtype = _TYPES[datatype]
    allowed = _JSON_TYPES.get(dtype.kind, (int, float))
    # By their types, because a bool is an int to isinstance.
    wrong = {type(element) for element in elements} - set(allowed)
    if wrong:
        element = next(e for e in elements if type(e) in wrong)
        raise DataError(f"E1423 an element is no {datatype}", evidence=f"it is {reprlib.repr(element)}")
    if dtype.kind in "iu" and elements:
        # NumPy 1 wraps around instead.
        limits = np.iinfo(dtype)
        for element in (min(elements), max(elements)):
            if not limits.min <= element <= limits.max:
                raise _too_large(datatype, f"it is {reprlib.repr(element)}")
    try:
        with np.errstate(over="ignore"):
            value = np.array(elements, dtype)
    except OverflowError as error:
        raise _too_large(datatype, str(error)) from error
    if dtype.kind == "f" and not np.isfinite(value).all():
        raise _too_large(datatype, "it would become infinite")
    return value.reshape(shape)


def _to_json(value: npt.NDArray[Any], name: str) -> list[Any]:
    """Return the elements of a tensor for JSON, flat; they read back as the same bits."""
    # ml_dtypes gives its own scalars; every BF16 is an FP32.
    plain = value.astype(np.float32) if value.dtype == _TYPES["BF16"] else value
    if plain.dtype.kind == "f" and not np.isfinite(plain).all():
        count = int((~np.isfinite(plain)).sum())
        raise DataError(
            f"E1424 JSON cannot hold output '{name}'",
            evidence=f"{count} of its {plain.size} elements are NaN or infinite",
            remedy="ask for it as binary data: `binary_data` of the output, or `binary_data_output`",
        )
    elements: list[Any] = plain.ravel().tolist()
    return elements


def _too_large(datatype: str, evidence: str) -> DataError:
    return DataError(f"E1426 an element is too large for {datatype}", evidence=evidence)

"""Requests and answers of the open inference protocol v2, apart from HTTP.

A request is a JSON object, and with the binary extension the bytes of its tensors behind it, in the order in
which the object lists them::

    {"id": "42", "inputs": [{"name": "dense", "shape": [2, 3], "datatype": "FP32",
                             "parameters": {"binary_data_size": 24}}],
     "outputs": [{"name": "ctr", "parameters": {"binary_data": true}}]}<24 bytes>

Parameters that we do not know are ignored, as the protocol has it. Those that would change what the answer is
(shared memory, classification) are refused: ignoring them would answer another question.

Sources: kserve/open-inference-protocol, `specification/protocol/inference_rest.md`;
triton-inference-server/server, `docs/protocol/extension_binary_data.md`.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.errors import DataError
from loka_onnx.serving.tensors import datatype_of, from_bytes, from_json, item_bytes, to_bytes, to_json
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


@dataclass(frozen=True)
class Card:
    """The model that is served; `platform` is the backend and file format of its engine.

    Raises:
        ConfigError: The protocol cannot carry an input or output.
    """

    name: str
    version: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        for spec in (*self.inputs, *self.outputs):
            datatype_of(spec)

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
    """A request that was read.

    Attributes:
        id: Returned with the answer where it is not None.
        outputs: Outputs to be sent, in this order; whether each is sent as bytes, not in JSON.
    """

    id: str | None
    inputs: Arrays
    outputs: dict[str, bool]


class InferAnswer(NamedTuple):
    """JSON with the bytes of tensors behind it; the length of the JSON, None where nothing is behind it."""

    body: bytes
    header_length: int | None


def read_request(body: bytes | bytearray, header_length: int | None, card: Card) -> InferRequest:
    """Read a request of `header_length` bytes of JSON, None for all; check all of it but the number of rows.

    Raises:
        DataError: It is not a request of the protocol, or not one that this model answers.
    """
    if header_length is not None and header_length > len(body):
        raise DataError(
            "Inference-Header-Content-Length is larger than the body",
            evidence=f"{header_length} bytes of JSON, the body has {len(body)}",
        )
    view = memoryview(body)
    split = len(body) if header_length is None else header_length
    try:
        document = _object(_parsed(view[:split]), "the request")
        return InferRequest(_id(document), _inputs(document, view[split:], card), _outputs(document, card))
    except RecursionError:
        raise DataError("the JSON is nested too deeply") from None


def write_answer(request: InferRequest, values: Mapping[str, npt.NDArray[Any]], card: Card) -> InferAnswer:
    """Write the answer to a request, of one array per output of the model.

    Raises:
        DataError: An output that is wanted in JSON holds NaN or infinity.
    """
    specs = {spec.name: spec for spec in card.outputs}
    outputs: list[dict[str, Any]] = []
    payload: list[bytes] = []
    for name, is_binary in request.outputs.items():
        value = values[name]
        output: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(specs[name]),
            "shape": list(value.shape),
        }
        if is_binary:
            payload.append(to_bytes(value))
            output["parameters"] = {_SIZE: len(payload[-1])}
        else:
            output["data"] = to_json(value, name)
        outputs.append(output)
    document: dict[str, Any] = {"model_name": card.name, "model_version": card.version, "outputs": outputs}
    if request.id is not None:
        document["id"] = request.id
    header = to_text(document)
    return InferAnswer(b"".join([header, *payload]), len(header) if payload else None)


def to_text(document: Any) -> bytes:
    """Return JSON in ASCII: a lone surrogate that came in as an escape goes out as one."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii")


def _metadata(spec: TensorSpec) -> dict[str, Any]:
    shape = [-1 if size is None else size for size in spec.shape]
    return {"name": spec.name, "datatype": datatype_of(spec), "shape": shape}


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
        raise DataError("the request cannot be read as JSON", evidence=str(error)) from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; send it as binary data")


def _id(document: Mapping[str, Any]) -> str | None:
    found = document.get("id")
    if found is not None and not isinstance(found, str):
        raise DataError("`id` is not a string", evidence=f"it is {reprlib.repr(found)}")
    if found is not None and len(found) > MAX_ID:
        raise DataError("`id` is too long", evidence=f"{len(found)} characters, at most {MAX_ID} are taken")
    return found


def _inputs(document: Mapping[str, Any], payload: memoryview, card: Card) -> Arrays:
    specs = {spec.name: spec for spec in card.inputs}
    found: Arrays = {}
    start = 0
    for tensor in _objects(document, "inputs"):
        name = _name(tensor, specs, "input")
        if name in found:
            raise DataError(f"input '{name}' is there twice")
        try:
            shape = _shape(tensor, specs[name])
            size = _binary_size(tensor, shape, specs[name])
            if size is None:
                found[name] = from_json(tensor.get("data"), datatype_of(specs[name]), shape)
                continue
            if start + size > len(payload):
                raise DataError(
                    "the body ends before its data",
                    evidence=f"it needs {start + size} bytes behind the JSON, there are {len(payload)}",
                    remedy="give the length of the JSON in Inference-Header-Content-Length",
                )
            found[name] = from_bytes(payload[start : start + size], datatype_of(specs[name]), shape)
            start += size
        except DataError as error:
            where = f"input '{name}'"
            raise DataError(error.what, where=where, evidence=error.evidence, remedy=error.remedy) from error
    if start != len(payload):
        raise DataError(
            "the body goes on behind its last tensor",
            evidence=f"tensors take {start} bytes behind the JSON, there are {len(payload)}",
            remedy=f"give `{_SIZE}` for each input that is sent as bytes",
        )
    missing = [spec.name for spec in card.inputs if spec.name not in found]
    if missing:
        raise DataError("inputs are missing", evidence=", ".join(missing))
    return found


def _shape(tensor: Mapping[str, Any], spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a tensor after checking that shape and type fit the model."""
    wanted, datatype = datatype_of(spec), tensor.get("datatype")
    if datatype != wanted:
        raise DataError(
            "it has another datatype", evidence=f"{reprlib.repr(datatype)}, the model takes {wanted}"
        )
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise DataError("`shape` is no array of sizes", evidence=f"it is {reprlib.repr(shape)}")
    fits = len(shape) == len(spec.shape) and all(
        want in {None, got} for want, got in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        raise DataError(
            "it has another shape",
            evidence=f"{reprlib.repr(shape)}, the model takes {_metadata(spec)['shape']} (-1 is any size)",
        )
    if math.prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise DataError("`shape` is too large", evidence=f"it is {reprlib.repr(shape)}")
    return tuple(shape)


def _binary_size(tensor: Mapping[str, Any], shape: tuple[int, ...], spec: TensorSpec) -> int | None:
    """Return the bytes of a tensor behind the JSON; None where it is in the JSON."""
    size = _parameters(tensor).get(_SIZE)
    if size is None:
        if "data" not in tensor:
            raise DataError("it has no data", remedy=f"send `data`, or `{_SIZE}` and the bytes")
        return None
    needed = math.prod(shape) * item_bytes(datatype_of(spec))
    if type(size) is not int or size != needed:
        raise DataError(
            f"`{_SIZE}` does not fit the shape",
            evidence=f"it is {reprlib.repr(size)}, the shape {list(shape)} takes {needed} bytes",
        )
    if "data" in tensor:
        raise DataError(f"it has both `data` and `{_SIZE}`", remedy="send one of them")
    return size


def _outputs(document: Mapping[str, Any], card: Card) -> dict[str, bool]:
    default = _flag(_parameters(document), _ALL_BINARY, False)
    specs = {spec.name: spec for spec in card.outputs}
    found: dict[str, bool] = {}
    for output in _objects(document, "outputs") if document.get("outputs") is not None else ():
        name = _name(output, specs, "output")
        if name in found:
            raise DataError(f"output '{name}' is asked for twice")
        found[name] = _flag(_parameters(output), _BINARY, default)
    return found or dict.fromkeys(specs, default)


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    found = parameters.get(name, default)
    if not isinstance(found, bool):
        raise DataError(f"`{name}` is neither true nor false", evidence=f"it is {reprlib.repr(found)}")
    return found


def _name(tensor: Mapping[str, Any], known: Iterable[str], kind: str) -> str:
    name = tensor.get("name")
    if not isinstance(name, str) or name not in known:
        raise DataError(
            f"the model has no {kind} {reprlib.repr(name)}", evidence=f"it has {', '.join(known)}"
        )
    return name


def _parameters(owner: Mapping[str, Any]) -> Mapping[str, Any]:
    found = _object(owner.get("parameters", {}), "`parameters`")
    for name in _REFUSED:
        if name in found:
            raise DataError(f"this server does not do `{name}`", remedy="leave the parameter out")
    return found


def _objects(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = document.get(key)
    if not isinstance(found, list):
        raise DataError(f"`{key}` is not an array", evidence=f"it is {reprlib.repr(found)}")
    return [_object(item, f"an element of `{key}`") for item in found]


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{what} is not an object", evidence=f"it is {reprlib.repr(value)}")
    return value

"""Requests and answers against `tritonclient`, which is not ours, and against what is no request."""

import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as tritonclient
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.errors import ConfigError, DataError
from loka_onnx.serving.protocol import Card, InferRequest, read_request, write_answer

NAMES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign}INT{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{"float16": "FP16", "float32": "FP32", "float64": "FP64", "bfloat16": "BF16"},
}
DTYPES = tuple(NAMES)


def card(*specs: TensorSpec) -> Card:
    specs = specs or (TensorSpec("dense", "float32", (None, 3)),)
    return Card("ranker", "1", "onnxruntime_onnx", specs, (TensorSpec("ctr", "float32", (None, 1)),))


def arrays(dtype: str) -> st.SearchStrategy[np.ndarray]:
    """Arrays of any bit patterns, NaN and infinity among them."""
    if dtype == "bool":
        return hnp.arrays(np.bool_, st.tuples(st.integers(0, 5), st.just(3)))
    size = np.dtype(dtype).itemsize
    return hnp.arrays(f"u{size}", st.tuples(st.integers(0, 5), st.just(3))).map(lambda a: a.view(dtype))


def same(got: np.ndarray, expected: np.ndarray) -> bool:
    return (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_what_the_client_sends_as_bytes_arrives(dtype, data):
    value, other = data.draw(arrays(dtype)), data.draw(arrays("uint8"))
    inputs = []
    for name, array, kind in (("a", other, "UINT8"), ("b", value, NAMES[dtype])):
        tensor = tritonclient.InferInput(name, list(array.shape), kind)
        inputs.append(tensor.set_data_from_numpy(array))
    body, length = tritonclient.InferenceServerClient.generate_request_body(inputs, request_id="42")
    model = card(TensorSpec("b", dtype, (None, 3)), TensorSpec("a", "uint8", (None, 3)))
    request = read_request(body, length, model)
    assert request.id == "42"
    assert request.outputs == {"ctr": True}
    assert same(request.inputs["b"], value) and same(request.inputs["a"], other)
    assert request.inputs["b"].flags.aligned and request.inputs["b"].flags.writeable


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
@given(data=st.data())
def test_what_the_client_sends_as_json_arrives(dtype, data):
    value = data.draw(arrays(dtype))
    if np.dtype(dtype).kind == "f":
        value = np.where(np.isfinite(value), value, np.dtype(dtype).type(0.1))
    tensor = tritonclient.InferInput("a", list(value.shape), NAMES[dtype])
    tensor.set_data_from_numpy(value, binary_data=False)
    body, length = tritonclient.InferenceServerClient.generate_request_body(
        [tensor], outputs=[tritonclient.InferRequestedOutput("ctr", binary_data=False)]
    )
    assert length is None
    request = read_request(body, length, card(TensorSpec("a", dtype, (None, 3))))
    assert same(request.inputs["a"], value)
    assert request.outputs == {"ctr": False}


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data(), binary=st.booleans())
def test_the_client_reads_our_answers(dtype, data, binary):
    value = data.draw(arrays(dtype))
    if not binary and np.dtype(dtype).kind in "fV":
        value = np.where(np.isfinite(value), value, np.zeros_like(value))
    first, second = TensorSpec("first", dtype, (None, 3)), TensorSpec("second", "int8", (None,))
    model = Card("m", "1", "p", (), (first, second))
    request = InferRequest("x", {}, {"second": True, "first": binary})
    small = np.arange(3, dtype=np.int8)
    answer, length = write_answer(request, {"first": value, "second": small}, model)
    read = tritonclient.InferenceServerClient.parse_response_body(answer, header_length=length)
    assert same(read.as_numpy("first"), value) and same(read.as_numpy("second"), small)
    response = read.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("x", "m", "1")
    assert [output["name"] for output in response["outputs"]] == ["second", "first"]


def test_the_metadata_names_types_and_dynamic_sizes():
    model = card(TensorSpec("ids", "int64", (None, 26)), TensorSpec("flag", "bool", (None, None)))
    inputs = (("ids", "INT64", [-1, 26]), ("flag", "BOOL", [-1, -1]))
    assert model.metadata() == {
        "name": "ranker",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": name, "datatype": kind, "shape": shape} for name, kind, shape in inputs],
        "outputs": [{"name": "ctr", "datatype": "FP32", "shape": [-1, 1]}],
    }


@pytest.mark.parametrize("dtype", ["object", "float8_e4m3fn", "int4", "complex64"])
def test_a_type_that_the_protocol_lacks_is_refused_when_the_server_starts(dtype):
    with pytest.raises(ConfigError, match=f"cannot carry 'x'\n  evidence: its type is {dtype}"):
        card(TensorSpec("x", dtype, (None,)))


def tensor(**changes: Any) -> dict[str, Any]:
    found = {"name": "dense", "shape": [1, 3], "datatype": "FP32", "data": [1, 2.5, -3]} | changes
    return {name: value for name, value in found.items() if value is not ...}


def document(*tensors: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": list(tensors), **more}).encode()


def test_unknown_keys_and_parameters_are_ignored_and_data_may_be_nested_as_the_shape_is():
    nested = tensor(parameters={"mine": 1}, shape=[2, 3], data=[[1, 2, 3], [4, 5, 6]])
    body = document(nested, model_name="ranker", parameters={"priority": 3, "x": "y"}, outputs=[])
    request = read_request(body, None, card())
    assert (request.id, request.outputs) == (None, {"ctr": False})
    np.testing.assert_array_equal(request.inputs["dense"], np.array([[1, 2, 3], [4, 5, 6]], np.float32))


@pytest.mark.parametrize("binary", [True, False])
def test_an_output_overrides_what_holds_for_all(binary):
    body = document(
        tensor(),
        parameters={"binary_data_output": not binary},
        outputs=[{"name": "ctr", "parameters": {"binary_data": binary}}],
    )
    assert read_request(body, None, card()).outputs == {"ctr": binary}


def one(**changes: Any) -> bytes:
    return document(tensor(**changes))


def more(**keys: Any) -> bytes:
    return document(tensor(), **keys)


def sized(size: Any, payload: bytes, **changes: Any) -> tuple[bytes, int]:
    """A body with bytes behind its JSON, and the length of that."""
    header = one(**{"data": ..., "parameters": {"binary_data_size": size}} | changes)
    return header + payload, len(header)


CLASSES = {"name": "ctr", "parameters": {"classification": 2}}
BAD = {
    "empty": (b"", "the request cannot be read as JSON"),
    "not JSON": (b"{'inputs': 1}", "the request cannot be read as JSON"),
    "cut": (document(tensor())[:-2], "the request cannot be read as JSON"),
    "not UTF-8": (b'{"id": "\xff"}', "can't decode byte 0xff"),
    "NaN": (one(data=[1, 2, math.nan]), "NaN is not JSON; send it as binary data"),
    "infinity": (one(data=[1, 2, -math.inf]), "-Infinity is not JSON"),
    "deep": (b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "millions of arrays": (b"[" + b"[]," * 1_100_000 + b"[]]", "more than 1048576 arrays and objects"),
    "deep data": (one(data=0).replace(b"0", b"[" * 900 + b"]" * 900), "`data` does not fill the shape"),
    "a number of 5000 digits": (b'{"id":' + b"9" * 5000 + b"}", "the request cannot be read as JSON"),
    "an array": (b"[1, 2]", "the request is not an object"),
    "id of a number": (more(id=42), "`id` is not a string"),
    "no inputs": (b"{}", "`inputs` is not an array"),
    "inputs of numbers": (document(1), "an element of `inputs` is not an object"),
    "nothing sent": (document(), "inputs are missing\n  evidence: dense"),
    "unknown input": (document(tensor(), tensor(name="sparse")), "the model has no input 'sparse'"),
    "a name that is no string": (one(name=["dense"]), "the model has no input"),
    "twice": (document(tensor(), tensor()), "input 'dense' is there twice"),
    "another type": (one(datatype="FP64"), "'FP64', the model takes FP32"),
    "BYTES": (one(datatype="BYTES", data=["a", "b", "c"]), "'BYTES', the model takes FP32"),
    "no type": (one(datatype=...), "None, the model takes FP32"),
    "no shape": (one(shape=...), "`shape` is no array of sizes"),
    "negative": (one(shape=[-1, 3]), "`shape` is no array of sizes"),
    "a size of true": (one(shape=[True, 3]), "`shape` is no array of sizes"),
    "a size of 1.0": (one(shape=[1.0, 3]), "`shape` is no array of sizes"),
    "another rank": (one(shape=[3]), "[3], the model takes [-1, 3]"),
    "another width": (one(shape=[1, 4], data=[1] * 4), "[1, 4], the model takes [-1, 3]"),
    "huge": (one(shape=[2**62, 3]), "`shape` is too large"),
    "beyond 64 bits": (one(shape=[10**30, 3]), "`shape` is too large"),
    "an id of a mebibyte": (more(id="\ud800" * (1 << 20)), "1048576 characters, at most 1024"),
    "no data": (one(data=...), "it has no data"),
    "data of one number": (one(data=1), "`data` is not an array"),
    "too few": (one(data=[1, 2]), "it has the shape [2], which is neither [1, 3] nor flat"),
    "too many": (one(data=[1, 2, 3, 4]), "it has the shape [4], which is neither"),
    "ragged": (one(shape=[2, 3], data=[[1, 2, 3], [4, 5]]), "`data` does not fill the shape"),
    "nested otherwise": (one(shape=[2, 3], data=[[1, 2]] * 3), "the shape [3, 2], which is neither [2, 3]"),
    "strings": (one(data=["1", "2", "3"]), "an element is no FP32\n  evidence: it is '1'"),
    "null": (one(data=[1, None, 3]), "an element is no FP32\n  evidence: it is None"),
    "bools": (one(data=[1, True, 3]), "an element is no FP32\n  evidence: it is True"),
    "1e999": (one(data=[1, 2]).replace(b"1, 2", b"1, 1e999, 3"), "an element is too large for FP32"),
    "an integer of 400 digits": (one(data=[1, 10**400, 3]), "an element is too large for FP32"),
    "parameters of a list": (more(parameters=[1]), "`parameters` is not an object"),
    "a flag of 1": (more(parameters={"binary_data_output": 1}), "`binary_data_output` is not true or"),
    "unknown output": (more(outputs=[{"name": "x"}]), "the model has no output 'x'"),
    "an output twice": (more(outputs=[{"name": "ctr"}] * 2), "'ctr' is asked for twice"),
    "outputs of an object": (more(outputs={"name": "ctr"}), "`outputs` is not an array"),
    "shared memory": (one(data=..., parameters={"shared_memory_region": "r"}), "`shared_memory_region`"),
    "classes": (more(outputs=[CLASSES]), "this server does not do `classification`"),
    "bytes that are not there": (sized(12, b"")[0], "the body ends before its data"),
    "cut bytes": (sized(12, b"\0" * 11), "it needs 12 bytes behind the JSON, there are 11"),
    "longer bytes": (sized(12, b"\0" * 13), "tensors take 12 bytes behind the JSON, there are 13"),
    "a negative size": (sized(-12, b"\0" * 12), "it is -12, the shape [1, 3] takes 12 bytes"),
    "a smaller size": (sized(8, b"\0" * 8), "it is 8, the shape [1, 3] takes 12 bytes"),
    "a huge size": (sized(2**63, b"\0" * 12), "takes 12 bytes"),
    "a size of text": (sized("12", b"\0" * 12), "it is '12'"),
    "a number of bytes that is true": (sized(True, b"\0" * 12), "it is True"),
    "both": (sized(12, b"\0" * 12, data=[1, 2, 3]), "both `data` and `binary_data_size`"),
    "a header longer than the body": ((one(), len(one()) + 1), "larger than the body"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_with_its_reason(name):
    sent, message = BAD[name]
    body, length = sent if isinstance(sent, tuple) else (sent, None)
    with pytest.raises(DataError) as caught:
        read_request(body, length, card())
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("dtype", "data", "message"),
    [
        ("int8", [1, 2, 128], "too large for INT8\n  evidence: it is 128"),
        ("uint8", [1, 2, -1], "too large for UINT8\n  evidence: it is -1"),
        ("uint64", [1, 2, 2**64], "too large for UINT64"),
        ("int64", [1, 2, 3.0], "an element is no INT64"),
        ("int64", [1, 2, False], "an element is no INT64"),
        ("bool", [1, 0, 1], "an element is no BOOL"),
        ("bool", b"\1\2\0", "a BOOL is a byte of 0 or 1\n  evidence: a byte is 2"),
        ("float16", [1, 2, 65520.0], "too large for FP16"),
        ("bfloat16", [1, 2, 3], "JSON cannot hold BF16 exactly"),
    ],
)
def test_elements_that_a_type_cannot_hold(dtype, data, message):
    kind = NAMES[dtype]
    sent = sized(3, data, datatype=kind) if isinstance(data, bytes) else (one(datatype=kind, data=data), None)
    with pytest.raises(DataError, match=message):
        read_request(*sent, card(TensorSpec("dense", dtype, (None, 3))))


@pytest.mark.parametrize("shape", [[0, 10**30], [2**62, 0], [0, 2**31, 2**31]])
@pytest.mark.parametrize("more", [{"data": []}, {"data": ..., "parameters": {"binary_data_size": 0}}])
def test_an_empty_shape_that_numpy_cannot_have_is_refused(shape, more):
    spec = TensorSpec("dense", "float32", (None,) * len(shape))
    with pytest.raises(DataError, match="`shape` is too large"):
        read_request(document(tensor(shape=shape, **more)), None, card(spec))


def test_nan_goes_out_as_bytes_and_not_as_json_and_bf16_in_json_is_exact():
    value = np.array([[np.nan], [1]], np.float32)
    request = InferRequest(None, {}, {"ctr": False})
    with pytest.raises(DataError, match="JSON cannot hold output 'ctr'\n  evidence: 1 of its 2 elements"):
        write_answer(request, {"ctr": value}, card())
    answer, _ = write_answer(InferRequest(None, {}, {"ctr": True}), {"ctr": value}, card())
    assert answer.endswith(value.tobytes())
    model = Card("m", "1", "p", (), (TensorSpec("y", "bfloat16", (None, 1)),))
    value = np.array([[0.1], [3.0]], ml_dtypes.bfloat16)
    answer, _ = write_answer(InferRequest(None, {}, {"y": False}), {"y": value}, model)
    assert json.loads(answer)["outputs"][0]["data"] == [0.10009765625, 3.0]


def test_a_lone_surrogate_comes_back_as_it_came():
    body = document(tensor()).replace(b"{", b'{"id": "\\ud800", ', 1)
    request = read_request(body, None, card())
    answer, _ = write_answer(request, {"ctr": np.zeros((1, 1), np.float32)}, card())
    assert b'"id":"\\ud800"' in answer


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(body=st.binary(max_size=400), length=st.none() | st.integers(0, 500))
def test_random_bytes_are_refused_and_nothing_else_happens(body, length):
    with pytest.raises(DataError):
        read_request(body, length, card())


@given(
    changes=st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]), JSON),
    more=st.dictionaries(st.sampled_from(["id", "outputs", "parameters"]), JSON),
    tail=st.binary(max_size=16),
)
def test_a_request_is_read_or_refused_whatever_it_holds(changes, more, tail):
    header = document(tensor(**changes), **more)
    try:
        request = read_request(header + tail, len(header), card())
    except DataError:
        return
    assert request.inputs["dense"].dtype == np.float32 and request.inputs["dense"].shape[1:] == (3,)

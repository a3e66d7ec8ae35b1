"""What Triton checks of a model repository, and what it does with one, as far as this needs no Triton.

Written from the server's sources and not from the export's: of triton-inference-server/core,
`model_config_utils.cc` and `ensemble_utils.cc` (ValidateModelConfig, ValidateIOShape, ValidateInstanceGroup,
ValidateEnsembleSchedulingConfig, ValidateEnsembleConfig), `backend_model_instance.cc` (GenerateWarmupData);
of triton-inference-server/onnxruntime_backend, `src/onnxruntime.cc`. Messages are those of the published
package `tritonclient`.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

pytest.importorskip("tritonclient.grpc", reason="needs Triton's messages: pip install 'tritonclient[grpc]'")

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

Arrays = dict[str, np.ndarray]

BACKENDS = {
    "onnxruntime": ("onnxruntime_onnx", "model.onnx"),
    "tensorrt": ("tensorrt_plan", "model.plan"),
    "pytorch": ("torch_aoti", "model.pt2"),
    "python": ("", "model.py"),
}
"""Platform and file of each backend (`constants.h`)."""
ORT_LEVELS = {
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
"""What the backend makes of `optimization.graph.level`."""
TENSORRT_KEYS = {
    *("precision_mode", "max_workspace_size_bytes", "trt_builder_optimization_level"),
    *("trt_cuda_graph_enable", "trt_engine_cache_enable", "trt_engine_cache_path"),
    *("trt_profile_max_shapes", "trt_profile_min_shapes", "trt_profile_opt_shapes"),
}
"""Some of the keys that the backend knows for TensorRT; it refuses a model with any other."""
NUMPY = {
    **{pb.TYPE_BOOL: np.bool_, pb.TYPE_UINT8: np.uint8, pb.TYPE_INT8: np.int8, pb.TYPE_INT16: np.int16},
    **{pb.TYPE_INT32: np.int32, pb.TYPE_INT64: np.int64, pb.TYPE_FP16: np.float16},
    **{pb.TYPE_FP32: np.float32, pb.TYPE_FP64: np.float64},
}


def check_repository(repository: Path) -> dict[str, Any]:
    """Apply every rule to every model; `ModelConfig` of each by name."""
    texts = {path.parent.name: path.read_text(encoding="utf-8") for path in repository.glob("*/config.pbtxt")}
    configs = {name: text_format.Parse(text, pb.ModelConfig()) for name, text in texts.items()}
    assert {path.name for path in repository.iterdir() if path.is_dir()} == set(configs) != set()
    for name, config in configs.items():
        folder = repository / name
        assert config.name == name
        assert config.max_batch_size >= 1
        assert list(config.version_policy.specific.versions) == [1]
        assert (folder / "1").is_dir()
        for io in (*config.input, *config.output):
            _check_shape(io)
        for side in (config.input, config.output):
            assert len({io.name for io in side}) == len(side) > 0
        if config.HasField("ensemble_scheduling"):
            _check_ensemble(config, configs)
        else:
            _check_model(config, folder)
    return configs


def parameters(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def _check_shape(io: Any) -> None:
    assert io.name
    assert io.data_type != pb.TYPE_INVALID
    assert len(io.dims) > 0
    assert all(size >= 1 or size == -1 for size in io.dims)
    if io.HasField("reshape"):
        assert -1 not in [*io.dims, *io.reshape.shape], "reshapes of open axes need care"
        assert math.prod(io.dims) == math.prod(io.reshape.shape)


def _check_model(config: Any, folder: Path) -> None:
    platform, file = BACKENDS[config.backend]
    assert config.platform == platform
    assert config.default_model_filename.endswith(Path(file).suffix)
    assert (folder / "1" / config.default_model_filename).is_file()
    for size in config.dynamic_batching.preferred_batch_size:
        assert 0 < size <= config.max_batch_size
    (group,) = config.instance_group
    assert group.count >= 1
    assert group.kind in {pb.ModelInstanceGroup.KIND_CPU, pb.ModelInstanceGroup.KIND_GPU} or (
        group.kind == pb.ModelInstanceGroup.KIND_MODEL and config.backend == "python"
    )
    assert not group.gpus
    if config.backend != "tensorrt":
        assert not config.optimization.HasField("cuda"), "only recognized by the TensorRT backend"
    if config.backend != "onnxruntime":
        assert not config.optimization.HasField("execution_accelerators")
    assert config.optimization.graph.level in ORT_LEVELS
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
        assert accelerator.name in {"tensorrt", "cuda"}
        if accelerator.name == "tensorrt":
            assert set(accelerator.parameters) <= TENSORRT_KEYS
    assert not config.optimization.execution_accelerators.cpu_execution_accelerator
    assert config.model_warmup
    assert len({each.name for each in config.model_warmup}) == len(config.model_warmup)
    for warmup in config.model_warmup:
        _check_warmup(config, warmup, folder)


def _check_warmup(config: Any, warmup: Any, folder: Path) -> None:
    assert 1 <= warmup.batch_size <= config.max_batch_size
    assert set(warmup.inputs) == {io.name for io in config.input}
    for io in config.input:
        given = warmup.inputs[io.name]
        assert given.data_type == io.data_type
        # The server sends one row for each of the batch, with the shape that a client would send.
        assert len(given.dims) == len(io.dims)
        assert all(size in {own, -1} and own >= 1 for size, own in zip(io.dims, given.dims, strict=True))
        needed = math.prod(given.dims) * np.dtype(NUMPY[io.data_type]).itemsize
        assert (folder / "warmup" / given.input_data_file).stat().st_size == needed


def _check_ensemble(config: Any, configs: Mapping[str, Any]) -> None:
    assert config.platform == "ensemble"
    assert not (config.backend or config.instance_group or config.model_warmup)
    assert not (config.HasField("optimization") or config.HasField("dynamic_batching"))

    def kinds(side: Any) -> dict[str, tuple[Any, ...]]:
        return {io.name: (io.data_type, tuple(io.dims)) for io in side}

    tensors, declared = kinds(config.input), kinds(config.output)
    written, read = Counter(list(tensors)), Counter[str]()
    for step in config.ensemble_scheduling.step:
        model = configs[step.model_name]
        assert step.model_version in {-1, 1}
        assert model.max_batch_size >= config.max_batch_size
        inputs, outputs = kinds(model.input), kinds(model.output)
        assert set(step.input_map) == set(inputs), "every input is mapped, and nothing else"
        assert set() < set(step.output_map) <= set(outputs)
        for mapped, known, counter in ((step.input_map, inputs, read), (step.output_map, outputs, written)):
            for name, tensor in mapped.items():
                assert tensors.setdefault(tensor, known[name]) == known[name]
                counter[tensor] += 1
    assert set(written.values()) == {1}, "a tensor is written once"
    assert set(read) <= set(written), "a tensor that is read is written"
    for name, kind in declared.items():
        assert tensors[name] == kind
        assert name in written
    assert set(written) == set(read) | set(declared), "a tensor that is written is read"


def open_session(repository: Path, config: Any) -> Any:
    """What the ONNX Runtime backend opens: nothing but what it reads from the configuration is set."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    settings.graph_optimization_level = ORT_LEVELS[config.optimization.graph.level]
    path = repository / config.name / "1" / config.default_model_filename
    return ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def check_session(session: Any, config: Any) -> None:
    """The graph has the inputs and outputs that the configuration declares, and no other."""
    types = {pb.TYPE_INT64: "tensor(int64)", pb.TYPE_FP32: "tensor(float)"}
    for ours, theirs in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        found = {each.name: each for each in theirs}
        assert set(found) == {io.name for io in ours}
        for io in ours:
            batch, *dims = found[io.name].shape
            assert isinstance(batch, str), "the batch is open"
            assert found[io.name].type == types[io.data_type]
            assert dims == list(io.reshape.shape if io.HasField("reshape") else io.dims)


def infer(repository: Path, configs: Mapping[str, Any], name: str, request: Arrays) -> Arrays:
    """A request as a client sends it, through a model or through the steps of an ensemble."""
    config = configs[name]
    rows = {len(value) for value in request.values()}
    assert len(rows) == 1
    assert max(rows) <= config.max_batch_size
    for io in config.input:
        assert request[io.name].dtype == NUMPY[io.data_type]
        assert request[io.name].shape[1:] == tuple(io.dims)
    assert set(request) == {io.name for io in config.input}
    if not config.HasField("ensemble_scheduling"):
        return _infer_model(repository, config, request)
    tensors = dict(request)
    waiting = list(config.ensemble_scheduling.step)
    while waiting:
        # The server runs a step as soon as all that it reads is there.
        step = next(each for each in waiting if set(each.input_map.values()) <= set(tensors))
        waiting.remove(step)
        fed = {own: tensors[tensor] for own, tensor in step.input_map.items()}
        answered = infer(repository, configs, step.model_name, fed)
        tensors |= {tensor: answered[own] for own, tensor in step.output_map.items()}
    return {io.name: tensors[io.name] for io in config.output}


def _infer_model(repository: Path, config: Any, request: Arrays) -> Arrays:
    def shaped(io: Any) -> np.ndarray:
        value = request[io.name]
        return value.reshape(-1, *io.reshape.shape) if io.HasField("reshape") else value

    session, outputs = open_session(repository, config), config.output
    answers = session.run([io.name for io in outputs], {io.name: shaped(io) for io in config.input})
    return {io.name: found.reshape(-1, *io.dims) for io, found in zip(outputs, answers, strict=True)}

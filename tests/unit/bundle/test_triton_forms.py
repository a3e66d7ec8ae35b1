"""What each backend of Triton is told: engines for GPUs, of TensorRT and of Inductor."""

import io
import json
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from altered import built_by_inductor, engine_of
from cut_models import LOOKED_UP, cut_contents
from sample_run import SampleRun, make_run
from triton_rules import check_repository, parameters, pb

from loka_onnx.bundle.triton import TritonRepository, export_triton
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_file
from loka_onnx.engines.inductor.package import InductorEngine, InputPort, OutputPort, Program
from loka_onnx.engines.migraphx.session import MigraphxEngine, ProgramFile, ProgramInput, ProgramOutput
from loka_onnx.engines.onnxruntime.io_binding_settings import PROGRAMS, SETTINGS_FILE, IoBindingSettings
from loka_onnx.engines.triton.models import TritonOptions
from loka_onnx.runtime import load

OPTIONS = TritonOptions("ranker")
Files = dict[str, bytes]
DYNAMIC = InductorEngine(
    torch="2.13.0+cu130",
    architecture="sm90",
    instruction_sets=("avx2",),
    inputs=(InputPort("dense", "float32", (16,)),),
    outputs=(OutputPort("ctr", True),),
    minimum=1,
    maximum=4096,
    sizes=(256, 1024),
    programs=(Program("rows", 1, 4096),),
)
STATIC = replace(DYNAMIC, programs=(Program("rows256", 256, 256), Program("rows1024", 1024, 1024)))


def package(engine: InductorEngine) -> bytes:
    """An archive as PyTorch lays it out, without code."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for program in engine.programs:
            path = f"engine/data/aotinductor/{program.name}/x.wrapper.so"
            archive.writestr(path, f"code of {program.name}")
        archive.writestr("engine/extra/engine.json", serde.dumps(engine))
        archive.writestr("engine/byteorder", "little")
    return stream.getvalue()


@pytest.fixture
def with_engine(tmp_path: Path) -> Callable[..., tuple[TritonRepository, dict[str, Any]]]:
    """Exports a bundle with one engine, made of files that nothing here can run; its record and configs."""
    run = make_run(tmp_path / "run")
    measured = next(e for e in run.report.evaluations.evaluations if e.latencies)

    def export(backend: str, architecture: str, files: Files) -> tuple[TritonRepository, dict[str, Any]]:
        engine = engine_of(run, backend, architecture, files, target="gpu", backend_version="10.16.1")
        engine = replace(engine, evaluation=replace(measured, engine=engine.artifact.id))
        bundle = write_bundle(replace(run.contents, engines=(engine,)), tmp_path / "bundle")
        record = export_triton(bundle, tmp_path / "repository", OPTIONS)
        return record, check_repository(tmp_path / "repository")

    return export


def graph(sample: SampleRun) -> bytes:
    return (sample.contents.root / sample.contents.model.path).read_bytes()


def settings(provider: str, options: dict[str, str], sizes: tuple[int, ...], **more: Any) -> bytes:
    return serde.dumps(IoBindingSettings(provider, "1.31.1", options, sizes, **more)).encode()


def accelerators(config: Any) -> dict[str, dict[str, str]]:
    found = config.optimization.execution_accelerators.gpu_execution_accelerator
    return {each.name: dict(each.parameters) for each in found}


def test_the_cuda_provider_keeps_fp32_and_no_graphs(sample, with_engine, tmp_path):
    told = {"enable_cuda_graph": "1", "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
    files = {"engine.onnx": graph(sample), SETTINGS_FILE: settings("cuda", told, (64, 256))}
    record, configs = with_engine("onnxruntime", "sm90", files)
    config = configs["ranker-gpu-onnxruntime-sm90-fp8-safe"]
    assert accelerators(config) == {"cuda": {"use_tf32": "0"}}
    assert config.optimization.graph.level == 0, "no FP8 in this graph"
    assert config.instance_group[0].kind == pb.ModelInstanceGroup.KIND_GPU
    assert list(config.dynamic_batching.preferred_batch_size) == [64, 256]
    assert [each.batch_size for each in config.model_warmup] == [1, 64, 256]
    assert "runs without CUDA graphs" in record.models[0].remarks[0]
    assert not (tmp_path / "repository" / config.name / "1" / SETTINGS_FILE).exists()


def test_the_tensorrt_provider_gets_its_profile(sample, with_engine):
    told = {
        "trt_builder_optimization_level": "3",
        **{
            f"trt_profile_{end}_shapes": f"dense:{rows}x16"
            for end, rows in (("min", 1), ("opt", 64), ("max", 4096))
        },
    }
    given = settings("tensorrt", {"trt_cuda_graph_enable": "1", **told}, (64,), programs=True)
    files = {"engine.onnx": graph(sample), SETTINGS_FILE: given, f"{PROGRAMS}/a.engine": b"compiled"}
    record, configs = with_engine("onnxruntime_tensorrt", "sm90", files)
    config = configs["ranker-gpu-onnxruntime_tensorrt-sm90-fp8-safe"]
    # The first has the highest priority.
    assert [*accelerators(config).items()] == [("tensorrt", told), ("cuda", {"use_tf32": "0"})]
    assert config.optimization.graph.level == 2
    assert any("TensorRT compiles as the server loads" in remark for remark in record.models[0].remarks)


def test_an_engine_of_tensorrt_is_a_plan_with_cuda_graphs(with_engine, tmp_path):
    record, configs = with_engine("tensorrt", "sm90", {"engine.trt": b"a plan"})
    config = configs["ranker-gpu-tensorrt-sm90-fp8-safe"]
    assert (config.platform, config.backend) == ("tensorrt_plan", "tensorrt")
    assert (tmp_path / "repository" / config.name / "1/model.plan").read_bytes() == b"a plan"
    assert config.optimization.cuda.graphs
    (spec,) = config.optimization.cuda.graph_spec
    assert (spec.batch_size, list(spec.input["dense"].dim)) == (1024, [16])
    assert not spec.HasField("graph_lower_bound"), "padding would run rows of uninitialized memory"
    assert list(config.dynamic_batching.preferred_batch_size) == [1024]
    assert "needs TensorRT 10.16.1 and a GPU of sm90" in record.models[0].remarks[0]


MIGRAPHX = MigraphxEngine(
    "gfx942",
    "2.15.0",
    (ProgramFile(8, "rows-8.mxr"),),
    (ProgramInput("dense", "float32", (16,)),),
    (ProgramOutput("ctr", True),),
)
PROGRAM = {"engine.json": serde.dumps(MIGRAPHX).encode(), "rows-8.mxr": b"program"}
PROVIDER = {"engine.onnx": None, SETTINGS_FILE: settings("migraphx", {}, (8,))}
FOREIGN = {"engine.pt2": package(replace(DYNAMIC, inputs=(InputPort("other", "float32", (16,)),)))}
NO_PROVIDER = "has the providers CPU, CUDA, TensorRT and OpenVINO, and not MIGraphX"
DECLINED: list[tuple[str, str, dict[str, bytes | None], str]] = [
    ("onnxruntime", "gfx942", PROVIDER, NO_PROVIDER),
    ("tensorrt_rtx", "sm89", {"engine.bin": b"engine"}, "does not load engines of TensorRT for RTX"),
    ("migraphx", "gfx942", PROGRAM, "Triton has no MIGraphX backend"),
    ("inductor", "sm90", FOREIGN, "has other inputs or outputs than the bundle: ['ctr', 'other']"),
    ("inductor", "sm90", {"engine.pt2": b"no package"}, "not an engine of the inductor backend"),
]


@pytest.mark.parametrize(("backend", "architecture", "files", "reason"), DECLINED)
def test_engines_that_no_backend_runs_are_declined(sample, with_engine, backend, architecture, files, reason):
    held = {name: graph(sample) if content is None else content for name, content in files.items()}
    record, configs = with_engine(backend, architecture, held)
    (declined,) = record.declined
    assert reason in declined.reason
    assert record.preferred == "fallback-fp32", "the FP32 model stands in"
    assert set(configs) == {"ranker", "ranker-fallback-fp32"}
    assert parameters(configs["ranker"])["loka_onnx.engine"] == "fallback-fp32"


def test_a_package_with_one_program_is_run_by_the_pytorch_backend(with_engine, tmp_path):
    record, configs = with_engine("inductor", "sm90", {"engine.pt2": package(DYNAMIC)})
    name = "ranker-gpu-inductor-sm90-fp8-safe"
    program = configs[f"{name}-program"]
    assert (program.platform, program.backend) == ("torch_aoti", "pytorch")
    assert [io.name for io in program.input] == ["INPUT__0"]
    assert [io.name for io in program.output] == ["OUTPUT__0"]
    assert list(program.dynamic_batching.preferred_batch_size) == [256, 1024]
    for ensemble in (configs[name], configs["ranker"]):
        (step,) = ensemble.ensemble_scheduling.step
        assert dict(step.input_map) == {"INPUT__0": "dense"}
        assert dict(step.output_map) == {"OUTPUT__0": "ctr"}
        assert [io.name for io in (*ensemble.input, *ensemble.output)] == ["dense", "ctr"]
    with zipfile.ZipFile(tmp_path / "repository" / f"{name}-program" / "1/model.pt2") as archive:
        assert archive.read("engine/data/aotinductor/model/x.wrapper.so") == b"code of rows"
        assert json.loads(archive.read("engine/extra/engine.json"))["value"]["torch"] == "2.13.0+cu130"
        assert not [each for each in archive.namelist() if "/rows/" in each]
    assert record.models[0].runs == (f"{name}-program",)
    assert "needs PyTorch 2.13.0+cu130" in record.models[0].remarks[0]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (STATIC, "it has 2 programs"),
        (replace(STATIC, programs=STATIC.programs[:1]), "smaller than the 256 rows"),
        (replace(DYNAMIC, minimum=4, programs=(Program("rows", 4, 4096),)), "smaller than the 4 rows"),
    ],
)
def test_other_packages_are_run_by_the_python_backend(with_engine, tmp_path, engine, reason):
    content = package(engine)
    record, configs = with_engine("inductor", "sm90", {"engine.pt2": content})
    config = configs["ranker-gpu-inductor-sm90-fp8-safe"]
    assert (config.backend, config.platform) == ("python", "")
    assert config.instance_group[0].kind == pb.ModelInstanceGroup.KIND_MODEL, "the session picks the GPU"
    assert parameters(config)["loka_onnx.architecture"] == "sm90"
    version = tmp_path / "repository" / config.name / "1"
    assert {path.name for path in version.iterdir()} == {"model.py", "model.pt2"}
    assert (version / "model.pt2").read_bytes() == content
    compile((version / "model.py").read_text(), "model.py", "exec")
    assert reason in record.models[0].remarks[0]


def test_a_dense_engine_by_position_stands_behind_the_lookup(sample, tmp_path):
    contents = cut_contents(sample, tmp_path / "run")
    ports = (InputPort(LOOKED_UP, "float32", (4,)), InputPort("x", "float32", (3,)))
    path = contents.root / "engine.pt2"
    path.write_bytes(package(replace(DYNAMIC, inputs=ports)))
    (engine,) = contents.engines
    file = {"path": Path(path.name), "digest": digest_file(path)}
    engine = replace(engine, artifact=replace(engine.artifact, backend="inductor", **file))
    bundle = write_bundle(replace(contents, engines=(engine,)), tmp_path / "bundle")
    export_triton(bundle, tmp_path / "repository", OPTIONS)
    configs = check_repository(tmp_path / "repository")
    name = "ranker-cpu-inductor-cpu-fp32"
    assert set(configs) == {"ranker", name, f"{name}-dense", "ranker-lookup", "ranker-fallback-fp32"}
    _, dense = configs["ranker"].ensemble_scheduling.step
    assert dict(dense.input_map) == {"INPUT__0": f"looked_up/{LOOKED_UP}", "INPUT__1": "x"}
    assert dict(dense.output_map) == {"OUTPUT__0": "ctr"}
    shapes = [(io.name, list(io.dims)) for io in configs[f"{name}-dense"].input]
    assert shapes == [("INPUT__0", [4]), ("INPUT__1", [3])]


def exported(sample: SampleRun, root: Path, *, static: int) -> Path:
    """A folder with a bundle of an engine that Inductor built for the CPU, for 1 to 16 rows, exported."""
    contents = built_by_inductor(sample, root, (1, 8, 16, (4, 8)), static=static)
    export_triton(write_bundle(contents, root / "bundle"), root / "repository", OPTIONS)
    check_repository(root / "repository")
    return root


@pytest.fixture(scope="module")
def served(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(sample, tmp_path_factory.mktemp("served"), static=0)


@pytest.mark.slow
def test_a_trusted_bundle_is_served_by_a_package_of_inductor(sample, served):
    rows, exact = sample.contents.sample["dense"], sample.contents.fallback.outputs["ctr"]
    with load(served / "bundle", trust=True) as engine:
        assert engine.entry.backend == "inductor"
        assert engine.health().ready
        for count in (1, 3, 8):
            np.testing.assert_allclose(engine.infer({"dense": rows[:count]})["ctr"], exact[:count], atol=1e-4)
    assert load(served / "bundle").entry.backend == "onnxruntime"


@pytest.mark.slow
def test_the_pytorch_backend_can_open_and_run_a_package(sample, served):
    """With the arguments and the checks of `src/pt2/model_state.cc`."""
    import torch

    package = served / "repository/ranker-cpu-inductor-cpu-fp32-program/1/model.pt2"
    # Package, program, run_single_threaded, runners, device: -1 is the CPU.
    loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1)
    taken, given = (json.loads(spec)[1] for spec in loader.get_call_spec())
    assert [child["type"] for child in taken["children_spec"]] == ["builtins.tuple", "builtins.dict"]
    assert len(taken["children_spec"][0]["children_spec"]) == 1
    assert taken["children_spec"][1]["children_spec"] == []
    assert (given["type"], len(given["children_spec"])) == ("builtins.tuple", 1)
    rows, exact = sample.contents.sample["dense"], sample.contents.fallback.outputs["ctr"]
    for count in (1, 3, 8):
        (found,) = loader.run([torch.from_numpy(rows[:count])])
        np.testing.assert_allclose(found.numpy(), exact[:count], atol=1e-5)


def tensor_of(name: str, value: np.ndarray) -> Any:
    return SimpleNamespace(name=name, as_numpy=lambda: value)


SERVER = SimpleNamespace(
    Tensor=tensor_of,
    InferenceResponse=partial(SimpleNamespace, error=None),
    TritonError=lambda message: SimpleNamespace(message=message),
    get_input_tensor_by_name=lambda request, name: request[name],
)
"""What the server's Python backend offers to models (python_backend, README)."""


@pytest.mark.slow
def test_the_model_of_the_python_backend_answers_batched_requests(sample, tmp_path, monkeypatch):
    folder = exported(sample, tmp_path, static=1) / "repository/ranker-cpu-inductor-cpu-fp32"
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SERVER)
    scope: dict[str, Any] = {"__name__": "model"}
    exec(compile((folder / "1/model.py").read_text(), "model.py", "exec"), scope)
    model = scope["TritonPythonModel"]()
    config = json.dumps({"parameters": {"loka_onnx.architecture": {"string_value": "cpu"}}})
    model.initialize({"model_config": config, "model_repository": str(folder), "model_version": "1"})
    rows, exact = sample.contents.sample["dense"], sample.contents.fallback.outputs["ctr"]
    parts = ((0, 1), (1, 4), (4, 8))
    answers = model.execute([{"dense": tensor_of("dense", rows[start:end])} for start, end in parts])
    for (start, end), response in zip(parts, answers, strict=True):
        assert response.error is None
        (tensor,) = response.output_tensors
        assert tensor.name == "ctr"
        np.testing.assert_allclose(tensor.as_numpy(), exact[start:end], atol=1e-5)
    (refused,) = model.execute([{"dense": tensor_of("dense", np.zeros((17, 16), np.float32))}])
    assert "17 rows; it takes 1 to 16" in refused.error.message
    model.finalize()

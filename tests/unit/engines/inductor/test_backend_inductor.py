"""What the inductor backend says before it builds: plans it declines, hosts it needs, compilers, programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from loka_onnx.core.formats import E5M2, Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_TENSOR, Recipe
from loka_onnx.engines.inductor import backend as backend_module
from loka_onnx.engines.inductor.backend import InductorBackend
from loka_onnx.engines.inductor.compile import (
    Compilers,
    Settings,
    batch_programs,
    example_rows,
    inductor_options,
    input_ports,
    output_ports,
)
from loka_onnx.engines.inductor.package import InputPort, OutputPort, Program
from loka_onnx.engines.request import BatchRange, BuildRequest
from loka_onnx.errors import DataError, ModelError
from loka_onnx.sessions.cuda import CudaDevice

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

ABSENT = ("/nowhere/g++", "/nowhere/gcc")


def plan(fp8: bool, base: Precision = Precision.BF16, recipe: Recipe = PER_TENSOR) -> PrecisionPlan:
    decision = (
        Decision("fc", Precision.FP8, recipe, Verdict.SAFE, "test", 0.01, (0.01,))
        if fp8
        else Decision("fc", base, None, Verdict.NOT_JUDGED, "test")
    )
    return PrecisionPlan("fp8-all" if fp8 else base.value, "digest", base, (decision,), {}, float(fp8))


def graph_of(text: str) -> onnx.GraphProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}').graph


def test_plans_that_no_device_of_an_architecture_runs_are_declined() -> None:
    backend = InductorBackend()
    assert backend.decline(plan(True), "sm80") == "sm80 has no FP8 products (sm89 is the first that has)"
    for architecture in ("cpu", "sm89", "sm90", "sm120"):
        assert backend.decline(plan(True), architecture) is None
    for base in (Precision.FP32, Precision.BF16, Precision.FP16):
        assert backend.decline(plan(False, base), "sm80") is None
    e5m2 = plan(True, recipe=Recipe.of(E5M2))
    assert backend.decline(e5m2, "cpu") == "site 'fc' asks for E5M2; inductor multiplies E4M3FN only"


def test_a_gpu_is_built_for_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = InductorBackend()
    monkeypatch.setattr(backend_module, "list_cuda_devices", lambda: (CudaDevice(0, "H100", "sm90"),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backend.build_blocker("sm90") == ""
    assert backend.build_blocker("cpu") == ""
    assert backend.build_blocker("sm89") == (
        "inductor builds for sm89 only on a host with that GPU, and this one has H100 (sm90); build there"
    )
    assert backend.availability().devices == ("cpu", "H100 (sm90)")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.build_blocker("sm90").startswith(
        "inductor builds for sm90 only on a host with that GPU, and this one has no GPU that PyTorch uses"
    )


def test_without_a_compiler_nothing_is_built_and_everything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compilers, "find", lambda: None)
    availability = InductorBackend().availability()
    assert (availability.can_build, availability.can_run) == (False, True)
    assert availability.reason == "there is no C++ compiler, which Inductor needs"
    assert availability.remedy == "install g++ and gcc"


def test_the_compiler_of_the_system_is_preferred_to_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("g++", "gcc", "weird++", "weird"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    for name, value in {"CXX": tmp_path / "weird++", "CC": tmp_path / "weird", "PATH": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    system = (str(tmp_path / "g++"), str(tmp_path / "gcc"))
    assert Compilers.find(system) == Compilers(*system)
    assert Compilers.find(ABSENT) == Compilers(str(tmp_path / "weird++"), str(tmp_path / "weird"))
    monkeypatch.setenv("CXX", "/nowhere/c++ -O2")
    assert Compilers.find(ABSENT) == Compilers(*system)
    monkeypatch.setenv("PATH", "/nowhere")
    assert Compilers.find(ABSENT) is None


def request(
    architecture: str = "cpu", sizes: tuple[int, ...] = (8, 32), options: dict[str, int] | None = None
) -> BuildRequest:
    """A request of which nothing but the batch sizes, the architecture and the options is read."""
    plan = PrecisionPlan("bf16", "", Precision.BF16, (), {}, 0.0)
    nowhere = Path("nowhere")
    batch = BatchRange(1, max(sizes), max(sizes), sizes)
    return BuildRequest(
        nowhere, plan, (), "device", architecture, batch, nowhere, nowhere, options=options or {}
    )


def test_a_gpu_has_a_program_for_each_of_a_few_batch_sizes() -> None:
    assert Settings.of(request("sm90")).static
    assert not Settings.of(request("sm90", options={"static": 0})).static
    assert not Settings.of(request("sm90", sizes=(64,))).static
    assert not Settings.of(request("sm90", sizes=(1, 8, 64, 512))).static
    assert not Settings.of(request("cpu")).static


def test_options_become_settings() -> None:
    assert Settings.of(request()) == Settings()
    for name, values in InductorBackend.options.items():
        for value in values:
            settings = Settings.of(request(options={name: value}))
            assert settings.options == {**Settings().options, name: value}
            assert settings == Settings(**{**vars(Settings()), name: bool(value)})
    told = inductor_options(Settings(max_autotune=True), Compilers("/x/g++", "/x/gcc"), Path("/scratch/rows"))
    assert (told["max_autotune"], told["cpp.cxx"]) == (True, (None, "/x/g++"))
    assert told["aot_inductor.output_path"] == "/scratch/rows"
    assert told["cpp.vec_isa_ok"] is None
    # Beside a GPU nobody asks for the processor's vector instructions.
    beside = inductor_options(Settings(), Compilers("/x/g++", "/x/gcc"), Path("/scratch/rows"), "sm90")
    assert beside["cpp.vec_isa_ok"] is False
    # A misspelt option would be refused by PyTorch only while it compiles.
    known = torch._inductor.config.get_config_copy()
    assert set(told) <= set(known)


def test_one_program_for_all_batch_sizes_or_one_for_each() -> None:
    batch = BatchRange(1, 8, 64, (8, 32))
    assert batch_programs(batch, static=False) == (Program("rows", 1, 64),)
    assert batch_programs(batch, static=True) == (Program("rows8", 8, 8), Program("rows32", 32, 32))
    assert batch_programs(BatchRange(16, 16, 16), static=False) == (Program("rows16", 16, 16),)


def test_ports_are_read_from_the_graph() -> None:
    graph = graph_of(
        "g (float[batch, 3, 4] x, int64[batch] ids) => (float[batch, 2] out, float[7] table, float[n] y) {}"
    )
    assert input_ports(graph) == (InputPort("x", "float32", (3, 4)), InputPort("ids", "int64", ()))
    assert output_ports(graph) == (OutputPort("out", True), OutputPort("table", False), OutputPort("y", True))


def test_inputs_that_no_request_holds_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"input 'x' has a dynamic axis besides the batch(?s:.*)\(None, None\)"
    ):
        input_ports(graph_of("g (float[batch, tokens] x) => (float[batch, tokens] y) {}"))
    with pytest.raises(ModelError, match=r"requests cannot hold input 'x'(?s:.*)bfloat16"):
        input_ports(graph_of("g (bfloat16[batch, 2] x) => (float[batch, 2] y) {}"))


def test_examples_are_rows_of_the_sample_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "sample.npz"
    np.savez(path, x=np.arange(6.0).reshape(3, 2), ids=np.array([5, 6, 7]))
    x, ids = example_rows(path, (InputPort("x", "float32", (2,)), InputPort("ids", "int64", ())), 5)
    assert ids.tolist() == [5, 6, 7, 5, 6]
    assert x.dtype is torch.float32
    assert x[:, 0].tolist() == [0, 2, 4, 0, 2]
    with pytest.raises(DataError, match="the sample has no rows of input 'y'"):
        example_rows(path, (InputPort("y", "float32", (2,)),), 5)

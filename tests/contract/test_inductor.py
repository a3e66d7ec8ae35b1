"""What Inductor makes of planned graphs: which sites multiply FP8, which batch sizes one package serves."""

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_text import in_fp32, with_constants
from test_fusions import operator, product, written
from tiny_models import GraphWriter, TinyModel, make_plan, request_for, write_sample

from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.site import SiteKind
from loka_onnx.engines.inductor.backend import InductorBackend
from loka_onnx.engines.inductor.package import read_engine, read_sources
from loka_onnx.engines.inductor.site_precision import PRODUCT_KERNEL, SCALED, product_calls
from loka_onnx.sessions.backends import fusions_of
from loka_onnx.sessions.cuda import list_cuda_devices

torch = pytest.importorskip("torch", reason="needs torch")

WIDTHS = (64, 48, 32, 8)
BATCH = BatchSizes(1, 8, 16, (4, 8))
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("gpu", marks=[pytest.mark.slow, pytest.mark.gpu]),
]


def ranker(folder: Path, base: Precision, *, fp8: bool) -> TinyModel:
    """A norm and three linears; the last has 8 columns, which no FP8 product of PyTorch has."""
    folder.mkdir(parents=True)
    w = GraphWriter(base)
    gain, shift = w.constant("gain", np.linspace(0.5, 1.5, 64)), w.constant("shift", np.linspace(-1, 1, 64))
    x = w.op("LayerNormalization", [w.enter("x"), gain, shift], "norm", axis=-1)
    w.site("norm", SiteKind.NORM, 64, 0, x)
    for index, (k, n) in enumerate(pairwise(WIDTHS)):
        name = f"fc{index}"
        weight = w.narrow_weight(name, (k, n), 1 if index == 1 else None) if fp8 else w.weight(name, (k, n))
        x = w.op("MatMul", [w.quantized(x, f"{name}/x") if fp8 else x, weight], name)
        w.site(name, SiteKind.LINEAR, k, n, x)
        x = w.op("Relu", [x], f"relu{index}")
    w.leave(x)
    path = w.save(folder / "model.onnx", {"x": (64,)})
    sites = tuple(w.sites)
    chosen = tuple(site.name for site in sites if site.kind is SiteKind.LINEAR) if fp8 else ()
    plan = make_plan(sites, base=base, fp8=chosen)
    return TinyModel(path, plan, sites, write_sample(folder / "sample.npz", {"x": (64,)}))


def build(model: TinyModel, output: Path, architecture: str = "cpu", **options: int) -> EngineArtifact:
    more = {"batch": BATCH, "relative_to": output.parent, "options": options}
    artifact = InductorBackend().build(request_for(model, output, architecture, **more))
    assert artifact.status is BuildStatus.READY, artifact.detail
    return artifact


@dataclass(frozen=True)
class Built:
    model: TinyModel
    artifact: EngineArtifact
    folder: Path

    def outputs(self, rows: int) -> tuple[Any, Any]:
        """What the engine answers, and the reference evaluator with the same constants in FP32."""
        assert self.artifact.path is not None
        inputs = {"x": np.load(self.model.sample)["x"][:rows]}
        with InductorBackend().open(self.artifact, self.folder / self.artifact.path) as runner:
            got = runner.run(inputs)["out"]
        return got, ReferenceEvaluator(in_fp32(onnx.load(self.model.path))).run(None, inputs)[0]


def architecture_of(device: str) -> str:
    if device == "cpu":
        return "cpu"
    gpus = [gpu.architecture for gpu in list_cuda_devices()]
    if not gpus or not torch.cuda.is_available():
        pytest.skip("needs a GPU: packages for one are compiled on it")
    return gpus[0]


def build_ranker(folder: Path, architecture: str, base: Precision, *, fp8: bool, **options: int) -> Built:
    model = ranker(folder / "model", base, fp8=fp8)
    output = folder / "engines" / "e"
    return Built(model, build(model, output, architecture, **options), output.parent)


@pytest.fixture(scope="module", params=DEVICES)
def fp8_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    architecture = architecture_of(request.param)
    return build_ranker(tmp_path_factory.mktemp("fp8"), architecture, Precision.BF16, fp8=True)


def test_aligned_sites_multiply_fp8_and_the_other_is_a_fallback(fp8_engine: Built) -> None:
    sites = {site.site: site for site in fp8_engine.artifact.sites}
    for name in ("fc0", "fc1"):
        assert sites[name].engaged, sites[name].evidence
        assert sites[name].operands == ("float8_e4m3fn", "float8_e4m3fn")
    assert [site.site for site in fp8_engine.artifact.fallbacks] == ["fc2"]
    assert sites["fc2"].operands == ("bfloat16", "bfloat16")
    assert "K 32 and N 8 are not both multiples of 16" in sites["fc2"].evidence
    assert sites["norm"].engaged
    assert "bfloat16" in sites["norm"].operands


def test_the_generated_code_calls_an_fp8_product_for_each_site(fp8_engine: Built) -> None:
    assert fp8_engine.artifact.path is not None
    package = fp8_engine.folder / fp8_engine.artifact.path
    program = read_engine(package).programs[-1]
    calls = product_calls(read_sources(package, program.name))
    operators = [product.operator for product in program.products]
    # Which of the two multiplies was measured on the device; on the CPU, FP8 is simulated by FP32 products.
    for multiplies in (SCALED, PRODUCT_KERNEL):
        assert calls[multiplies] == operators.count(multiplies)
    assert calls.total() == (0 if fp8_engine.artifact.architecture == "cpu" else 2)
    assert [product.node for product in program.products] == ["fc0", "fc1", "fc2"]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9, 16])
def test_one_package_serves_every_batch_size(fp8_engine: Built, rows: int) -> None:
    got, exact = fp8_engine.outputs(rows)
    assert got.shape == (rows, WIDTHS[-1])
    assert got.dtype == np.float32
    # BF16 moves activations over rounding boundaries of E4M3FN, one step of a sixteenth each. NumPy with all
    # tensors rounded to BF16 differs from NumPy with none by 0.05, 0.008 in the mean; Inductor rounds some.
    np.testing.assert_allclose(got, exact, atol=0.1)
    # It really is BF16 between them.
    assert 1e-5 < np.abs(got - exact).mean() < 0.012


@pytest.mark.parametrize("device", DEVICES)
def test_programs_of_fixed_sizes_ids_as_int32_and_a_compiler_that_the_environment_should_not_name(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of tables are marked to travel as int32, and reach them; the product is in FP32."""
    monkeypatch.setenv("CXX", "/bin/false")
    graph = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (int64[batch] user, int64[batch, 3] history, int64[batch] minute) => (float[batch, 4] out)
        <int64[1] one = {1}> {
            own = Gather <axis = 0> (table, user)
            rows = Gather <axis = 0> (table, history)
            past = ReduceSum <keepdims = 0> (rows, one)
            number = Cast <to = 1> (minute)
            column = Unsqueeze (number, one)
            sum = Add (own, past)
            timed = Mul (sum, column)
            out = MatMul (timed, weight)
        }"""
    )
    table, weight = np.random.default_rng(0).normal(size=(2, 12, 4)).astype(np.float32)
    with_constants(graph, {"table": table, "weight": weight[:4]})
    onnx.save(graph, tmp_path / "model.onnx")
    rng = np.random.default_rng(1)
    rows = {
        "user": rng.integers(0, 12, 16),
        "history": rng.integers(0, 12, (16, 3)),
        "minute": rng.integers(-9, 2**40, 16),
    }
    np.savez(tmp_path / "sample.npz", **rows)
    plan = make_plan((), base=Precision.FP32)
    model = TinyModel(tmp_path / "model.onnx", plan, (), tmp_path / "sample.npz")
    artifact = build(model, tmp_path / "e", architecture_of(device), static=1)
    assert artifact.path is not None
    engine = read_engine(tmp_path / artifact.path)
    assert [(p.name, p.minimum, p.maximum) for p in engine.programs] == [("rows4", 4, 4), ("rows8", 8, 8)]
    assert engine.options["static"] == 1
    assert {port.name: port.fits_int32 for port in engine.inputs} == {
        "user": True,
        "history": True,
        "minute": False,
    }
    with InductorBackend().open(artifact, tmp_path / artifact.path) as runner:
        for count in (1, 4, 5, 8, 13, 16):
            asked = {name: value[:count] for name, value in rows.items()}
            past = table[asked["history"]].sum(axis=1)
            timed = (table[asked["user"]] + past) * asked["minute"][:, None].astype(np.float32)
            bound = np.abs(timed) @ np.abs(weight[:4])
            # Sums of four FP32 numbers, twice, in another order.
            assert (np.abs(runner.run(asked)["out"] - timed @ weight[:4]) <= 2e-6 * bound).all()


@pytest.mark.slow
def test_what_makes_a_tensor_also_quantizes_it(tmp_path: Path) -> None:
    """What `core.backends` claims: no kernel writes in BF16 what a Q behind it reads."""
    fusions = fusions_of("inductor")
    w = GraphWriter(Precision.BF16)
    x = w.enter("x")
    h = product(w, x, "first")
    total = h
    for kind in sorted(fusions.quantized_in_place):
        made = operator(w, kind, h, x, f"op/{kind}")
        total = w.op("Add", [total, product(w, made, f"behind/{kind}")], f"sum/{kind}")
    for kind in sorted(fusions.residual_norms):
        residual = w.op("Add", [h, operator(w, "Relu", x, x, f"relu/{kind}")], f"residual/{kind}")
        made = operator(w, kind, residual, x, f"norm/{kind}")
        total = w.op("Add", [total, product(w, made, f"normed/{kind}")], f"total/{kind}")
    w.leave(total)
    path = tmp_path / "model.onnx"
    onnx.save(written(w), path)
    sites = tuple(w.sites)
    plan = make_plan(sites, base=Precision.BF16, fp8=tuple(site.name for site in sites))
    model = TinyModel(path, plan, sites, write_sample(tmp_path / "sample.npz", {"x": (64,)}))
    artifact = build(model, tmp_path / "e", fuse=0)
    assert not artifact.fallbacks
    (program,) = read_engine(tmp_path / "e" / "engine.pt2").programs
    sources = "\n".join(read_sources(tmp_path / "e" / "engine.pt2", program.name))
    # Declared in one file and defined in another.
    kernels = {*re.findall(r"void +(cpp_fused\w+)\(([^)]*)\)", sources)}
    # The CPU multiplies in FP32 what Q and DQ make.
    assert sum(parameters.count("float* out_ptr") for _, parameters in kernels) >= len(sites)
    writes_bf16 = {
        name for name, parameters in kernels if re.search(r"at::BFloat16\* (in_)?out_ptr", parameters)
    }
    # The sum of the products, in parts.
    assert all(re.fullmatch(r"cpp_fused(_+(to_copy|add|\d+))+", name) for name in writes_bf16)

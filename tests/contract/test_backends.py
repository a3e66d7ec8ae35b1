"""Every backend through one suite: build, load, infer, precision really used, refusals, clean directories."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny_models import MlpShape, TinyModel, make_plan, mlp, request_for

from loka_onnx.core import serde
from loka_onnx.core.backends import backend_names
from loka_onnx.core.devices import NVIDIA
from loka_onnx.core.digests import digest_file, digest_files
from loka_onnx.core.engine import BuildStatus, EngineArtifact, SitePrecision
from loka_onnx.core.formats import E5M2, Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.recipe import Recipe
from loka_onnx.engines.base import Backend
from loka_onnx.engines.registry import get_backend
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import ConfigError, EngineError
from loka_onnx.sessions.cuda import list_cuda_devices


@dataclass(frozen=True)
class Subject:
    """A backend, the base of the plans it accepts, and how it spells an FP8 activation and weight."""

    backend: Backend
    device: str
    architecture: str
    base: Precision
    float8: str
    narrow_weight: str


def tensorrt_device() -> tuple[str, str]:
    """Name and architecture of a GPU here, since TensorRT builds for no other; any where there is none."""
    names = {architectures[0]: device for device, architectures in NVIDIA.items()}
    here = [gpu.architecture for gpu in list_cuda_devices() if gpu.architecture in names]
    return (names[here[0]], here[0]) if here else ("nvidia-h100", "sm90")


def told(subject: Subject, site: SitePrecision) -> tuple[str, ...]:
    """Types of both operands; TensorRT's inspector may leave out a weight, which has the activation's."""
    alone = subject.backend.name == "tensorrt" and len(site.operands) == 1
    return site.operands * 2 if alone else site.operands


SUBJECTS = {
    "onnxruntime": (
        *("cpu", "cpu", Precision.FP32),
        *("float8e4m3fn dequantized to float", "float8 weight, folded, dequantized to float"),
    ),
    # Declines FP8; test_onnxruntime_gpu.py holds what it does.
    "onnxruntime_tensorrt": ("nvidia-h100", "sm90", Precision.FP16, "", ""),
    "tensorrt": (*tensorrt_device(), Precision.BF16, "fp8_e4m3", "fp8_e4m3"),
    "tensorrt_rtx": ("nvidia-rtx-ada", "sm89", Precision.BF16, "fp8_e4m3", "fp8_e4m3"),
    # Its reference target: simulated whatever the plan.
    "migraphx": ("cpu", "cpu", Precision.FP32, "fp8e4m3fnuz", "fp8e4m3fnuz"),
    "inductor": ("cpu", "cpu", Precision.FP32, "float8_e4m3fn", "float8_e4m3fn"),
}
SLOW = {"inductor", "tensorrt_rtx"}
"""Backends whose suite takes minutes of C++ compilers, or seconds of a vendor's builder."""
NEEDS = {"onnxruntime_tensorrt": "needs a GPU"}
"""What a backend that cannot build here lacks, where that is not a package of its name."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in backend_names()],
)
def subject(request: pytest.FixtureRequest) -> Subject:
    backend = get_backend(request.param)
    availability = backend.availability()
    if not availability.can_build:
        needs = NEEDS.get(request.param, f"needs {request.param} here")
        pytest.skip(f"{needs}: {availability.reason}")
    return Subject(backend, *SUBJECTS[request.param])


def write_model(
    subject: Subject, folder: Path, *, fp8: bool, base: Precision | None = None, shape: MlpShape | None = None
) -> TinyModel:
    """A model in the form that the subject takes."""
    plan_base = base or subject.base
    draft = mlp(folder / "draft", Precision.FP32, plan_base, fp8=fp8, shape=shape)
    graph_base = subject.backend.base_precision(draft.plan)
    return mlp(folder / "model", graph_base, plan_base, fp8=fp8, shape=shape)


@dataclass(frozen=True)
class Built:
    """An engine for several tests, which write into none of its files; its path starts at the folder."""

    model: TinyModel
    artifact: EngineArtifact
    folder: Path


@pytest.fixture(scope="module")
def built(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Built]:
    """Builds each of the subject's plain models once."""

    @functools.cache
    def get(*, fp8: bool) -> Built:
        folder = tmp_path_factory.mktemp("built")
        model = write_model(subject, folder, fp8=fp8, shape=MlpShape(per_channel=("mlp.fc1",)))
        return Built(model, build(subject, model, folder / "engines" / "e"), folder / "engines")

    return get


def request_of(subject: Subject, model: TinyModel, output: Path) -> BuildRequest:
    where = {"architecture": subject.architecture, "relative_to": output.parent}
    return request_for(model, output, subject.device, **where)


def build(subject: Subject, model: TinyModel, output: Path) -> EngineArtifact:
    artifact = subject.backend.build(request_of(subject, model, output))
    if artifact.status is BuildStatus.DECLINED and not subject.float8 and model.plan.fp8_sites:
        pytest.skip(f"needs a GPU backend that takes FP8: {artifact.detail}")
    assert artifact.is_built, artifact.detail
    return artifact


def test_every_backend_is_in_the_suite_and_unknown_names_list_the_known() -> None:
    assert set(SUBJECTS) == set(backend_names())
    assert [get_backend(name).name for name in backend_names()] == list(backend_names())
    with pytest.raises(ConfigError, match=r"known backends: (?s:.*)onnxruntime, (?s:.*)did you mean"):
        get_backend("tensorrt-rtx")
    with pytest.raises(ConfigError, match="did you mean 'nvidia-rtx-ada'"):
        get_backend("tensorrt_rtx").architectures("nvidia-rtx-adaa")


@pytest.mark.parametrize("fp8", [False, True])
def test_the_artifact_describes_the_file(subject: Subject, built: Callable[..., Built], fp8: bool) -> None:
    found = built(fp8=fp8)
    model, artifact = found.model, found.artifact
    assert artifact.path is not None
    engine = found.folder / artifact.path
    assert artifact.path.parts[0] == "e"
    files = subject.backend.files(engine)
    assert artifact.bytes == sum(file.stat().st_size for file in files)
    assert artifact.digest == (digest_file(engine) if len(files) == 1 else digest_files(files))
    assert artifact.backend_version == subject.backend.availability().version
    assert artifact.portability == subject.backend.portability(subject.architecture)
    assert artifact.build_seconds > 0
    assert (artifact.plan, artifact.target) == (model.plan.id, subject.device)
    assert sorted(p.name for p in found.folder.iterdir()) == ["e", "e.log"]
    assert serde.loads(EngineArtifact, serde.dumps(artifact)) == artifact
    assert (artifact.status is BuildStatus.READY) == (subject.backend.why_not_run(subject.architecture) == "")


@pytest.mark.slow
def test_weights_in_external_data_and_an_operand_without_qdq(subject: Subject, tmp_path: Path) -> None:
    shape = MlpShape(external=True, drop_activation_qdq=("mlp.fc1",))
    model = write_model(subject, tmp_path, fp8=True, shape=shape)
    assert (model.path.parent / "model.onnx.data").is_file()
    artifact = build(subject, model, tmp_path / "e")
    assert [s.site for s in artifact.fallbacks] == ["mlp.fc1"]
    assert subject.float8 not in artifact.fallbacks[0].operands[:1]
    weights = sum(s.k * s.n for s in model.sites)
    assert artifact.bytes > weights
    if artifact.status is BuildStatus.READY:
        assert artifact.path is not None
        engine = tmp_path / artifact.path
        with subject.backend.open(artifact, engine):
            pass
        for file in subject.backend.files(engine)[-1:]:
            file.unlink()
            file.write_bytes(b"altered")
        with pytest.raises(EngineError, match="is not the one that was built"):
            subject.backend.open(artifact, engine)


def test_fp8_is_engaged_where_it_was_planned(subject: Subject, built: Callable[..., Built]) -> None:
    """With one scale for the weights of a site, and with one for each of its channels."""
    artifact = built(fp8=True).artifact
    assert [s.site for s in artifact.sites] == ["mlp.fc0", "mlp.fc1"]
    for site in artifact.sites:
        assert site.planned == "fp8"
        assert site.engaged, site.evidence
        assert told(subject, site) == (subject.float8, subject.narrow_weight)
    assert artifact.simulated == (subject.backend.name in {"onnxruntime", "migraphx", "inductor"})


def test_the_base_precision_is_what_the_engine_runs(subject: Subject, built: Callable[..., Built]) -> None:
    artifact = built(fp8=False).artifact
    kind = {Precision.FP32: "float", Precision.BF16: "bf16", Precision.FP16: "float16"}[subject.base]
    kind = "float32" if subject.backend.name == "inductor" else kind
    assert [told(subject, s) for s in artifact.sites] == [(kind, kind)] * 2
    assert not artifact.fallbacks
    assert artifact.simulated == (subject.backend.name == "migraphx")


def test_what_it_declines_is_not_built(subject: Subject, tmp_path: Path) -> None:
    name, refused = subject.backend.name, Precision.FP32
    if name == "onnxruntime":
        refused = Precision.BF16
    model = write_model(subject, tmp_path, fp8=refused is Precision.FP32, base=refused)
    request = request_of(subject, model, tmp_path / "e")
    if name in {"tensorrt", "tensorrt_rtx"}:
        request = replace(request, architecture={"tensorrt": "sm80", "tensorrt_rtx": "sm86"}[name])
    if name in {"migraphx", "inductor"}:
        request = replace(request, plan=in_e5m2(request.plan))
    artifact = subject.backend.build(request)
    assert (artifact.status, artifact.is_built) == (BuildStatus.DECLINED, False)
    assert artifact.detail == subject.backend.decline(request.plan, request.architecture)
    assert not (tmp_path / "e").exists()


@pytest.mark.slow
def test_a_broken_model_costs_the_candidate(subject: Subject, tmp_path: Path) -> None:
    model = write_model(subject, tmp_path, fp8=False)
    proto = onnx.load(model.path)
    proto.graph.node[1].op_type = "NoSuchOperator"
    onnx.save(proto, model.path)
    artifact = subject.backend.build(request_of(subject, model, tmp_path / "engines" / "e"))
    assert artifact.status is BuildStatus.FAILED
    assert artifact.path is None
    assert "NoSuchOperator" in artifact.detail
    assert sorted(p.name for p in (tmp_path / "engines").iterdir()) == ["e.log"]


def test_inference_agrees_with_the_reference(subject: Subject, built: Callable[..., Built]) -> None:
    reason = subject.backend.why_not_run(subject.architecture)
    if reason:
        pytest.skip(f"needs a GPU: {reason}")
    found = built(fp8=True)
    model, artifact = found.model, found.artifact
    assert artifact.path is not None
    # FP32 sums of 64 and 128 terms of order one differ by their order only; an FP8 step is 0.03. A BF16 sum
    # of order one has a step of 0.008, which can put a term on the other side of one.
    tolerance = 0.05 if subject.base is Precision.BF16 else 2e-5
    with subject.backend.open(artifact, found.folder / artifact.path) as runner:
        for rows in (1, 3, 16):
            got = runner.run(model.rows(rows))["out"]
            assert got.shape == (rows, 32)
            np.testing.assert_allclose(got, model.expected(rows), atol=tolerance)


def test_opening_says_why_where_it_cannot_run(subject: Subject, built: Callable[..., Built]) -> None:
    found = built(fp8=False)
    artifact = found.artifact
    assert artifact.detail == subject.backend.why_not_run(subject.architecture)
    assert artifact.path is not None
    if artifact.status is BuildStatus.READY:
        subject.backend.open(artifact, found.folder / artifact.path).close()
        return
    with pytest.raises(EngineError, match="cannot run here: the engine is for sm89"):
        subject.backend.open(artifact, found.folder / artifact.path)


def test_an_fp8_plan_that_holds_no_fp8_is_declined_on_the_cpu_as_what_it_is() -> None:
    backend = get_backend("onnxruntime")
    bf16 = make_plan((), base=Precision.BF16)
    assert backend.decline(bf16, "cpu") == (
        "the CPU provider has no BF16 products: it would run plan 'bf16' in FP32 between casts"
    )
    assert backend.decline(replace(bf16, id="fp8-safe"), "cpu") == (
        "no site of plan 'fp8-safe' is quantized, which makes it plan 'bf16', and the CPU provider has no "
        "BF16 products: it would run it in FP32 between casts"
    )
    assert backend.decline(replace(make_plan((), base=Precision.FP32), id="fp8-safe"), "cpu") is None


def in_e5m2(plan: PrecisionPlan) -> PrecisionPlan:
    decisions = tuple(replace(d, recipe=Recipe.of(E5M2)) for d in plan.decisions)
    return replace(plan, decisions=decisions)


def test_formats_it_cannot_multiply_are_declined(subject: Subject, tmp_path: Path) -> None:
    plan = in_e5m2(write_model(subject, tmp_path, fp8=True).plan)
    expected = "None" if subject.backend.name == "onnxruntime" else "site 'mlp.fc0' asks for E5M2"
    assert expected in str(subject.backend.decline(plan, subject.architecture))


def test_architectures_of_devices(subject: Subject) -> None:
    assert subject.backend.architectures(subject.device) == (subject.architecture,)
    with pytest.raises(ConfigError, match=rf"'{subject.backend.name}' builds nothing for device 'abacus'"):
        subject.backend.architectures("abacus")

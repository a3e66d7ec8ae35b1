"""Candidates: settings of backends reach them, and a planned model is written once for each form."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small_configs import config_of, plan_of

from loka_onnx.core.backends import Fusions
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.engines.registry import get_backend
from loka_onnx.errors import ConfigError
from loka_onnx.pipeline import candidates
from loka_onnx.pipeline.candidates import Candidate, EngineBuilder
from loka_onnx.pipeline.plans import check_targets
from loka_onnx.pipeline.run import run
from loka_onnx.sessions.backends import fusions_of
from loka_onnx.transforms.precision.apply_plan import PlanForm, PlannedModel


def test_options_reach_the_candidates_of_their_backend_and_device(tmp_path):
    gpu = {
        "device": "nvidia-h100",
        "backends": ["inductor", "tensorrt"],
        "options": {"inductor": {"static": 0, "max_autotune": 1}},
    }
    config = config_of(tmp_path, targets=[gpu, {"device": "cpu", "backends": ["inductor"]}])
    check_targets(config)
    judging = SimpleNamespace(context=SimpleNamespace(config=config))
    builder = EngineBuilder(cast(Any, judging), CorrectionSet())
    given = {(c.target, c.backend.name): c.options for c in builder._candidates(PlanSet((plan_of("fp32"),)))}
    assert given == {
        ("nvidia-h100", "inductor"): {"static": 0, "max_autotune": 1},
        ("nvidia-h100", "tensorrt"): {},
        ("cpu", "inductor"): {},
    }


@pytest.mark.parametrize("asked_for", [False, True])
def test_the_untouched_model_is_built_by_those_that_can(asked_for, tmp_path):
    options = {"inductor": {"static": 0, "fuse": 1}}
    gpu = {"device": "nvidia-h100", "backends": ["inductor", "tensorrt"], "options": options}
    targets = [gpu, {"device": "cpu", "backends": ["inductor", "onnxruntime"]}]
    listed = {"plan": {"plans": ["fp32", "untouched"]}} if asked_for else {}
    config = config_of(tmp_path, targets=targets, **listed)
    judging = SimpleNamespace(context=SimpleNamespace(config=config))
    builder = EngineBuilder(cast(Any, judging), CorrectionSet())
    plans = PlanSet((plan_of("untouched", untouched=True),))
    found = {(c.target, c.backend.name): c.options for c in builder._candidates(plans)}
    own = {"fuse": 0, "max_autotune": 1}
    on_cpu = {("cpu", "inductor"): own} if asked_for else {}
    assert found == {("nvidia-h100", "inductor"): {"static": 0, **own}} | on_cpu


@pytest.mark.parametrize("options", [{"statik": 1}, {"zzz": 1}, {"static": 2}])
def test_a_setting_that_a_backend_lacks_is_refused_at_once(options, tmp_path):
    targets = [
        {"device": "nvidia-h100", "backends": ["inductor"]},
        {"device": "cpu", "backends": ["inductor"], "options": {"inductor": options}},
    ]
    config = config_of(tmp_path, targets=targets)
    with pytest.raises(ConfigError) as caught:
        run(config)
    assert "`targets[1].options.inductor` (device 'cpu')" in caught.value.where
    assert not config.output.exists()


RTX, CPU = "tensorrt_rtx", "onnxruntime"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, PlanForm]]]:
    """Names and forms of the models that were written; none is."""
    forms: list[tuple[str, PlanForm]] = []

    def apply(model: Any, plan: Any, form: PlanForm, target: Path) -> PlannedModel:
        forms.append((target.parent.name, form))
        return PlannedModel(target, "", RewriteLog(()), ())

    monkeypatch.setattr(candidates, "apply_plan", apply)
    yield forms


def builder(folder: Path) -> EngineBuilder:
    # Of the run, only its directory matters here.
    judging = SimpleNamespace(context=SimpleNamespace(directory=SimpleNamespace(path=folder)))
    return EngineBuilder(cast(Any, judging), CorrectionSet())


def candidate(backend: str, *, fp8: bool, base: Precision = Precision.FP32) -> Candidate:
    plan = plan_of("fp8-all", ["fc"], base=base) if fp8 else plan_of("fp32", base=base)
    return Candidate(get_backend(backend), "device", "sm89", plan)


def plan_models(build: EngineBuilder, *wanted: Candidate) -> list[Path]:
    return [build._planned_model(cast(Any, None), each).path for each in wanted]


def test_backends_that_fuse_otherwise_have_models_of_their_own(written, tmp_path):
    first, second = candidate(CPU, fp8=True), candidate(RTX, fp8=True)
    assert first.base is second.base is Precision.FP32
    paths = plan_models(builder(tmp_path), first, second, first, second)
    assert paths == [paths[0], paths[1]] * 2
    assert [name for name, _ in written] == ["fp8-all-fp32", f"fp8-all-fp32-{RTX}"]
    assert [form.fusions for _, form in written] == [fusions_of(CPU), fusions_of(RTX)]


def test_a_plan_without_fp8_is_written_once_for_all(written, tmp_path):
    paths = plan_models(builder(tmp_path), candidate(CPU, fp8=False), candidate(RTX, fp8=False))
    assert paths[0] == paths[1]
    assert [(name, form.fusions) for name, form in written] == [("fp32-fp32", Fusions())]

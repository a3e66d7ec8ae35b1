"""A retrained checkpoint through the decisions of an earlier run, and what happens where they do not hold."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import pytest
from fast8_backend import NO_REFINING, Fast8, Slow
from onnx import numpy_helper as nh
from scipy.special import ndtri
from synthetic_runs import Workplace, make_workplace

import loka_onnx
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineSet
from loka_onnx.core.evaluation import Choice, Evaluation, EvaluationSet
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BuildJob
from loka_onnx.core.lineage import Refresh
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.profile import Profile
from loka_onnx.core.site import HIGH_ERROR
from loka_onnx.engines import registry
from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend
from loka_onnx.engines.onnxruntime.providers import Provider, provider_for
from loka_onnx.errors import ConfigError
from loka_onnx.operations.refresh import refreshing
from loka_onnx.operations.refresh.refreshing import RefreshOptions, refresh
from loka_onnx.pipeline.job_execution import execute_job
from loka_onnx.pipeline.jobs import find_jobs
from loka_onnx.pipeline.run import RunOptions, Stage, run
from loka_onnx.sessions.runner import Runner

pytestmark = pytest.mark.slow

CHOSEN = "cpu-onnxruntime-cpu-fp8-all"
PLAN = {"plans": ["fp32", "fp8-all", "fp8-safe"], "keep": ["heads"]}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A finished run that chose FP8; do not write into it."""
    place = make_workplace(tmp_path_factory.mktemp("earlier") / "work")
    place.write_run_file(plan=PLAN, refine=NO_REFINING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "maker_of", {"onnxruntime": Fast8}.__getitem__)
        result = run(place.run_file)
    # Both FP8 plans are as fast; make the one that is taken certain.
    (target,) = result.choice.targets
    assert target.plan.startswith("fp8")
    choice = Choice((replace(target, engine=CHOSEN, plan="fp8-all", routes=()),))
    serde.write(choice, place.output / "choice.json")
    return place


@pytest.fixture(autouse=True)
def fast8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "maker_of", {"onnxruntime": Fast8}.__getitem__)


def retrained(place: Workplace, path: Path, **factors: float) -> Path:
    """The ranker with some weights multiplied."""
    model = onnx.load(place.path / "ranker.onnx")
    for tensor in model.graph.initializer:
        if tensor.name in factors:
            values = nh.to_array(tensor) * np.float32(factors[tensor.name])
            tensor.CopyFrom(nh.from_array(values, tensor.name))
    onnx.save(model, path)
    return path


def read(kind: Any, directory: Path, name: str) -> Any:
    return serde.read(kind, directory / name)


def _check_half_the_error(refreshed: Evaluation, of_full: Evaluation) -> None:
    """The same estimates; half of the error is left to the full run that a failure would have led to."""
    for one, other in zip(refreshed.outputs, of_full.outputs, strict=True):
        assert one.metrics == other.metrics and one.difference is not None and other.difference is not None
        now, whole = one.difference.judged, other.difference.judged
        assert (now.value, now.confidence, whole.confidence) == (whole.value, 0.975, 0.96)
        wider = ndtri(1 - 0.025 / 2) / ndtri(1 - 0.04 / 2)
        assert now.upper - now.value == pytest.approx(wider * (whole.upper - whole.value), rel=2e-3)


def _confidences(directory: Path) -> set[float]:
    """Of everything that is judged on certification."""
    return {
        output.difference.judged.confidence
        for evaluation in read(EvaluationSet, directory, "evaluation.json").evaluations
        for output in evaluation.outputs
        if evaluation.split == "certification" and output.difference is not None
    }


def test_a_refresh_gives_what_a_full_run_gives_and_says_what_moved(earlier, tmp_path, command):
    """fc1 doubled and fc2 halved, around a Relu: the same outputs by other weights and activations."""
    factors = {"fc1.w": 2.0, "fc1.b": 2.0, "fc2.w": 0.5}
    model = retrained(earlier, tmp_path / "monday.onnx", **factors)
    done = command("refresh", "--run", earlier.output, "--model", model, "--quiet")
    assert done.code == 0, done.err
    assert f"{CHOSEN}, ctr: ΔNE" in done.out and "budget 1.0000%: within" in done.out
    assert "refreshed in " in done.out and "of the run before" in done.out
    directory = shutil.move(earlier.output.with_name("RUN-monday"), tmp_path / "refreshed")
    found = read(Refresh, directory, "refresh.json")
    assert found.fallback == ""
    moves = {move.site: move for move in found.sites}
    assert {site: (move.activation, move.weight) for site, move in moves.items()} == {
        **{f"fc1{part}": (1.0, pytest.approx(2.0)) for part in ("", HIGH_ERROR) if f"fc1{part}" in moves},
        "fc2": (pytest.approx(2.0), pytest.approx(0.5)),
    }
    assert found.sites[-1].site in {"fc1", "fc2"}
    for move in moves.values():
        assert set(move.kl_before) == set(move.kl_now) == {"ctr", "cvr", "spend"}
        for output, now in move.kl_now.items():
            before = move.kl_before[output]
            # The same rounding in powers of two: only the rows differ.
            assert now.lower <= before.upper and before.lower <= now.upper

    # A full run on the new model, with what the earlier one was told: the same plan, the same engine.
    place = Workplace(earlier.path)
    place.write_run_file(plan=PLAN, refine=NO_REFINING, model={"onnx": str(model)})
    full = loka_onnx.load_run_file(place.run_file, {"output": str(tmp_path / "full")})
    run(full)
    place.write_run_file(plan=PLAN, refine=NO_REFINING)
    plans, wanted = (read(PlanSet, d, "plan.json").plan("fp8-all") for d in (directory, tmp_path / "full"))
    assert plans.fp8_sites == wanted.fp8_sites
    for one, other in zip(plans.decisions, wanted.decisions, strict=True):
        assert (one.site, one.activation_scale, one.weight_scale) == (
            other.site,
            other.activation_scale,
            other.weight_scale,
        )
    assert set(plans.predicted_kl) == {"ctr", "cvr", "spend"}
    engines = {e.id: e for e in read(EngineSet, directory, "engines.json").engines}
    assert list(engines) == [CHOSEN], "what was chosen, and nothing else"
    built = {e.id: e for e in read(EngineSet, tmp_path / "full", "engines.json").engines}
    assert engines[CHOSEN].digest == built[CHOSEN].digest

    # Certified on the engine's own outputs; nothing says that its speed was measured.
    evaluations = read(EvaluationSet, directory, "evaluation.json")
    assert {(e.engine, e.split) for e in evaluations.evaluations} == {
        ("reference", "certification"),
        (CHOSEN, "certification"),
    }
    of_full = read(EvaluationSet, tmp_path / "full", "evaluation.json").of(CHOSEN, "certification")
    _check_half_the_error(evaluations.of(CHOSEN, "certification"), of_full)
    assert found.confidence == 0.975
    assert "intervals on certification hold with 97.5%" in (directory / "report.md").read_text()
    assert evaluations.of(CHOSEN, "certification").latencies == ()
    assert [(m.engine, m.output, m.status) for m in found.outputs] == [
        (CHOSEN, name, "within") for name in ("ctr", "cvr", "spend")
    ]
    assert all(move.before is not None for move in found.outputs)
    (choice,) = read(Choice, directory, "choice.json").targets
    assert choice.engine == CHOSEN and "chosen by the run 'RUN'" in choice.reason
    assert choice.losers == ()
    loka_onnx.verify_bundle(directory / "bundle")
    assert "Refreshed from the run 'RUN'" in (directory / "report.md").read_text()

    # The profile is of this model: all sites, ranges from all rows.
    profile, before = read(Profile, directory, "profile.json"), read(Profile, earlier.output, "profile.json")
    assert profile.model_digest != before.model_digest
    assert [s.site for s in profile.sites] == [s.site for s in before.sites]
    assert profile.rows == before.rows
    tensor = next(name for name in before.site("fc2").operands if name in profile.site("fc2").operands)
    assert profile.site("fc2").operands[tensor].amax == 2 * before.site("fc2").operands[tensor].amax


def test_another_structure_is_a_full_run(earlier, tmp_path, command):
    model = onnx.load(earlier.path / "ranker.onnx")
    model.graph.node[3].op_type = "Tanh"
    onnx.save(model, tmp_path / "other.onnx")
    arguments = ("--run", earlier.output, "--model", tmp_path / "other.onnx", "--output", tmp_path / "new")
    refused = command("refresh", *arguments, "--no-fallback", "--quiet")
    assert refused.code == 2
    said = "the structure of the model differs: node 'relu1/relu' is gone; node 'relu1/tanh' is new"
    assert said in refused.err
    done = command("refresh", *arguments, "--force", "--quiet")
    assert done.code == 0, done.err
    assert f"everything was done anew: {said}" in done.out
    found = read(Refresh, tmp_path / "new", "refresh.json")
    assert found.fallback.startswith("the structure") and found.sites == ()
    # Nobody looked at the certification rows before the full run.
    assert found.confidence == 0.95
    assert _confidences(tmp_path / "new") == {0.96}
    assert len(read(PlanSet, tmp_path / "new", "plan.json").plans) == 3
    loka_onnx.verify_bundle(tmp_path / "new" / "bundle")


def test_fp16_that_the_new_weights_do_not_fit_is_not_kept(place, tmp_path, command):
    """The same outputs by activations a thousand times as large: nothing but the FP16 guard can see it."""
    place.write_run_file(plan={**PLAN, "plans": ["fp32", "fp8-all"], "base": "fp16"}, refine=NO_REFINING)
    run(place.run_file)
    factors = {"fc1.w": 1e4, "fc1.b": 1e4, "fc2.w": 1e-4}
    model = retrained(place, tmp_path / "large.onnx", **factors)
    arguments = ("--run", place.output, "--model", model, "--output", tmp_path / "new")
    refused = command("refresh", *arguments, "--no-fallback", "--quiet")
    assert refused.code == 2
    assert "plan 'fp8-all' runs " in refused.err and "in fp16" in refused.err
    assert not (tmp_path / "new" / "bundle").exists()


class Untouching(OnnxRuntimeBackend):
    """Builds the exported model too, in FP32, as if that were the fastest."""

    untouched = MappingProxyType({"int8_tables": 0})

    def decline(self, plan: PrecisionPlan, architecture: str) -> str | None:
        return None if plan.untouched else super().decline(plan, architecture)

    def base_precision(self, plan: PrecisionPlan) -> Precision:
        return Precision.FP32

    def load(self, engine: Path, architecture: str) -> Runner:
        runner = super().load(engine, architecture)
        return runner if "untouched" in str(engine) else Slow(runner)


def test_the_exported_model_is_chosen_and_refreshed_untouched(place, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "maker_of", {"onnxruntime": Untouching}.__getitem__)
    place.write_run_file(plan={"plans": ["fp32", "untouched"]}, refine=NO_REFINING)
    result = run(place.run_file)
    (target,) = result.choice.targets
    assert target.plan == "untouched", target.reason
    model = retrained(place, tmp_path / "monday.onnx", **{"fc1.w": 1.001})
    again = tmp_path / "again"
    assert refresh(place.output, model, RefreshOptions(output=again)).refresh.fallback == ""
    for directory in (place.output, again):
        plan = read(PlanSet, directory, "plan.json").plan("untouched")
        exported = read(ModelArtifact, directory, "model/exported.json")
        assert (plan.untouched, plan.model_digest) == (True, exported.digest)
        assert [decision.site for decision in plan.decisions] == [site.name for site in exported.sites]
        (engine,) = (e for e in read(EngineSet, directory, "engines.json").engines if e.plan == "untouched")
        assert engine.is_built and (directory / "bundle/engines").is_dir()


def test_failed_certification_is_a_full_run_which_goes_on_as_the_second_look(
    earlier, tmp_path, monkeypatch, command
):
    """Resumed, nothing is certified a second time by the refresh, whose engine may come out otherwise."""
    model = retrained(earlier, tmp_path / "tuesday.onnx", **{"heads.w": 1.01})
    arguments = ("--run", earlier.output, "--model", model, "--set", "outputs.0.budget=1e-9")
    refused = command("refresh", *arguments, "--output", tmp_path / "refused", "--no-fallback", "--quiet")
    assert refused.code == 3
    assert f"certification failed: engine '{CHOSEN}', output 'ctr': " in refused.err
    assert "upper bound of ΔNE +" in refused.err and "max_kl" in refused.err
    assert "which counts both looks at the certification rows" in refused.err
    options = RefreshOptions(output=tmp_path / "new", overrides={"outputs.0.budget": 1e-9})

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(refreshing, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            refresh(earlier.output, model, options)
    left = read(Refresh, tmp_path / "new", "refresh.json")
    assert "certification failed" in left.fallback and left.confidence == 0.975
    assert {move.status for move in left.outputs if move.output == "ctr"} <= {"beyond", "undecided"}
    forgetful = command("run", earlier.run_file, "--output", tmp_path / "new", "--resume", "--quiet")
    assert forgetful.code == 2 and "has looked at the certification rows once" in forgetful.err
    assert "remedy: go on with `loka-onnx refresh --resume`" in forgetful.err

    done = command("refresh", *arguments, "--output", tmp_path / "new", "--resume")
    assert done.code == 0, done.err
    assert "everything was done anew: certification failed: engine" in done.out
    stages = [line.split()[1] for line in done.err.splitlines() if line.startswith("✓ ")]
    assert "calibrate" in stages and "refresh" not in stages
    # The full run is the second look at the certification rows.
    found = read(Refresh, tmp_path / "new", "refresh.json")
    assert (found.fallback, found.outputs, found.confidence) == (left.fallback, left.outputs, 0.975)
    assert _confidences(tmp_path / "new") == {0.98}
    assert "may be looked at 2 times for this model" in (tmp_path / "new" / "report.md").read_text()
    (choice,) = read(Choice, tmp_path / "new", "choice.json").targets
    assert choice.plan == "fp32"
    record = (tmp_path / "new" / "run.json").read_text()
    assert '"refresh"' not in record and '"calibrate"' in record


def test_what_cannot_be_refreshed(earlier, tmp_path, command):
    model = retrained(earlier, tmp_path / "m.onnx")
    for arguments, said in (
        (("--run", tmp_path, "--model", model), "is not a finished run\n  evidence: it has no 'run.json'"),
        (("--run", earlier.output, "--model", tmp_path / "no.onnx"), "the retrained model is missing"),
        (
            ("--run", earlier.output, "--model", earlier.run_file),
            "'RUN.yaml' is no ONNX file, and the earlier run began with one",
        ),
        (
            ("--run", earlier.output, "--model", model, "--output", earlier.output),
            "a refresh needs a directory of its own",
        ),
    ):
        done = command("refresh", *arguments)
        assert done.code == 2 and said in done.err, done.err


class Away(Fast8):
    """As `Fast8` on another host, under another name, for a device that this one lacks."""

    name = "inductor"
    devices = {"amd-mi300x": ("cpu",)}  # noqa: RUF012

    def provider(self, architecture: str) -> Provider:
        return provider_for(OnnxRuntimeBackend.spec.name, architecture)

    def build_blocker(self, architecture: str) -> str:
        return "no amd-mi300x on this host"


class There(Away):
    """The same on that host."""

    def build_blocker(self, architecture: str) -> str:
        return ""


def test_a_target_on_another_host_waits_for_its_job(place, tmp_path, monkeypatch):
    place.write_run_file(
        plan={"plans": ["fp32", "fp8-all"]},
        refine=NO_REFINING,
        targets=[
            {"device": "cpu", "backends": ["onnxruntime"]},
            {"device": "amd-mi300x", "backends": ["inductor"]},
        ],
    )
    here, there = ({"onnxruntime": Fast8, "inductor": kind} for kind in (Away, There))

    def executed(directory: Path) -> list[str]:
        monkeypatch.setattr(registry, "maker_of", there.__getitem__)
        jobs = find_jobs(directory / "jobs")
        assert all(read(BuildJob, job, "job.json").timed is not None for job in jobs)
        for job in jobs:
            execute_job(job)
        monkeypatch.setattr(registry, "maker_of", here.__getitem__)
        return [job.name for job in jobs]

    monkeypatch.setattr(registry, "maker_of", here.__getitem__)
    run(place.run_file)
    # Nothing is chosen for the target yet: there is no decision to keep, and none is left out in silence.
    with pytest.raises(ConfigError) as refused:
        refresh(place.output, place.path / "ranker.onnx", RefreshOptions(output=tmp_path / "early"))
    assert "has chosen no engine for amd-mi300x yet" in str(refused.value)
    assert not (tmp_path / "early").exists()
    executed(place.output)
    run(place.run_file, RunOptions(resume=True))
    chosen = [target.engine for target in read(Choice, place.output, "choice.json").targets]
    assert [engine.split("-inductor")[0] for engine in chosen][1] == "amd-mi300x"

    options = RefreshOptions(output=tmp_path / "new")
    model = retrained(place, tmp_path / "next.onnx", **{"fc2.w": 2.0})
    first = refresh(place.output, model, options)
    assert first.refresh.fallback == ""
    assert [t.target for t in read(Choice, tmp_path / "new", "choice.json").targets] == ["cpu"]
    assert chosen[1] in executed(tmp_path / "new")
    again = refresh(place.output, model, replace(options, resume=True))
    assert again.refresh.fallback == ""
    assert [t.engine for t in read(Choice, tmp_path / "new", "choice.json").targets] == chosen
    evaluations = read(EvaluationSet, tmp_path / "new", "evaluation.json")
    # The simulation of its plan stands for it.
    plan = read(Choice, tmp_path / "new", "choice.json").targets[1].plan
    judged = evaluations.of(f"cpu-onnxruntime-cpu-{plan}", "certification")
    assert judged.status == "measured" and judged.is_within_budget


# Of a PyTorch module, from a checkpoint -------------------------------------------------------------


BUILDER = """
import numpy as np
import torch


class Ranker(torch.nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = torch.nn.ModuleList([torch.nn.Embedding(rows, 16) for rows in tables.values()])
        self.fc1 = torch.nn.Linear(16 * len(tables), 32)
        self.head = torch.nn.Linear(32, 1)

    def forward(self, ids):
        rows = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        return self.head(torch.relu(self.fc1(torch.cat(rows, 1)))).squeeze(-1)


def build(tables):
    torch.manual_seed(0)
    return Ranker(tables), {"ids": np.zeros((2, len(tables)), np.int64)}
"""


def test_a_checkpoint_of_a_torch_module(place, tmp_path):
    """Its builder is found beside the run file of the earlier run, wherever the refresh is started.

    The order of the builder's arguments is kept, which may be that of the embedding tables.
    """
    torch = pytest.importorskip("torch", reason="needs torch")
    from safetensors.torch import save_file

    (place.path / "my_ranker.py").write_text(BUILDER)
    layers = {
        "tables.0": torch.nn.Embedding(40, 16),
        "tables.1": torch.nn.Embedding(6000, 16),
        "fc1": torch.nn.Linear(32, 32),
        "head": torch.nn.Linear(32, 1),
    }
    state = {
        f"{layer}.{name}": value
        for layer, part in layers.items()
        for name, value in part.state_dict().items()
    }
    save_file(state, place.path / "sunday.safetensors")
    monday = {name: value * (2.0 if name == "fc1.weight" else 1.0) for name, value in state.items()}
    save_file(monday, tmp_path / "monday.safetensors")
    place.write_run_file(
        model={
            "onnx": None,
            "torch": "my_ranker:build",
            "arguments": {"tables": {"wide": 40, "narrow": 6000}},
            "checkpoint": "sunday.safetensors",
        },
        outputs=[{"name": "ctr", "kind": "logit", "label": "clicked", "budget": 0.05}],
        data={"inputs": {"ids": ["item_id", "request"]}},
        plan={"plans": ["fp32", "fp8-all"]},
        refine=NO_REFINING,
        # Which moves range between weights and activations, by what it measures on each model.
        mods={"smoothing": False},
    )
    run(place.run_file)
    result = refresh(place.output, tmp_path / "monday.safetensors", RefreshOptions(output=tmp_path / "new"))
    assert result.refresh.fallback == ""
    (moved,) = {move.weight for move in result.refresh.sites if "fc1" in move.site}
    assert moved == pytest.approx(2.0)
    # Weights were put into the earlier graph: the bytes that the exporter gives.
    anew = loka_onnx.load_run_file(
        place.run_file,
        {"output": str(tmp_path / "full"), "model.checkpoint": str(tmp_path / "monday.safetensors")},
    )
    run(anew, RunOptions(until=Stage.EXPORT))
    digests = {
        serde.read(ModelArtifact, tmp_path / name / "model/exported.json").digest for name in ("new", "full")
    }
    assert len(digests) == 1

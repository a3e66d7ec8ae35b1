"""Whole small runs: what they leave, how they resume, what they say of each output, how they are signed."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_findings import LAYOUT, STAGES, findings, resumed
from scipy.special import expit
from synthetic_runs import ITEMS, WIDTH, Workplace, scores, tree

import loka_onnx
from loka_onnx.bundle.format.signature import verify_signature
from loka_onnx.bundle.signing import write_key_pair
from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus, EngineSet
from loka_onnx.core.evaluation import BudgetStatus, EvaluationSet, OutputEvaluation
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.data import SplitRule, split_file
from loka_onnx.errors import BundleInvalid, ConfigError
from loka_onnx.graph.model import GraphModel
from loka_onnx.pipeline.run import RunOptions, RunResult, Stage, run
from loka_onnx.transforms.base import Found
from loka_onnx.transforms.linears.pad_sites import PadSites
from loka_onnx.transforms.sequence import STRICT

# What a run leaves beside its record: everything in it must come from a recorded stage, except scratch.
UNRECORDED = ("run.json", "calibration/instrumented/", "calibration/sample.npz")


# What a run leaves ---------------------------------------------------------------------------------


def test_layout(finished):
    assert {path.name for path in finished.directory.iterdir()} == LAYOUT
    engines = {path.name for path in (finished.directory / "engines").iterdir() if path.is_dir()}
    assert engines == {f"cpu-onnxruntime-cpu-{plan}" for plan in ("fp32", "fp8-all", "fp8-safe")}


def test_lineage_holds_for_every_file(finished):
    record = json.loads((finished.directory / "run.json").read_text())["value"]
    stages = record["stages"]
    assert [stage["stage"] for stage in stages] == STAGES
    by_file: dict[str, str] = {}
    for stage in stages:
        assert stage["seconds"] > 0
        for file, digest in stage["files"].items():
            content = (finished.directory / file).read_bytes()
            assert hashlib.sha256(content).hexdigest() == digest
            assert by_file.setdefault(file, stage["stage"]) == stage["stage"]
    on_disk = {
        path.relative_to(finished.directory).as_posix()
        for path in finished.directory.rglob("*")
        if path.is_file()
    }
    assert {file for file in on_disk if not file.startswith(UNRECORDED)} == set(by_file)
    for number, stage in enumerate(stages):
        written = {
            earlier["stage"]: hashlib.sha256(
                json.dumps(earlier["files"], sort_keys=True, separators=(",", ":")).encode()
            ).hexdigest()
            for earlier in stages[:number]
        }
        assert stage["parents"] == written
    assert record["versions"]["loka-onnx"] and record["versions"]["onnxruntime"]
    assert record["config"]["outputs"][0]["weight"] == "importance"


def certification_columns(directory: Path) -> dict[str, np.ndarray]:
    names = (*(f"d{i}" for i in range(WIDTH)), "item_id", "clicked", "bought", "amount", "importance")
    rule = SplitRule(0.2, 0.3, 0.5, "request", 0)
    split = split_file(directory.parents[1] / "rows.parquet", rule, (), names).certification
    batches = [batch.columns for batch in split.batches(1000)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in names}


def of_plan(result: RunResult, plan: str) -> dict[str, OutputEvaluation]:
    evaluation = result.report.evaluation(f"cpu-onnxruntime-cpu-{plan}", "certification")
    return {output.output: output for output in evaluation.outputs}


def test_each_output_is_judged_by_its_own_loss(finished):
    """Against losses computed here in float64 from the weights that the model was made of."""
    rows = certification_columns(finished.directory)
    dense = np.stack([rows[f"d{i}"] for i in range(WIDTH)], axis=1)
    answers = scores(dense, rows["item_id"])

    def entropy(p: np.ndarray, y: np.ndarray) -> np.ndarray:
        return -(y * np.log(p) + (1 - y) * np.log1p(-p))

    def normalized(score: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
        base = np.full_like(score, np.average(y, weights=w))
        loss = np.average(entropy(expit(score), y), weights=w)
        return float(loss / np.average(entropy(base, y), weights=w))

    even = np.ones(len(dense))
    amount = rows["amount"].astype(np.float64)
    expected = {
        "ctr": normalized(answers[:, 0], rows["clicked"], rows["importance"].astype(np.float64)),
        "cvr": normalized(answers[:, 1], rows["bought"], even),
        "spend": float(np.mean((answers[:, 2] - amount) ** 2) / np.var(amount)),
    }
    found = of_plan(finished, "fp32")
    for name, value in expected.items():
        # The model sums 32 products in FP32; the loss averages some thousand rows.
        assert found[name].metrics.normalized_entropy == pytest.approx(value, rel=1e-5)
    unweighted = normalized(answers[:, 0], rows["clicked"], even)
    assert abs(unweighted - expected["ctr"]) > 1e-3, "the weights must matter for this test to say anything"
    assert found["spend"].metrics.auc is None
    assert found["ctr"].metrics.auc is not None and found["ctr"].metrics.auc > 0.6


def test_fp8_changes_outputs_and_never_wins_on_simulated_speed(finished):
    (choice,) = finished.choice.targets
    assert choice.plan == "fp32"
    assert "simulated" in next(loser.reason for loser in choice.losers if loser.engine.endswith("fp8-all"))
    for output in of_plan(finished, "fp8-all").values():
        assert output.difference is not None and output.difference.delta_rmse > 1e-4
        assert output.difference.delta_ne.lower < output.difference.delta_ne.upper
    assert {o.budget_status for o in of_plan(finished, "fp32").values()} == {BudgetStatus.WITHIN}


@pytest.mark.slow
def test_a_declined_plan_is_a_result(place, command):
    place.write_run_file(plan={"plans": ["fp32", "bf16"]})
    done = command("run", place.run_file, "--quiet")
    assert done.code == 0, done.err
    reason = "the CPU provider has no BF16 products: it would run plan 'bf16' in FP32 between casts"
    assert f"– cpu bf16: declined: {reason}\n" in done.out
    fp32, bf16 = serde.read(EngineSet, place.output / "engines.json").engines
    assert (fp32.status, fp32.is_built) == (BuildStatus.READY, True)
    assert (bf16.status, bf16.is_built, bf16.path, bf16.detail) == (BuildStatus.DECLINED, False, None, reason)
    evaluations = serde.read(EvaluationSet, place.output / "evaluation.json")
    assert evaluations.of(bf16.id, "selection").status == "not measured: declined"
    text = " ".join((place.output / "report.md").read_text().replace("\\", "").split())
    assert f"Not chosen: declined: {reason}; Accuracy: not measured: declined." in text
    loka_onnx.verify_bundle(place.output / "bundle")


def test_bundle_answers_like_the_model(finished):
    engine = loka_onnx.load(finished.bundle)
    dense = np.random.default_rng(5).standard_normal((7, WIDTH)).astype(np.float32)
    item = np.arange(7) % ITEMS
    answer = engine.infer({"dense": dense, "item": item})
    expected = scores(dense, item)
    # FP32 against float64 over three layers of at most 32 products.
    np.testing.assert_allclose(answer["ctr"], expected[:, 0], atol=1e-5)
    np.testing.assert_allclose(answer["cvr"], expit(expected[:, 1]), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("least", "most"), [(300, 512), (1, 8)])
def test_engines_for_large_or_small_batches_only(place, least, most):
    """The rows that builds begin with, and those of a bundle's sample, are batches that engines take."""
    batch = {"min": least, "serve": [min(least * 8, most)], "max": most}
    place.write_run_file(plan={"plans": ["fp32"]}, batch=batch)
    bundle = run(place.run_file).bundle
    loka_onnx.verify_bundle(bundle)
    with np.load(bundle / "sample.npz") as sample:
        assert {len(sample[name]) for name in sample.files} == {min(max(16, least), most)}


# Resuming ------------------------------------------------------------------------------------------


def test_a_finished_run_is_taken_over_as_it_is(finished):
    before = tree(finished.directory)
    assert resumed(Workplace(finished.directory.parents[1])) == dict.fromkeys(STAGES, True)
    assert tree(finished.directory) == before


@pytest.mark.slow
def test_what_changed_is_done_again(copied):
    place, before = copied, tree(copied.output)

    # An altered file costs its stage, and what depends on it only if the result differs. The report tells
    # how long each stage took.
    (place.output / "plan.json").write_text("{}")
    again = resumed(place)
    assert [stage for stage in STAGES if not again[stage]] == ["plan", "report", "bundle"]
    assert tree(place.output)["plan.json"] == before["plan.json"]

    # So does a file that does not belong into the bundle.
    (place.output / "bundle" / "extra.txt").write_text("?")
    again = resumed(place)
    assert [stage for stage in STAGES if not again[stage]] == ["bundle"]
    assert not (place.output / "bundle" / "extra.txt").exists()

    # Another budget: everything that it can change, in the same places of the record.
    place.write_run_file(plan={"keep": ["fc1"]})
    again = resumed(place)
    # Whether loud channels pay depends on what is kept.
    assert [stage for stage in STAGES if again[stage]] == ["export", "calibrate", "mods"]
    stages = json.loads((place.output / "run.json").read_text())["value"]["stages"]
    assert [stage["stage"] for stage in stages] == STAGES
    assert [len(stage["parents"]) for stage in stages] == list(range(len(STAGES)))


@pytest.mark.slow
def test_nothing_that_was_measured_on_other_columns_is_taken_over(copied):
    """A corrected `data.inputs` changes what the model sees of the same rows."""
    columns = [f"d{i}" for i in range(WIDTH)]
    swapped = [columns[1], columns[0], *columns[2:]]
    wrong = findings(copied.output)
    copied.write_run_file(data={"inputs": {"dense": swapped, "item": "item_id"}})
    again = resumed(copied)
    assert [stage for stage in STAGES if again[stage]] == ["export"]
    right = findings(copied.output)
    assert right["profile"] != wrong["profile"] and right["evaluations"] != wrong["evaluations"]


@pytest.mark.slow
def test_stage_verbs_share_the_run_directory(place, finished, command):
    place.run_file.rename(place.path / "steps.yaml")
    told = {}
    for stage in Stage:
        if stage is not Stage.BUNDLE:
            options = ["--explain"] if stage is Stage.TRANSFORM else []
            done = command(stage, place.path / "steps.yaml", *options)
            assert done.code == 0, done.err
            # Only its own stage was left to do: every earlier one is reused.
            ended = [line for line in done.err.splitlines() if line.startswith("✓ ")]
            fresh = [line for line in ended if "reused" not in line and "check data" not in line]
            assert len(fresh) <= (3 if stage is Stage.TRANSFORM else 2), done.err
            # Beside the stages there is what to expect of the run, which `export` does not know.
            others = [line for line in done.err.splitlines() if line not in ended]
            expected = [r"about \d+ (s|min) in all \(.+\)"] if stage is not Stage.EXPORT else []
            assert len(others) == len(expected), done.err
            assert all(re.fullmatch(*each) for each in zip(expected, others, strict=True)), done.err
            told[stage] = done.out
    done = command("run", place.path / "steps.yaml", "--resume", "--quiet")
    assert done.code == 0 and done.err == ""
    assert findings(place.path / "runs" / "steps") == findings(finished.directory)
    assert told[Stage.EXPORT].splitlines()[:5] == [
        "site   kind             K      N",
        "fc1    linear          32     32",
        "fc2    linear          32     32",
        "heads  linear          32      3",
        "3 sites, 3 of them linear; opset 21",
    ]
    assert "fuse-layer-norm: 0 applied" in told[Stage.TRANSFORM]
    assert "smooth-by-error: 0 applied" in told[Stage.TRANSFORM]
    assert "lowers the relative FP8 error energy of 'fc2'" in told[Stage.TRANSFORM]
    assert re.search(r"fp8-all   bf16  (\d) of \1", told[Stage.PLAN])
    assert "cpu-onnxruntime-cpu-fp8-all: built and run here" in told[Stage.BUILD]
    assert "steps, cpu: certification" in told[Stage.REPORT]


def test_force_starts_over(copied):
    place = copied
    (place.output / "notes.txt").write_text("mine")
    seen = []
    run(
        place.run_file,
        RunOptions(force=True, until=Stage.EXPORT, on_stage=lambda s, o: seen.append((s, o and o.reused))),
    )
    assert ("export", False) in seen
    assert sorted(path.name for path in place.output.iterdir()) == ["model", "notes.txt", "run.json"]


@pytest.mark.slow
def test_require_fp8(copied, command):
    done = command("run", copied.run_file, "--resume", "--quiet", "--require-fp8")
    assert done.code == 0, done.err

    tight = [arg for i in range(3) for arg in ("--set", f"outputs.{i}.budget=1e-9")]
    done = command("run", copied.run_file, "--resume", "--quiet", "--require-fp8", *tight)
    assert done.code == 3
    lines = done.err.splitlines()
    assert lines[0] == "error: RUN: no FP8 plan is inside the budget"
    assert lines[1].startswith("  evidence: cpu-onnxruntime-cpu-fp8-all, ctr: upper bound of ΔNE +")
    assert lines[2].startswith("  remedy: raise `outputs.budget`")
    assert "bundle" in done.out, "the high-precision engine is emitted all the same"


# Signing ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_signs_its_bundle(copied, tmp_path, command):
    place = copied
    ours, others = (write_key_pair(tmp_path / "keys", name) for name in ("ours", "others"))
    done = command("run", place.run_file, "--resume", "--quiet", "--sign", ours.private)
    assert done.code == 0, done.err
    bundle = place.output / "bundle"
    assert verify_signature(bundle, [ours.public]) == ours.fingerprint
    with pytest.raises(BundleInvalid):
        verify_signature(bundle, [others.public])
    loka_onnx.load(bundle, keys=[ours.public]).close()
    assert command("bundle", "verify", bundle, "--key", others.public).code == 3

    # Nothing is done again for the same key, and the bundle alone for another, or for none.
    before = tree(place.output)
    loka_onnx.run(place.run_file, RunOptions(resume=True, sign=ours.private))
    assert tree(place.output) == before
    loka_onnx.run(place.run_file, RunOptions(resume=True, sign=others.private))
    assert verify_signature(bundle, [others.public]) == others.fingerprint
    loka_onnx.run(place.run_file, RunOptions(resume=True))
    assert not (bundle / "signature.json").exists()
    changed = {name for name, data in tree(place.output).items() if before.get(name) != data}
    assert {name.split("/")[0] for name in changed} <= {"bundle", "run.json"}


def test_a_key_that_cannot_be_read_is_refused_before_anything_is_done(place, tmp_path):
    pair = write_key_pair(tmp_path / "keys")
    for wrong in (pair.public, tmp_path / "absent.key"):
        with pytest.raises(ConfigError):
            loka_onnx.run(place.run_file, RunOptions(sign=wrong))
    assert not place.output.exists()


@pytest.mark.slow
def test_a_mod_that_fails_costs_the_run_nothing_but_the_mod(place, monkeypatch):
    def match(mod: PadSites, model: GraphModel) -> Found[Any]:
        model.graph.nodes.clear()
        raise RecursionError("too deep")

    monkeypatch.delenv(STRICT)
    monkeypatch.setattr(PadSites, "match", match)
    result = run(place.run_file, RunOptions(until=Stage.REPORT))
    log = serde.read(RewriteLog, result.directory / "model" / "mods.json")
    record = next(record for record in log.records if record.transform == PadSites.name)
    assert record.rolled_back
    assert "RecursionError: too deep" in record.declined[0].reason
    assert all("RecursionError: too deep" in file.read_text("utf-8") for file in result.report_files)

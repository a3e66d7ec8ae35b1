"""`loka-onnx compare` and `bundle diff` on the results of a run: figures, messages, exit codes, files."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import WIDTH, make_columns, write_rows

from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.core import serde
from loka_onnx.core.engine import EngineSet
from loka_onnx.core.evaluation import EvaluationSet
from loka_onnx.data import SplitRule, split_file
from loka_onnx.operations.compare.difference import Difference
from loka_onnx.pipeline.run import RunResult

OUTPUTS = ("--output", "ctr=logit", "--output", "cvr=probability", "--output", "spend=regression")
LABELS = ("--label", "ctr=clicked", "--label", "cvr=bought", "--label", "spend=amount")
JUDGED = (*OUTPUTS, *LABELS, "--weight", "ctr=importance", "--group", "request")
INPUTS = ("--inputs", f"dense={','.join(f'd{i}' for i in range(WIDTH))}", "--inputs", "item=item_id")
QUICK = ("--threads", 1, "--seconds", 0.05)


@dataclass(frozen=True)
class Deployed:
    """A finished run, its FP8 engine as a file, and its certification rows."""

    run: RunResult
    bundle: Path
    exported: Path
    fp8: Path
    rows: Path


@pytest.fixture(scope="module")
def deployed(finished: RunResult, tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    """Do not write into its directories."""
    engines = serde.read(EngineSet, finished.directory / "engines.json").engines
    path = next(engine.path for engine in engines if engine.plan == "fp8-all")
    columns = make_columns()
    rule = SplitRule(0.2, 0.3, 0.5, "request", 0)
    whole = finished.directory.parents[1] / "rows.parquet"
    chosen = split_file(whole, rule, (), ("request",)).certification.selection
    keep = chosen.mask(columns["request"])  # type: ignore[union-attr]
    rows = tmp_path_factory.mktemp("rows") / "certification.parquet"
    write_rows(rows, {name: values[keep] for name, values in columns.items()})
    return Deployed(
        finished,
        finished.bundle,
        finished.directory / "model" / "exported.onnx",
        finished.directory / path,
        rows,
    )


def test_the_figures_are_those_of_the_evaluation_of_the_run(deployed, command):
    done = command(
        "compare", deployed.exported, deployed.fp8, "--data", deployed.rows, *JUDGED, *INPUTS,
        "--budget", 0.01, "--no-latency", "--threads", 1, "--format", "json",
    )  # fmt: skip
    found = serde.loads(Difference, done.out)
    recorded = serde.read(EvaluationSet, deployed.run.directory / "evaluation.json").evaluations
    known = next(e for e in recorded if e.plan == "fp8-all" and e.split == "certification")
    assert found.basis.startswith(f"{known.rows:,} rows of ") and known.rows > 2000
    rows = {item.what: item for item in found.rows("accuracy")}
    for output in known.outputs:
        assert output.basis.is_grouped
        ours, theirs = rows[f"{output.output}: NE ({output.kind})"], output.difference.judged
        assert ours.after.numbers == (output.metrics.normalized_entropy,)
        value, lower, upper = ours.verdict.numbers
        # Certification's first attempt is held to a wider interval than a comparison.
        assert value == theirs.value and theirs.lower < lower < upper < theirs.upper
        unit = "value" if output.kind == "regression" else "logit"
        rmse = rows[f"{output.output}: {unit} RMSE"].verdict
        assert rmse is not None and rmse.numbers[0] == pytest.approx(output.difference.delta_rmse, rel=1e-12)
    assert "FP8 simulated" in found.b.facts[1] and done.code in {0, 3}


def test_a_bundle_against_itself_says_who_answered_and_nothing_differs(deployed, command):
    # Columns, group and labels are those of the run that the bundle lies in.
    whole = deployed.run.directory.parents[1] / "rows.parquet"
    done = command(
        "compare", deployed.bundle, deployed.bundle, "--data", whole, "--batch", 8, "--budget", 0.001,
        *QUICK,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert f"columns of the run {deployed.run.directory}" in done.out
    assert "6,000 rows of rows.parquet" in done.out and "rows of one 'request' belong together" in done.out
    for name, kind in (("ctr", "logit"), ("cvr", "probability"), ("spend", "regression")):
        assert f"  {name}: NE ({kind}): " in done.out
    assert done.out.count("  0 % [0 %, 0 %]; within; budget 0.1 %, as asked for") == 3
    assert "Latency, in turns" in done.out


def test_a_budget_that_may_be_exceeded_ends_with_3(deployed, command, tmp_path):
    report = tmp_path / "found.json"
    done = command(
        "compare", deployed.bundle, deployed.fp8, "--data", deployed.rows, "--no-latency",
        "--budget", 1e-9, "--format", "json", "--out", report,
    )  # fmt: skip
    assert done.code == 3
    assert f"{deployed.fp8}: B may cost more than the budget\n  evidence: output 'ctr' of " in done.err
    # What was found is there all the same.
    assert "(budget 1e-07 %" in serde.read(Difference, report).beyond[0]


def test_slices_and_missing_labels_are_in_the_text(deployed, command, tmp_path):
    columns = make_columns(rows=1500, seed=9)
    columns["country"] = np.where(np.arange(1500) % 4 == 0, "BR", "DE")
    live = tmp_path / "live.parquet"
    write_rows(live, {k: v for k, v in columns.items() if k not in {"clicked", "bought", "amount"}})
    done = command(
        "compare", deployed.bundle, deployed.fp8, "--data", live, "--no-latency",
        "--slices", "country",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert (
        "! output 'ctr' is judged without its label: column 'clicked' of 'live.parquet' does not" in done.out
    )
    assert "  ctr: KL (logit): " in done.out and "KL over the mean entropy, no labels" in done.out
    assert "country = DE, 1,125 rows: +" in done.out
    assert "not judged: a regression is judged by its label, and there is none" in done.out
    held = command(
        "compare", deployed.bundle, deployed.bundle, "--data", live, "--no-latency", "--budget", 0.1
    )
    assert held.code == 3
    assert "is not judged: a regression is judged by its label" in held.err


@pytest.mark.slow
def test_inputs_that_no_column_feeds_end_with_2(deployed, command, tmp_path):
    # Away from its run a bundle does not know the columns.
    lonely = tmp_path / "lonely"
    shutil.copytree(deployed.bundle, lonely)
    done = command("compare", lonely, lonely, "--data", deployed.rows, "--no-latency")
    assert done.code == 2 and "column 'dense' of 'certification.parquet' does not exist" in done.err
    given = command("compare", lonely, lonely, "--data", deployed.rows, "--no-latency", *INPUTS)
    assert given.code == 0 and "independent rows; columns as asked for" in given.out
    named = command(
        "compare", lonely, lonely, "--data", deployed.rows, "--no-latency",
        "--run", deployed.run.directory,
    )  # fmt: skip
    assert named.code == 0 and "rows of one 'request' belong together" in named.out
    # A manifest that the run did not write is no bundle of it.
    foreign = tmp_path / "run"
    foreign.mkdir()
    shutil.copy(deployed.run.directory / "run.json", foreign)
    shutil.copytree(deployed.bundle, foreign / "bundle")
    text = (foreign / "run.json").read_text(encoding="utf-8")
    known = json.loads(text)["value"]["stages"][-1]["files"]["bundle/manifest.json"]
    (foreign / "run.json").write_text(text.replace(known, "0" * 64), encoding="utf-8")
    done = command("compare", foreign / "bundle", lonely, "--data", deployed.rows, "--no-latency")
    assert done.code == 2 and "column 'dense'" in done.err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--output", "ctr=click"), "--output 'ctr=click': --output cannot be read"),
        (("--label", "ctr=clickd"), "column 'clickd' of 'certification.parquet' does not exist"),
        (("--output", "cta=logit"), "--output: there is no output 'cta'"),
        (("--label", "ctr="), "--label 'ctr=': --label cannot be read"),
        (("--inputs", "dense"), "--inputs '=dense': --inputs cannot be read"),
        (("--inputs", "dance=d0"), "the model has no input 'dance'"),
        (("--run", "/nowhere"), "--run /nowhere: there is no run directory"),
        (("--batch", 100_000), "--batch: A and B do not both take 100000 rows"),
        (("--budget", -1), "--budget: a budget of -1.0 cannot be held"),
    ],
)
def test_wrong_options_end_with_2(deployed, command, option, message):
    done = command(
        "compare", deployed.bundle, deployed.bundle, "--data", deployed.rows, "--no-latency", *option
    )
    assert done.code == 2 and message in done.err and "remedy: " in done.err


# bundle diff ---------------------------------------------------------------------------------------


def test_bundle_diff_of_others_exits_with_3_only_where_that_was_asked_for(deployed, command, tmp_path):
    other = tmp_path / "signed"
    shutil.copytree(deployed.bundle, other)
    done = command("bundle", "diff", deployed.bundle, other, "--exit-code")
    assert done.code == 0 and done.out.endswith("the bundles are equal\n")
    keys = write_key_pair(tmp_path)
    sign_bundle(other, keys.private)
    done = command("bundle", "diff", deployed.bundle, other)
    assert done.code == 0 and "\nsignature: 1 changed\n  ~ signed with: [] → [" in done.out
    assert f"signed with {keys.fingerprint}" in done.out
    done = command("bundle", "diff", deployed.bundle, other, "--exit-code", "--format", "json")
    assert (done.code, done.err) == (3, "")
    found = serde.loads(Difference, done.out)
    assert found.is_different and keys.fingerprint in found.b.facts[1]
    (other / "extra").write_text("x")
    done = command("bundle", "diff", deployed.bundle, other)
    assert done.code == 3 and "file 'extra' is not listed in the manifest" in done.err

import dataclasses
import json
from pathlib import Path

import pytest
from sample_run import SampleRun

from loka_onnx.bundle import write_bundle
from loka_onnx.bundle.mlflow_log import MANIFEST_TAG, log_to_mlflow, metrics_of, parameters_of
from loka_onnx.core.digests import digest_file
from loka_onnx.core.evaluation import Latency
from loka_onnx.core.throughput import CHOSEN, Throughput, ThroughputSet
from loka_onnx.errors import BundleError, MissingPackage, UserError
from loka_onnx.report import render
from loka_onnx.sessions.bundle_archive import write_archive
from loka_onnx.sessions.bundle_files import verify_bundle

pytestmark = pytest.mark.filterwarnings("ignore:.*filesystem.*backend:FutureWarning")


@pytest.fixture
def bundle(sample: SampleRun, tmp_path: Path) -> Path:
    judged = {e.engine: e for e in sample.report.evaluations.evaluations if e.outputs}
    engine = next(e for e in sample.contents.engines if e.artifact.id in judged)
    measured = dataclasses.replace(
        judged[engine.artifact.id], latencies=(Latency(256, 101.5, 110.0, 120.25, 200, "cpu", True),)
    )
    engine = dataclasses.replace(engine, evaluation=measured)
    load = Throughput(
        engine.artifact.id, engine.artifact.plan, "cpu", CHOSEN, 256, 1, 1000.0, 0.95, 0, 900.0, 800.0, ()
    )
    other = dataclasses.replace(load, engine="not-in-the-bundle")
    facts = dataclasses.replace(sample.report, throughput=ThroughputSet((load, other)))
    report = render(facts, tmp_path / "report")
    contents = dataclasses.replace(sample.contents, engines=(engine,), report=tuple(report))
    return write_bundle(contents, tmp_path / "bundle")


@pytest.fixture
def uri(tmp_path, monkeypatch) -> str:
    # The only store that mlflow-skinny has without a database and without a server.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return (tmp_path / "mlruns").as_uri()


def test_metrics_are_those_of_the_manifest(bundle):
    manifest = verify_bundle(bundle)
    engine = manifest.engines[0]
    assert engine.evaluation is not None
    output = engine.evaluation.outputs[0]
    found = metrics_of(bundle, manifest)
    assert output.difference is not None
    assert output.difference.delta_ne is not None
    assert found[f"{engine.id}/ctr/delta_ne"] == output.difference.delta_ne.value
    assert found[f"{engine.id}/ctr/delta_ne_lower"] == output.difference.delta_ne.lower
    assert found[f"{engine.id}/ctr/delta_ne_upper"] == output.difference.delta_ne.upper
    assert found[f"{engine.id}/batch_256/latency_p50_us"] == 101.5
    assert found[f"{engine.id}/batch_256/latency_p99_us"] == 120.25
    assert found[f"{engine.id}/batch_256/requests_per_s"] == 800.0
    assert found[f"{engine.id}/batch_256/rows_per_s"] == 800.0 * 256
    plans = json.loads((bundle / "plans.json").read_text())["value"]["plans"]
    assert found[f"{engine.id}/fp8_share"] == next(p for p in plans if p["id"] == engine.plan)["fp8_share"]
    assert not [name for name in found if "not-in-the-bundle" in name]
    assert found["bytes"] == manifest.total_bytes


def test_a_run_holds_parameters_metrics_and_artifacts(bundle, uri):
    from mlflow.tracking import MlflowClient

    logged = log_to_mlflow(bundle, "rankers", tracking_uri=uri)
    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(logged.run_id)
    manifest = verify_bundle(bundle)
    assert run.info.status == "FINISHED"
    assert run.data.tags[MANIFEST_TAG] == digest_file(bundle / "manifest.json")
    assert run.data.metrics == pytest.approx(metrics_of(bundle, manifest))
    assert run.data.params == parameters_of(manifest)
    assert run.data.params["model_digest"] == manifest.model_digest
    assert {a.path for a in client.list_artifacts(logged.run_id)} == {"manifest.json", "plans.json", "report"}
    report = {a.path for a in client.list_artifacts(logged.run_id, "report")}
    assert report == {"report/report.json", "report/report.md", "report/report.html"}
    copy = client.download_artifacts(logged.run_id, "manifest.json")
    assert Path(copy).read_bytes() == (bundle / "manifest.json").read_bytes()


def test_a_bundle_is_logged_once(bundle, uri):
    first = log_to_mlflow(bundle, "rankers", tracking_uri=uri, run_name="nightly")
    again = log_to_mlflow(bundle, "rankers", tracking_uri=uri)
    assert (first.is_new, again.is_new, again.run_id) == (True, False, first.run_id)
    assert log_to_mlflow(bundle, "others", tracking_uri=uri).is_new


def test_the_single_file_form_is_the_same_bundle(bundle, uri, tmp_path):
    archive = tmp_path / "ranker.loka"
    write_archive(bundle, archive)
    first = log_to_mlflow(archive, "rankers", tracking_uri=uri)
    again = log_to_mlflow(bundle, "rankers", tracking_uri=uri)
    assert (first.is_new, again.is_new, again.run_id) == (True, False, first.run_id)


def test_a_run_that_broke_off_is_failed_and_logged_anew(bundle, uri, monkeypatch):
    from mlflow.tracking import MlflowClient

    def refuse(*_):
        raise RuntimeError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_artifact", refuse)
        with pytest.raises(
            BundleError, match=r"could not be logged to MLflow\n  evidence: RuntimeError: no room"
        ):
            log_to_mlflow(bundle, "rankers", tracking_uri=uri)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("rankers")
    assert experiment is not None
    assert [r.info.status for r in client.search_runs([experiment.experiment_id])] == ["FAILED"]
    assert log_to_mlflow(bundle, "rankers", tracking_uri=uri).is_new


def test_a_store_that_this_mlflow_lacks(bundle, monkeypatch):
    with pytest.raises(UserError, match="MLflow does not take the tracking URI") as caught:
        log_to_mlflow(bundle, "x", tracking_uri="nosuch://me:s3cr3t@here")
    assert "s3cr3t" not in str(caught.value)


def test_without_mlflow_it_says_what_to_install(bundle, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(MissingPackage, match=r"pip install 'loka-onnx\[mlflow\]'"):
        log_to_mlflow(bundle, "x")

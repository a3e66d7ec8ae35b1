"""What a bundle says of itself → a run in MLflow: parameters, metrics, the manifest and the report.

Everything is read from the verified bundle; nothing is measured here. A bundle is named by the digest of its
manifest, as in a registry, so that logging it twice gives one run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka_onnx.bundle.registry.layout import without_secrets
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_file
from loka_onnx.core.evaluation import Evaluation
from loka_onnx.core.manifest import MANIFEST_NAME, Manifest
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.throughput import ThroughputSet
from loka_onnx.errors import BundleError, LokaError, MissingPackage, UserError
from loka_onnx.sessions.bundle_archive import is_archive, unpacked
from loka_onnx.sessions.bundle_files import verify_bundle

MANIFEST_TAG = "loka_onnx.manifest"
"""Tag of a run: SHA-256 of the manifest of the bundle."""

_MAX_PARAMETER_CHARACTERS = 500
_NOT_OF_A_KEY = re.compile(r"[^A-Za-z0-9_./ -]")


@dataclass(frozen=True)
class LoggedRun:
    """A run in MLflow.

    Attributes:
        run_id: Its id.
        experiment_id: Id of its experiment.
        is_new: False where the bundle had been logged to this experiment before.
        metrics: How many metrics were logged.
    """

    run_id: str
    experiment_id: str
    is_new: bool
    metrics: int


def log_to_mlflow(
    bundle: Path, experiment: str, *, tracking_uri: str | None = None, run_name: str | None = None
) -> LoggedRun:
    """Logs a bundle as a run.

    Parameters name the model, and of each engine its backend, version, plan and architecture. Metrics of
    an engine begin with its id: ``fp8_share``, ``bytes``; per output ``<output>/delta_ne`` with its
    ``_lower`` and ``_upper`` end (or ``kl``, without labels), ``normalized_entropy``, ``auc``,
    ``prediction_ratio``; per batch size ``batch_<rows>/latency_p50_us``, ``_p90_us`` and ``_p99_us``, and
    ``batch_<rows>/requests_per_s`` where load was measured. Artifacts are the manifest, the plans and the
    report.

    Args:
        bundle: Directory of the bundle, or its single-file form.
        experiment: Name of the experiment; made when absent.
        tracking_uri: MLflow's tracking server or store; MLflow's own settings (``MLFLOW_TRACKING_URI``) by
            default.
        run_name: Name of the run; the first 12 digits of the digest by default.

    Raises:
        BundleInvalid: The bundle does not verify.
        MissingPackage: MLflow is not installed.
        UserError: MLflow does not take the tracking URI.
        BundleError: MLflow cannot be reached, or refuses.
    """
    if is_archive(bundle):
        with unpacked(bundle) as directory:
            return log_to_mlflow(directory, experiment, tracking_uri=tracking_uri, run_name=run_name)
    manifest = verify_bundle(bundle)
    digest = digest_file(bundle / MANIFEST_NAME)
    client = _client(tracking_uri)
    try:
        return _log(client, bundle, manifest, _Labels(experiment, run_name or digest[:12], digest))
    except LokaError:
        raise
    except Exception as error:
        raise BundleError(
            "the bundle could not be logged to MLflow",
            where=f"experiment '{experiment}'",
            evidence=_said(error, tracking_uri),
            remedy="check the tracking URI and that its server runs; logging again begins a new run",
        ) from None


@dataclass(frozen=True)
class _Labels:
    experiment: str
    run_name: str
    digest: str


def _log(client: Any, bundle: Path, manifest: Manifest, labels: _Labels) -> LoggedRun:
    found = client.get_experiment_by_name(labels.experiment)
    experiment = found.experiment_id if found else client.create_experiment(labels.experiment)
    earlier = client.search_runs(
        [experiment], f"tags.\"{MANIFEST_TAG}\" = '{labels.digest}' and attributes.status = 'FINISHED'"
    )
    if earlier:
        return LoggedRun(earlier[0].info.run_id, experiment, is_new=False, metrics=0)
    tags = {MANIFEST_TAG: labels.digest, "loka_onnx.created_by": manifest.created_by}
    run = client.create_run(experiment, tags=tags, run_name=labels.run_name).info.run_id
    try:
        for name, value in parameters_of(manifest).items():
            client.log_param(run, name, value)
        metrics = metrics_of(bundle, manifest)
        for name, number in metrics.items():
            client.log_metric(run, name, number)
        for path in (MANIFEST_NAME, manifest.plans, *manifest.report):
            client.log_artifact(run, os.fspath(bundle / path), "report" if path in manifest.report else None)
    except BaseException:
        # Otherwise it would look as if it were still being logged.
        client.set_terminated(run, "FAILED")
        raise
    client.set_terminated(run)
    return LoggedRun(run, experiment, is_new=True, metrics=len(metrics))


def parameters_of(manifest: Manifest) -> dict[str, str]:
    """Parameters of a run: what was built, of what, with what."""
    found = {"model_digest": manifest.model_digest, "created_by": manifest.created_by}
    for entry in manifest.candidates:
        about = {
            "backend": entry.backend,
            "backend_version": entry.version,
            "plan": entry.plan,
            "target": entry.target,
            "architecture": entry.architecture,
            "simulated": str(entry.simulated).lower(),
        }
        found |= {f"{entry.id}/{name}": value for name, value in about.items()}
    found |= {f"version/{name}": version for name, version in manifest.versions.items()}
    found |= {f"reason/{choice.target}": choice.reason for choice in manifest.choice.targets}
    return {_key(name): value[:_MAX_PARAMETER_CHARACTERS] for name, value in found.items()}


def metrics_of(bundle: Path, manifest: Manifest) -> dict[str, float]:
    """Metrics of a run, from a verified bundle; what was not measured is left out."""
    plans = serde.read(PlanSet, bundle / manifest.plans)
    shares = {plan.id: plan.fp8_share for plan in plans.plans}
    found: dict[str, float] = {"bytes": manifest.total_bytes}
    for entry in manifest.candidates:
        about = {"bytes": float(entry.bytes)}
        if entry.plan in shares:
            about["fp8_share"] = shares[entry.plan]
        if entry.evaluation is not None:
            about |= dict(_measured(entry.evaluation))
        found |= {f"{entry.id}/{name}": value for name, value in about.items()}
    found |= dict(_throughput(bundle, manifest))
    return {_key(name): value for name, value in found.items()}


def _measured(evaluation: Evaluation) -> Iterator[tuple[str, float]]:
    for output in evaluation.outputs:
        difference = output.difference
        if difference is not None:
            name = "kl" if difference.delta_ne is None else "delta_ne"
            judged = difference.judged
            yield f"{output.output}/{name}", judged.value
            yield f"{output.output}/{name}_lower", judged.lower
            yield f"{output.output}/{name}_upper", judged.upper
            for guard in output.guards:
                measured = difference.guarded(guard.name)
                if measured is not None:
                    yield f"{output.output}/{guard.name}_upper", measured.upper
                    yield f"{output.output}/{guard.name}", guard.limit
        yield f"{output.output}/budget", output.budget
        for name in ("normalized_entropy", "auc", "prediction_ratio"):
            value = getattr(output.metrics, name)
            if value is not None:
                yield f"{output.output}/{name}", value
    for latency in evaluation.latencies:
        for name in ("p50_us", "p90_us", "p99_us"):
            yield f"batch_{latency.batch}/latency_{name}", getattr(latency, name)


def _throughput(bundle: Path, manifest: Manifest) -> Iterator[tuple[str, float]]:
    """Requests per second of the bundle's engines, which its report holds and its manifest does not."""
    ids = {entry.id for entry in manifest.engines}
    for path in manifest.report:
        if not path.endswith(".json"):
            continue
        document = json.loads((bundle / path).read_text(encoding="utf-8"))
        value = document.get("value", {}).get("throughput") if isinstance(document, dict) else None
        if value is None:
            continue
        text = json.dumps({"schema": serde.schema_id(ThroughputSet), "value": value})
        for result in serde.loads(ThroughputSet, text, where=path).measurements:
            if result.engine in ids and not result.failure:
                yield f"{result.engine}/batch_{result.batch}/requests_per_s", result.requests_per_s
                yield f"{result.engine}/batch_{result.batch}/rows_per_s", result.rows_per_s


def _key(name: str) -> str:
    return _NOT_OF_A_KEY.sub("_", name)


def _client(tracking_uri: str | None) -> Any:
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise MissingPackage(
            "MLflow is not installed", evidence=str(error), remedy="pip install 'loka-onnx[mlflow]'"
        ) from error
    try:
        return MlflowClient(tracking_uri=tracking_uri)
    except Exception as error:
        raise UserError(
            "MLflow does not take the tracking URI",
            evidence=_said(error, tracking_uri),
            remedy="give the address of a tracking server, http://…; a sqlite:// or other database needs the "
            "whole package, pip install mlflow",
        ) from None


def _said(error: Exception, tracking_uri: str | None) -> str:
    """What MLflow says, without the password of a server; its traceback may show it, and is left out too."""
    text = f"{type(error).__name__}: {str(error).strip()}"
    for uri in (tracking_uri or "", os.environ.get("MLFLOW_TRACKING_URI", "")):
        text = without_secrets(text, uri)
    return text[:500]

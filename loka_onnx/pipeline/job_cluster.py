"""Build jobs on the nodes of a Ray cluster that have the device.

A node offers a device as a custom resource of its name (``ray start --resources '{"nvidia-h100": 1}'``); a
job takes one of it, so that no more jobs run on a node than it has devices. As with calibration
(`calibration.passes.ray_executor`), nodes reach the run directory under the same path, and have this package
in the same version. What a job does happens in a child process there, as it would here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from loka_onnx.core.progress import Progress
from loka_onnx.errors import EngineError, LokaError, MissingPackage
from loka_onnx.pipeline.job_execution import execute_job

POLL_SECONDS = 1.0


def execute_on_cluster(jobs: Mapping[Path, str], address: str | None, progress: Progress) -> dict[Path, str]:
    """Execute jobs, each on a node that has its device.

    Args:
        address: As in ``10.0.0.5:6379``; None for the cluster that this machine belongs to. A connection
            that this process already has is used as it is.

    Returns:
        Why a job has no result, by directory: no node has the device, or what went wrong on it. Jobs that
        left a result, that of a failed build included, are not in it.

    Raises:
        EngineError: No cluster answers.
        MissingPackage: Ray is not installed.
    """
    ray = _import_ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(ray, address)
    waiting: dict[Any, Path] = {}
    failures: dict[Path, str] = {}
    try:
        offered = ray.cluster_resources()
        task = ray.remote(num_cpus=1, max_retries=0)(_execute)
        for directory, device in jobs.items():
            if offered.get(device, 0) < 1:
                failures[directory] = f"no node of the Ray cluster has the resource '{device}'"
                continue
            waiting[task.options(resources={device: 1}).remote(str(directory))] = directory
        total = len(waiting)
        while waiting:
            progress("build jobs on the cluster", total - len(waiting), total)
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL_SECONDS)
            for reference in done:
                directory = waiting.pop(reference)
                if failure := _failure(ray, reference):
                    failures[directory] = failure
    finally:
        for reference in waiting:
            with suppress(Exception):
                ray.cancel(reference, force=True)
        if is_ours:
            ray.shutdown()
    return failures


def _failure(ray: Any, reference: Any) -> str:
    """Error of a task; empty if it succeeded."""
    try:
        found: str = ray.get(reference)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{type(error).__name__}: {lines[-1].strip()[:400]}"
    return found


def _execute(directory: str) -> str:
    """In a worker: execute a job; returns what this node cannot do, and raises nothing of its own making."""
    try:
        execute_job(Path(directory))
    except LokaError as error:
        return str(error)
    return ""


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingPackage(
            "E1506 Ray is not installed",
            evidence=str(error),
            remedy="pip install 'loka-onnx[ray]', or leave out `build.executor` and carry the jobs yourself",
        ) from error
    return ray


def _connect(ray: Any, address: str | None) -> None:
    # Ray reports its use to its makers unless told otherwise.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, _, port = (address or "").rpartition(":")
    try:
        if port.isdecimal():
            # Where nothing listens, Ray itself takes minutes to say so.
            socket.create_connection((host, int(port)), timeout=10.0).close()
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise EngineError(
            f"E1507 no Ray cluster answers at '{address or 'auto'}'",
            evidence=(str(error).strip().splitlines() or [type(error).__name__])[0][:400],
            remedy="correct `build.ray_address`, or leave out `build.executor`: jobs then wait in `jobs/`",
        ) from error

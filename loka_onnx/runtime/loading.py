"""Choosing an engine of a bundle that this host can run.

ONNX models are data: loading one runs only operators that ONNX Runtime brings along. An engine that holds
native code must not be loaded on the digest alone, because a digest does not say who made it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.errors import EngineError, LokaError
from loka_onnx.runtime.engine import Engine, Skipped
from loka_onnx.sessions.bundle_files import read_sample, verify_bundle
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

_LOG = logging.getLogger("loka_onnx.runtime")


def load(bundle: Path, options: SessionOptions | None = None) -> Engine:
    """Verifies a bundle and loads the first of its engines that runs here and passes its self-test.

    Engines are tried in the order of the manifest, the FP32 model last. Each one that is passed over is
    logged as a warning with its reason, and listed in `Engine.skipped`.

    Args:
        bundle: Directory of the bundle.
        options: How a session runs.

    Returns:
        An engine that has just reproduced its expected outputs.

    Raises:
        BundleInvalid: The bundle does not verify.
        EngineError: Nothing in it runs here, not even the FP32 model.
    """
    manifest = verify_bundle(bundle)
    skipped: list[Skipped] = []
    for entry in manifest.candidates:
        try:
            engine = _open(bundle, manifest, entry, options or SessionOptions(), tuple(skipped))
        except LokaError as error:
            skipped.append(Skipped(entry.id, str(error)))
            _LOG.warning("%s: engine '%s' is not used: %s", bundle, entry.id, error)
            continue
        if entry == manifest.fallback:
            _LOG.warning("%s: no emitted engine runs here; serving the FP32 model", bundle)
        _LOG.info("%s: engine '%s' is ready", bundle, entry.id)
        return engine
    raise EngineError(
        "no engine of the bundle runs here",
        where=str(bundle),
        evidence="; ".join(f"'{s.engine}': {s.reason}" for s in skipped),
        remedy="see `loka-onnx doctor` for what this host can run",
    )


def _open(
    bundle: Path,
    manifest: Manifest,
    entry: EngineEntry,
    options: SessionOptions,
    skipped: tuple[Skipped, ...],
) -> Engine:
    if entry.backend != "onnxruntime" or entry.architecture != "cpu":
        raise EngineError(
            f"this loader runs ONNX Runtime engines on the CPU; "
            f"this one is for {entry.backend} on {entry.architecture}"
        )
    sample = read_sample(bundle, manifest, entry)
    session = OnnxSession(bundle / entry.path, options)
    engine = Engine(manifest, entry, session, sample, skipped)
    health = engine.health()
    if not health.ready:
        raise EngineError("the self-test fails", evidence=health.detail)
    return engine

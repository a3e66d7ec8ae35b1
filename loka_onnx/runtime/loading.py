"""Choosing an engine of a bundle that this host can run.

ONNX models are data: loading one runs only operators that ONNX Runtime brings along. A TensorRT engine is a
program, and a digest does not say who made it: such engines are passed over unless the caller vouches for the
bundle's origin.
"""

from __future__ import annotations

import logging
from pathlib import Path

from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.core.split import Part
from loka_onnx.errors import ConfigError, EngineError, InternalError, LokaError
from loka_onnx.runtime.engine import Engine, Skipped
from loka_onnx.sessions.bundle_files import read_sample, verify_bundle
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Runner
from loka_onnx.sessions.split_runner import SplitRunner
from loka_onnx.sessions.tensorrt_session import open_tensorrt_rtx

_LOG = logging.getLogger("loka_onnx.runtime")


def load(
    bundle: Path,
    options: SessionOptions | None = None,
    *,
    trust_programs: bool = False,
    part: Part | str = Part.WHOLE,
) -> Engine:
    """Verifies a bundle and loads the first of its engines that runs here and passes its self-test.

    Engines are tried in the order of the manifest, the FP32 model last. Each one that is passed over is
    logged as a warning with its reason, and listed in `Engine.skipped`.

    Where the model was cut at its embeddings, the lookup model runs in ONNX Runtime on the CPU before the
    engine, and requests are those of the whole. With ``part="dense"`` the lookup model and its tables are
    verified, not loaded: requests hold looked-up rows, of a parameter server for example, in place of ids
    (`Engine.inputs` lists them). The FP32 model takes ids, so it does not stand in then.

    Args:
        bundle: Directory of the bundle.
        options: How an ONNX Runtime session runs.
        trust_programs: Whether the bundle comes from someone who may run code on this host. Engines that
            are programs (TensorRT) are passed over without it.
        part: ``whole`` for the model's own inputs, ``dense`` for looked-up rows.

    Returns:
        An engine that has just reproduced its expected outputs.

    Raises:
        BundleInvalid: The bundle does not verify.
        EngineError: Nothing in it runs here, not even the FP32 model.
        ConfigError: There is no such part.
    """
    wanted = _part(part)
    manifest = verify_bundle(bundle)
    skipped: list[Skipped] = []
    for entry in manifest.candidates:
        try:
            sample = read_sample(bundle, manifest, entry)
            _check_part(entry, wanted)
            runner = _open(bundle, entry, options, trust_programs=trust_programs)
            if entry.part is Part.DENSE and wanted is Part.WHOLE:
                runner = _with_lookup(bundle, manifest, runner, options)
            engine = _tested(Engine(manifest, entry, runner, sample, tuple(skipped), wanted))
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
    bundle: Path, entry: EngineEntry, options: SessionOptions | None, *, trust_programs: bool
) -> Runner:
    path = bundle / entry.path
    if entry.backend == "onnxruntime" and entry.architecture == "cpu":
        return OnnxSession(path, options)
    if entry.backend != "tensorrt_rtx":
        raise EngineError(f"this loader runs no engine of {entry.backend} on {entry.architecture}")
    if not trust_programs:
        raise EngineError(
            f"this engine of {entry.backend} on {entry.architecture} is a program",
            evidence="loading it compiles the kernel source in it; a digest does not say who made it",
            remedy="pass `trust_programs=True` when the bundle comes from who may run code here",
        )
    return open_tensorrt_rtx(path, entry.architecture, entry.version)


def _part(name: Part | str) -> Part:
    try:
        return Part(name)
    except ValueError:
        known = " and ".join(f"'{part}'" for part in Part)
        raise ConfigError(f"there is no part '{name}' to load", evidence=f"there are {known}") from None


def _check_part(entry: EngineEntry, wanted: Part) -> None:
    if wanted is Part.DENSE and entry.part is Part.WHOLE:
        raise EngineError(
            "this engine takes ids, not looked-up rows",
            remedy="load the whole, or build with `model.split_sparse: true`",
        )


def _with_lookup(
    bundle: Path, manifest: Manifest, dense: Runner, options: SessionOptions | None
) -> SplitRunner:
    if manifest.cut is None:
        raise InternalError("an engine takes looked-up rows, and the manifest has no cut", where=str(bundle))
    threads = 0 if options is None else options.threads
    try:
        # Tables stay on the CPU whatever runs the dense part.
        lookup = OnnxSession(bundle / manifest.cut.lookup, SessionOptions(threads=threads))
    except BaseException:
        dense.close()
        raise
    return SplitRunner(lookup, dense)


def _tested(engine: Engine) -> Engine:
    health = engine.health()
    if not health.ready:
        engine.close()
        raise EngineError("the self-test fails", evidence=health.detail)
    return engine

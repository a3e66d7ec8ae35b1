"""Choosing an engine of a bundle that this host can run.

ONNX models are data: loading one runs only operators that ONNX Runtime brings along. A TensorRT engine is a
program, and so is a package of Inductor, and a digest does not say who made it: such engines are passed over
unless the caller vouches for the bundle's origin.
"""

from __future__ import annotations

import logging
from pathlib import Path

from loka_onnx.core.devices import CPU
from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.core.split import Part
from loka_onnx.errors import ConfigError, EngineError, InternalError, LokaError
from loka_onnx.runtime.engine import Engine, Skipped
from loka_onnx.sessions.bound_session import open_bound
from loka_onnx.sessions.bundle_files import read_sample, verify_bundle
from loka_onnx.sessions.inductor_session import open_inductor
from loka_onnx.sessions.migraphx_session import open_migraphx
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.providers import ONNXRUNTIME, ONNXRUNTIME_TENSORRT, provider_for
from loka_onnx.sessions.runner import Runner
from loka_onnx.sessions.split_runner import SplitRunner
from loka_onnx.sessions.tensorrt_session import open_tensorrt, open_tensorrt_rtx

_LOG = logging.getLogger("loka_onnx.runtime")


def load(
    bundle: Path,
    options: SessionOptions | None = None,
    *,
    trust_programs: bool = False,
    part: Part | str = Part.WHOLE,
) -> Engine:
    """Verifies a bundle and loads the first of its engines that runs here and passes its self-test.

    Engines are tried in the order of the manifest, the FP32 model last. Where its choice gives batch sizes to
    different engines, those that run here are all loaded, and `Engine.infer` picks one by the rows of a
    request: that of the next larger size in the table. Each one that is passed over is
    logged as a warning with its reason, and listed in `Engine.skipped`.

    Where the model was cut at its embeddings, the lookup model runs in ONNX Runtime on the CPU before the
    engine, and requests are those of the whole. With ``part="dense"`` the lookup model and its tables are
    verified, not loaded: requests hold looked-up rows, of a parameter server for example, in place of ids
    (`Engine.inputs` lists them). The FP32 model takes ids, so it does not stand in then.

    Args:
        bundle: Directory of the bundle.
        options: How an ONNX Runtime session runs.
        trust_programs: Whether the bundle comes from someone who may run code on this host. Engines that
            are programs (TensorRT, Inductor, MIGraphX) are passed over without it.
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
    opener = _Opener(bundle, manifest, options, wanted, trust_programs)
    for entry in manifest.candidates:
        engine = opener.open(entry)
        if engine is None:
            continue
        if entry == manifest.fallback:
            _LOG.warning("%s: no emitted engine runs here; serving the FP32 model", bundle)
        _LOG.info("%s: engine '%s' is ready", bundle, entry.id)
        opener.add_routes(engine)
        return engine
    raise EngineError(
        "no engine of the bundle runs here",
        where=str(bundle),
        evidence="; ".join(f"'{s.engine}': {s.reason}" for s in opener.skipped),
        remedy="see `loka-onnx doctor` for what this host can run",
    )


class _Opener:
    """Loads engines of one bundle, and remembers those that do not run here."""

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        options: SessionOptions | None,
        wanted: Part,
        trust_programs: bool,
    ) -> None:
        self._bundle, self._manifest, self._options = bundle, manifest, options
        self._wanted, self._trust_programs = wanted, trust_programs
        self.skipped: list[Skipped] = []
        self._lookup: OnnxSession | None = None

    def open(self, entry: EngineEntry) -> Engine | None:
        """An engine that has just reproduced its expected outputs; None where it does not run here."""
        bundle, manifest = self._bundle, self._manifest
        try:
            sample = read_sample(bundle, manifest, entry)
            _check_part(entry, self._wanted)
            runner = _open(bundle, entry, self._options, trust_programs=self._trust_programs)
            if entry.part is Part.DENSE and self._wanted is Part.WHOLE:
                runner = self._with_lookup(runner)
            return _tested(Engine(manifest, entry, runner, sample, tuple(self.skipped), self._wanted))
        except LokaError as error:
            self.skipped.append(Skipped(entry.id, str(error)))
            _LOG.warning("%s: engine '%s' is not used: %s", bundle, entry.id, error)
            return None

    def _with_lookup(self, dense: Runner) -> SplitRunner:
        """An engine of the dense part behind the lookup; several engines share one, tables are large."""
        if self._manifest.cut is None:
            where = str(self._bundle)
            raise InternalError("an engine takes looked-up rows, and the manifest has no cut", where=where)
        try:
            if self._lookup is None:
                threads = 0 if self._options is None else self._options.threads
                # Tables stay on the CPU whatever runs the dense part.
                path = self._bundle / self._manifest.cut.lookup
                self._lookup = OnnxSession(path, SessionOptions(threads=threads))
        except BaseException:
            dense.close()
            raise
        return SplitRunner(self._lookup, dense)

    def add_routes(self, engine: Engine) -> None:
        """Load the engines that take requests of other sizes in the engine's stead.

        The sizes of one that does not run here stay with the engine.
        """
        main = engine.entry.id
        choice = next((t for t in self._manifest.choice.targets if t.routes and main in t.engines), None)
        if choice is None:
            return
        entries = {entry.id: entry for entry in self._manifest.engines}
        opened: dict[str, Engine] = {main: engine}
        tried = {skipped.engine for skipped in self.skipped}
        for name in choice.engines:
            if name in opened or name in tried:
                continue
            other = self.open(entries[name])
            if other is not None:
                opened[name] = other
        if len(opened) > 1:
            engine.set_routes([(r.batch, opened.get(r.engine, engine)) for r in choice.routes])
            _LOG.info("%s: requests go by their size to %s", self._bundle, ", ".join(opened))
        engine.skipped = tuple(self.skipped)


def _open(
    bundle: Path, entry: EngineEntry, options: SessionOptions | None, *, trust_programs: bool
) -> Runner:
    path = bundle / entry.path
    if entry.backend == ONNXRUNTIME and entry.architecture == CPU:
        return OnnxSession(path, options)
    by_onnxruntime = entry.backend in {ONNXRUNTIME, ONNXRUNTIME_TENSORRT}
    threads = 0 if options is None else options.threads
    if by_onnxruntime and not provider_for(entry.backend, entry.architecture).compiles:
        return open_bound(path, entry.backend, entry.architecture, entry.version, threads)
    if not by_onnxruntime and entry.backend not in {"tensorrt", "tensorrt_rtx", "inductor", "migraphx"}:
        raise EngineError(f"this loader runs no engine of {entry.backend} on {entry.architecture}")
    if not trust_programs:
        raise EngineError(
            f"this engine of {entry.backend} on {entry.architecture} is a program",
            evidence="loading it runs the code in it; a digest does not say who made it",
            remedy="pass `trust_programs=True` when the bundle comes from who may run code here",
        )
    if by_onnxruntime:
        return open_bound(path, entry.backend, entry.architecture, entry.version, threads)
    if entry.backend == "inductor":
        return open_inductor(path, entry.architecture)
    if entry.backend == "migraphx":
        return open_migraphx(path, entry.architecture, entry.version)
    open_program = open_tensorrt if entry.backend == "tensorrt" else open_tensorrt_rtx
    return open_program(path, entry.architecture, entry.version)


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


def _tested(engine: Engine) -> Engine:
    health = engine.health()
    if not health.ready:
        engine.close()
        raise EngineError("the self-test fails", evidence=health.detail)
    return engine

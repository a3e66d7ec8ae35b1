"""Choosing an engine of a bundle that this host can run.

ONNX models are data: loading one runs only operators that ONNX Runtime brings along. A TensorRT engine is a
program, and so is a package of Inductor, and a digest does not say who made it: such engines are passed over
unless a signature of the bundle verifies with a key of the caller's, or the caller vouches for its origin.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loka_onnx.core.devices import CPU
from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.core.split import Part
from loka_onnx.errors import ConfigError, EngineError, InternalError, LokaError
from loka_onnx.runtime.engine import Engine, Origin, Serving
from loka_onnx.runtime.health import Cause, Skipped
from loka_onnx.runtime.saturation import make_sampler
from loka_onnx.runtime.selection import in_order, obstacle
from loka_onnx.sessions.bound_session import open_bound
from loka_onnx.sessions.bundle_archive import is_archive, unpacked
from loka_onnx.sessions.bundle_files import read_sample, verify_bundle
from loka_onnx.sessions.bundle_signature import verify_signature
from loka_onnx.sessions.inductor_session import open_inductor
from loka_onnx.sessions.migraphx_session import open_migraphx
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.providers import ONNXRUNTIME, ONNXRUNTIME_TENSORRT
from loka_onnx.sessions.runner import Runner
from loka_onnx.sessions.split_runner import SplitRunner
from loka_onnx.sessions.tensorrt_session import open_tensorrt, open_tensorrt_rtx

_LOG = logging.getLogger("loka_onnx.runtime")
CALLER = "caller"
"""What `Health.trust` says for ``trust=True``."""


def load(
    bundle: Path,
    options: SessionOptions | None = None,
    *,
    trust: bool = False,
    keys: Sequence[Path] = (),
    part: Part | str = Part.WHOLE,
    serving: Serving = Serving(),  # noqa: B008 — it is frozen
) -> Engine:
    """Verifies a bundle and loads the first of its engines that runs here and passes its self-test.

    Of each engine it is found out beforehand, without opening it, why it cannot run here: nobody vouches for
    it, no device of its architecture, no library, another version. The others are tried in this order: built
    for this very device; for the architecture of an accelerator that is here; for the processor; among
    equals, built by the library's version that is here first, then as in the manifest; the FP32 model last
    (`loka_onnx.runtime.selection`). Each one that is passed over is logged once with its reason, and is in
    `Engine.skipped`.

    Where the bundle's choice gives batch sizes to different engines, those that run here are all loaded, and
    `Engine.infer` picks one by the rows of a request: that of the next larger size in the table.

    Where the model was cut at its embeddings, the lookup model runs in ONNX Runtime on the CPU before the
    engine, and requests are those of the whole. With ``part="dense"`` the lookup model and its tables are
    verified, not loaded: requests hold looked-up rows, of a parameter server for example, in place of ids
    (`Engine.inputs` lists them). The FP32 model takes ids, so it does not stand in then.

    Args:
        bundle: Directory of the bundle, or its single-file form: that is unpacked into a temporary directory,
            which is removed when the engine is closed. Nobody else may write there meanwhile.
        options: How an ONNX Runtime session runs.
        trust: Whether the bundle comes from someone who may run code on this host. Engines that are programs
            (TensorRT, Inductor, MIGraphX) are passed over without it, unless a signature verifies.
        keys: Public keys (PEM files) of those who may run code on this host. Where any are given, the bundle
            must be signed with one of them, whether or not it holds programs.
        part: ``whole`` for the model's own inputs, ``dense`` for looked-up rows.
        serving: Warm-up, metrics and samples of values.

    Returns:
        An engine that has just reproduced its expected outputs.

    Raises:
        BundleInvalid: The bundle does not verify, or keys are given and none of them signed it.
        EngineError: Nothing in it runs here, not even the FP32 model.
        ConfigError: There is no such part, or a key cannot be read.
    """
    wanted = _part(part)
    bundle = Path(bundle)
    with ExitStack() as stack:
        directory = stack.enter_context(unpacked(bundle)) if is_archive(bundle) else bundle
        signer = verify_signature(directory, tuple(keys)) if keys else ""
        manifest = verify_bundle(directory)
        trusted_by = signer or (CALLER if trust else "")
        opener = _Opener(_Source(directory, manifest, str(bundle), trusted_by), options, wanted, serving)
        engine = _first(opener)
        engine.on_close(weakref.finalize(engine, stack.pop_all().close))
        return engine


def _first(opener: _Opener) -> Engine:
    """The first engine that serves, warm, with those that it hands requests to."""
    source = opener.source
    for entry in opener.candidates():
        engine = opener.open(entry)
        if engine is None:
            continue
        if entry == source.manifest.fallback:
            _LOG.warning("%s: no emitted engine runs here; serving the FP32 model", source.name)
        opener.add_routes(engine)
        engine.set_origin(Origin(tuple(opener.skipped), opener.order, source.trusted_by))
        _LOG.info("%s: engine '%s' is ready", source.name, entry.id)
        return engine
    raise EngineError(
        "no engine of the bundle runs here",
        where=source.name,
        evidence="; ".join(f"'{s.engine}': {s.reason}" for s in opener.skipped),
        remedy="see `loka-onnx doctor` for what this host can run",
    )


@dataclass(frozen=True)
class _Source:
    """A verified bundle.

    Attributes:
        directory: Where it lies.
        manifest: Its manifest.
        name: What messages call it.
        trusted_by: Who vouches for programs in it; empty for nobody.
    """

    directory: Path
    manifest: Manifest
    name: str
    trusted_by: str


class _Opener:
    """Loads engines of one bundle, and remembers those that do not run here."""

    def __init__(
        self, source: _Source, options: SessionOptions | None, wanted: Part, serving: Serving
    ) -> None:
        self.source, self._options = source, options
        self._wanted, self._serving = wanted, serving
        self.skipped: list[Skipped] = []
        self.order: tuple[str, ...] = ()
        self._lookup: OnnxSession | None = None

    def candidates(self) -> tuple[EngineEntry, ...]:
        """Engines that may run here, in the order that they are tried; the others are passed over."""
        usable, out = [], []
        for entry in self.source.manifest.candidates:
            found = obstacle(entry, self._wanted, is_trusted=bool(self.source.trusted_by))
            if found is None:
                usable.append(entry)
            else:
                out.append(entry.id)
                self._skip(entry, found.cause, found.reason)
        ordered = in_order(self.source.manifest, usable)
        self.order = (*(entry.id for entry in ordered), *out)
        return ordered

    def open(self, entry: EngineEntry) -> Engine | None:
        """An engine that has just reproduced its expected outputs; None where it does not run here."""
        directory, manifest = self.source.directory, self.source.manifest
        cause = Cause.OPEN
        try:
            sample = read_sample(directory, manifest, entry)
            runner = _open(directory, entry, self._options)
            if entry.part is Part.DENSE and self._wanted is Part.WHOLE:
                runner = self._with_lookup(runner)
            cause = Cause.SELF_TEST
            engine = _tested(
                Engine(manifest, entry, runner, sample, self._wanted, self._serving), self._serving
            )
        except LokaError as error:
            self._skip(entry, cause, str(error))
            return None
        if self._serving.metrics:
            self._sample_values(engine)
        return engine

    def _sample_values(self, engine: Engine) -> None:
        directory, manifest = self.source.directory, self.source.manifest
        try:
            engine.set_sampler(make_sampler(directory, manifest, engine.entry, self._serving.sample_every))
        except LokaError as error:
            # An engine that answers right serves, whether or not its values can be watched.
            _LOG.warning(
                "%s: values of engine '%s' are not sampled: %s", self.source.name, engine.entry.id, error
            )

    def _skip(self, entry: EngineEntry, cause: Cause, reason: str) -> None:
        self.skipped.append(Skipped(entry.id, reason, cause))
        # A bundle for several devices has engines for others than this one: nothing is wrong with that.
        level = logging.INFO if cause is Cause.DEVICE else logging.WARNING
        _LOG.log(level, "%s: engine '%s' is not used: %s", self.source.name, entry.id, reason)

    def _with_lookup(self, dense: Runner) -> SplitRunner:
        """An engine of the dense part behind the lookup; several engines share one, tables are large."""
        cut = self.source.manifest.cut
        if cut is None:
            raise InternalError(
                "an engine takes looked-up rows, and the manifest has no cut", where=self.source.name
            )
        try:
            if self._lookup is None:
                threads = 0 if self._options is None else self._options.threads
                # Tables stay on the CPU whatever runs the dense part.
                path = self.source.directory / cut.lookup
                self._lookup = OnnxSession(path, SessionOptions(threads=threads))
        except BaseException:
            dense.close()
            raise
        return SplitRunner(self._lookup, dense)

    def add_routes(self, engine: Engine) -> None:
        """Load the engines that take requests of other sizes in the engine's stead.

        The sizes of one that does not run here stay with the engine.
        """
        main, manifest = engine.entry.id, self.source.manifest
        choice = next((t for t in manifest.choice.targets if t.routes and main in t.engines), None)
        if choice is None:
            return
        entries = {entry.id: entry for entry in manifest.engines}
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
            _LOG.info("%s: requests go by their size to %s", self.source.name, ", ".join(opened))
            if self._serving.warm_up:
                engine.warm_up()


def _open(bundle: Path, entry: EngineEntry, options: SessionOptions | None) -> Runner:
    """Load an engine that has no obstacle.

    Raises:
        LokaError: It does not load.
    """
    path = bundle / entry.path
    if entry.backend == ONNXRUNTIME and entry.architecture == CPU:
        return OnnxSession(path, options)
    threads = 0 if options is None else options.threads
    if entry.backend in {ONNXRUNTIME, ONNXRUNTIME_TENSORRT}:
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


def _tested(engine: Engine, serving: Serving) -> Engine:
    """An engine that reproduces its expected outputs, and has run every batch size that it serves."""
    try:
        health = engine.health()
        if not health.ready:
            raise EngineError("the self-test fails", evidence=health.detail)
        if serving.warm_up:
            engine.warm_up()
    except BaseException:
        engine.close()
        raise
    return engine

"""Loading of an engine that this host can run.

ONNX models are data: they run only ONNX Runtime's own operators. Engines of TensorRT and packages of Inductor
are programs, and a digest does not prove their origin: they are skipped unless a signature of the bundle
verifies with a caller's key, or the caller vouches for the bundle.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from loka_onnx.bundle.format.archive import as_directory
from loka_onnx.bundle.format.files import read_sample, verify_directory
from loka_onnx.bundle.format.pinned import Pin, pinned
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.core.rewrite import Part
from loka_onnx.errors import BundleInvalid, ConfigError, EngineError, InternalError, LokaError
from loka_onnx.runtime.engine import Engine, Origin, Serving
from loka_onnx.runtime.health import Cause, Skipped, in_line
from loka_onnx.runtime.selection import in_order, obstacle
from loka_onnx.sessions import onnx_session
from loka_onnx.sessions.backends import get_spec
from loka_onnx.sessions.model_files import operators, read_model
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import Names, Runner
from loka_onnx.sessions.split_runner import SplitRunner

_LOG = logging.getLogger("loka_onnx.runtime")
EP_CONTEXT = "EPContext"
"""Operator whose node holds a program of a provider."""
_HARMLESS = frozenset({"CPUExecutionProvider", "CUDAExecutionProvider"})
"""Providers that run no program of a model."""
ATTEMPTS = 3
"""Attempts of loading while the bundle is being replaced."""
CALLER = "caller"
"""`Health.trust` for ``trust=True``."""


def load(
    bundle: Path,
    options: SessionOptions | None = None,
    *,
    trust: bool = False,
    keys: Iterable[Path | str] = (),
    part: Part | str = Part.WHOLE,
    serving: Serving = Serving(),  # noqa: B008 — it is frozen
) -> Engine:
    """Verify a bundle and load the first of its engines that runs here and passes its self-test.

    Engines that cannot run here are skipped unopened: untrusted programs, a missing device or library,
    another version. The others are tried in the order of `loka_onnx.runtime.selection`; the FP32 model is
    last. Each skipped engine is logged once with the reason, and is in `Engine.skipped`.

    Where the bundle's choice routes batch sizes to different engines, all that run here are loaded, and
    `Engine.infer` selects one by the rows of a request: that of the next larger size.

    Where the model was cut at its embeddings, the lookup model runs in ONNX Runtime on the CPU before the
    engine. With ``part="dense"`` it is verified but not loaded: requests hold looked-up rows, for example of
    a parameter server, in place of ids (see `Engine.inputs`). The FP32 model takes ids, so there is no
    fallback then.

    Args:
        bundle: Directory of the bundle, or a single-file bundle, which is unpacked into a temporary directory
            until the engine is closed. Nobody else may write there meanwhile; a bundle that is replaced as a
            whole, as `write_bundle` does, is loaded anew.
        options: Options of an ONNX Runtime session.
        trust: Whether the bundle comes from someone who may run code on this host. Otherwise engines that are
            programs (TensorRT, Inductor, MIGraphX) are skipped unless a signature verifies.
        keys: Public keys (paths of PEM files) of those who may run code on this host. If any are given, the
            bundle must be signed with one of them, even without programs.
        part: ``whole`` for the model's own inputs, ``dense`` for looked-up rows.
        serving: Whether to warm up.

    Raises:
        BundleInvalid: The bundle does not verify, or none of the given keys signed it.
        EngineError: Nothing in it runs here, not even the FP32 model.
        ConfigError: There is no such part, a key cannot be read, or `keys` is a single path.
    """
    wanted = _part(part)
    bundle, keys = Path(bundle), _paths(keys)
    for _ in range(ATTEMPTS):
        with ExitStack() as stack:
            pin = stack.enter_context(pinned(stack.enter_context(as_directory(bundle))))
            try:
                verified = verify_directory(pin.path, keys)
                trusted_by = verified.signer or (CALLER if trust else "")
                source = _Source(pin.path, verified.manifest, str(bundle), trusted_by, pin)
                engine = _first(_Opener(source, options, wanted, serving))
            except LokaError:
                # A bundle's replacement removes the old one file by file.
                if pin.is_current:
                    raise
                _LOG.warning("%s: the bundle was replaced while it was loaded: once more", bundle)
                continue
            if pin.is_current:
                engine.release = weakref.finalize(engine, stack.pop_all().close)
                return engine
            _LOG.warning("%s: the bundle was replaced while it was loaded: once more", bundle)
            engine.close()
    raise BundleInvalid(
        "E1306 the bundle is replaced faster than it is loaded",
        where=str(bundle),
        evidence=f"{ATTEMPTS} attempts",
        remedy="load it again when it stays",
    )


def _first(opener: _Opener) -> Engine:
    """Return the first engine that serves, warm, with the engines of its routes."""
    source = opener.source
    for entry in opener.candidates():
        engine = None if opener.was_skipped(entry) else opener.open(entry)
        if engine is None or not opener.add_routes(engine):
            continue
        if entry == source.manifest.fallback:
            _LOG.warning("%s: no emitted engine runs here; serving the FP32 model", source.name)
        engine.set_origin(Origin(tuple(opener.skipped), opener.order, source.trusted_by))
        _LOG.info("%s: engine '%s' is ready", source.name, entry.id)
        return engine
    raise EngineError(
        "E1307 no engine of the bundle runs here",
        where=source.name,
        evidence="; ".join(f"'{s.engine}': {s.reason}" for s in opener.skipped),
        remedy="see `loka-onnx doctor` for what this host can run",
    )


@dataclass(frozen=True)
class _Source:
    """A verified bundle."""

    directory: Path
    manifest: Manifest
    name: str
    trusted_by: str
    pin: Pin


class _Opener:
    """Loads engines of one bundle and records those that do not run here."""

    def __init__(
        self, source: _Source, options: SessionOptions | None, wanted: Part, serving: Serving
    ) -> None:
        self.source, self._options = source, options
        self._wanted, self._serving = wanted, serving
        self.skipped: list[Skipped] = []
        self.order: tuple[str, ...] = ()
        self._lookup: OnnxSession | None = None

    def was_skipped(self, entry: EngineEntry) -> bool:
        return any(skipped.engine == entry.id for skipped in self.skipped)

    def candidates(self) -> tuple[EngineEntry, ...]:
        """Engines that may run here, in the order of trial; records the others as skipped."""
        usable, out = [], []
        for entry in self.source.manifest.candidates:
            problem = obstacle(entry, self._wanted, is_trusted=bool(self.source.trusted_by))
            if problem is None:
                usable.append(entry)
            else:
                out.append(entry.id)
                self._skip(entry, problem.cause, problem.reason)
        ordered = in_order(self.source.manifest, usable)
        self.order = (*(entry.id for entry in ordered), *out)
        return ordered

    def open(self, entry: EngineEntry) -> Engine | None:
        """Open an engine that reproduces its expected outputs; None where it does not run here."""
        directory, manifest = self.source.directory, self.source.manifest
        cause = Cause.OPEN
        try:
            sample = read_sample(directory, manifest, entry)
            runner = self._runner(entry)
            cause = Cause.SELF_TEST
            try:
                engine = Engine(manifest, entry, runner, sample, self._wanted)
                health = engine.health()
                if not health.ready:
                    raise EngineError("E1308 the self-test fails", evidence=health.detail)
                if self._serving.warm_up:
                    engine.warm_up()
            except BaseException:
                runner.close()
                raise
        except Exception as error:
            # Libraries raise errors of any type for a bad file; the next engine serves.
            self._skip(entry, cause, in_line(error))
            return None
        return engine

    def _runner(self, entry: EngineEntry) -> Runner:
        """Open an engine's session, behind the lookup where requests hold ids and it takes looked-up rows."""
        manifest = self.source.manifest
        if not self.source.trusted_by:
            _refuse_programs(self.source.directory / entry.path, entry, self._options)
        spec, path = get_spec(entry.backend), self.source.directory / entry.path
        runner = spec.open(path, entry.architecture, entry.version, self._options)
        try:
            _check_names(runner.names, manifest.inputs_of(entry.part), manifest.outputs)
            if entry.part is Part.DENSE and self._wanted is Part.WHOLE:
                return SplitRunner(self._shared_lookup(), runner)
        except BaseException:
            runner.close()
            raise
        return runner

    def _skip(self, entry: EngineEntry, cause: Cause, reason: str) -> None:
        reason = self.source.pin.worded(reason)
        self.skipped.append(Skipped(entry.id, reason, cause))
        # Expected: a bundle has engines for other devices, and a request for the dense part excludes engines
        # with ids.
        level = logging.INFO if cause in {Cause.DEVICE, Cause.PART} else logging.WARNING
        _LOG.log(level, "%s: engine '%s' is not used: %s", self.source.name, entry.id, reason)

    def _shared_lookup(self) -> OnnxSession:
        """Reference to the lookup model, which engines share because tables are large."""
        cut = self.source.manifest.cut
        if cut is None:
            raise InternalError(
                "an engine takes looked-up rows, and the manifest has no cut", where=self.source.name
            )
        if self._lookup is None:
            threads = 0 if self._options is None else self._options.threads
            # Tables stay on the CPU whatever runs the dense part.
            lookup = onnx_session.OnnxSession(
                self.source.directory / cut.lookup, SessionOptions(threads=threads)
            )
            asked = [spec for spec in self.source.manifest.inputs if spec.name in cut.lookup_inputs]
            _check_names(lookup.names, asked, cut.tensors)
            self._lookup = lookup
        return self._lookup.shared()

    def add_routes(self, engine: Engine) -> bool:
        """Load the engines that take other sizes in the engine's place, and warm up all of them."""
        main, manifest = engine.entry.id, self.source.manifest
        choice = next((t for t in manifest.choice.targets if t.routes and main in t.engines), None)
        if choice is None:
            return True
        entries = {entry.id: entry for entry in manifest.engines}
        opened: dict[str, Engine] = {main: engine}
        try:
            for name in choice.engines:
                if name in opened or self.was_skipped(entries[name]):
                    continue
                other = self.open(entries[name])
                if other is not None:
                    opened[name] = other
            is_routed = len(opened) > 1
            while is_routed and main in opened:
                engine.set_routes([(r.batch, opened.get(r.engine, engine)) for r in choice.routes])
                failing = self._failing(engine)
                if failing is None:
                    break
                opened.pop(failing.entry.id).close()
        except BaseException:
            _close_all(opened.values())
            raise
        if main not in opened:
            _close_all(opened.values())
            return False
        if len(opened) > 1:
            _LOG.info("%s: requests go by their size to %s", self.source.name, ", ".join(opened))
        else:
            engine.set_routes([])
        return True

    def _failing(self, engine: Engine) -> Engine | None:
        """Return the first engine that fails at a routed size, after recording it as skipped."""
        for size in engine.sizes if self._serving.warm_up else ():
            try:
                engine.warm_up([size])
            except Exception as error:
                failing = engine.engine_for(size)
                self._skip(failing.entry, Cause.SELF_TEST, f"{size} rows: {in_line(error)}")
                return failing
        return None


def _refuse_programs(path: Path, entry: EngineEntry, options: SessionOptions | None) -> None:
    """Refuse a model with a program for a requested provider."""
    asked = () if options is None else options.providers
    if get_spec(entry.backend).is_program(entry.architecture) or all(name in _HARMLESS for name in asked):
        return
    if EP_CONTEXT in operators(read_model(path)):
        raise EngineError(
            f"E1309 the model holds a program, in a node {EP_CONTEXT}",
            evidence=f"providers {asked}",
            remedy="vouch for the bundle with `keys=[…]` or `trust=True`",
        )


def _check_names(names: Names | None, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> None:
    """Check the names of a file's inputs and outputs against the manifest."""
    if names is None:
        return
    taken, answered = {spec.name for spec in inputs}, {spec.name for spec in outputs}
    if not set(names.inputs) <= taken or set(names.outputs) != answered:
        raise EngineError(
            "E1310 the engine is not the one that the manifest describes",
            evidence=f"it takes {sorted(names.inputs)} and answers {sorted(names.outputs)}, the manifest has "
            f"{sorted(taken)} and {sorted(answered)}",
        )


def _close_all(engines: Iterable[Engine]) -> None:
    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.close)


def _paths(keys: Iterable[Path | str] | None) -> tuple[Path, ...]:
    if isinstance(keys, str | bytes | PathLike):
        raise ConfigError(
            "E1311 `keys` is one path, and not a list of paths",
            evidence=f"{keys!r}",
            remedy="write `keys=[…]`",
        )
    return tuple(Path(key) for key in keys or ())


def _part(name: Part | str) -> Part:
    try:
        return Part(name)
    except ValueError:
        known = " and ".join(f"'{part}'" for part in Part)
        raise ConfigError(f"E1312 there is no part '{name}' to load", evidence=f"there are {known}") from None

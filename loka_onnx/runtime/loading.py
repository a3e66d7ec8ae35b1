"""Loading of an engine that this host can run.

ONNX models are data: they run only ONNX Runtime's own operators. Engines of TensorRT and packages of Inductor
are programs, and a digest does not prove their origin: they are skipped unless a signature of the bundle
verifies with a caller's key, or the caller vouches for the bundle. No engine is opened to find another
obstacle, and no vendor's library imported for it.

Order of trial: engines built for this very device, by its driver's name (to which timings belong); then for
the architecture of an accelerator here; then for the processor. Among equals, those built by the installed
version of their library; then in the manifest's order, that of choice. The FP32 model is last.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path

from loka_onnx.bundle.format.archive import as_directory
from loka_onnx.bundle.format.documents import Pin, pinned
from loka_onnx.bundle.format.files import read_sample, verify_directory
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.devices import CPU, device_called
from loka_onnx.core.manifest import INSTRUCTIONS, EngineEntry, Manifest
from loka_onnx.core.rewrite import Part
from loka_onnx.errors import BundleInvalid, ConfigError, EngineError, InternalError, LokaError, MissingPackage
from loka_onnx.runtime.engine import Engine, Serving
from loka_onnx.runtime.health import Cause, Skipped, in_line
from loka_onnx.sessions import onnx_session
from loka_onnx.sessions.backends import get_spec, has_spec, in_phrase
from loka_onnx.sessions.host_devices import device_of_architecture, integer_instructions
from loka_onnx.sessions.model_files import operators, read_model
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import ParallelRunner, Runner, SplitRunner

_LOG = logging.getLogger("loka_onnx.runtime")
EP_CONTEXT = "EPContext"
"""Operator whose node holds a program of a provider."""
_HARMLESS = frozenset({"CPUExecutionProvider", "CUDAExecutionProvider"})
"""Providers that run no program of a model."""
ATTEMPTS = 3
"""Attempts of loading while the bundle is being replaced."""
_PARTS = {str(part): part for part in (Part.WHOLE, Part.DENSE)}
"""Parts that requests are for."""
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
    another version. The others are tried in the order of `runtime.loading`; the FP32 model is
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
        trust: True if the bundle comes from someone who may run code on this host; else engines that are
            programs (TensorRT, Inductor, MIGraphX) are skipped unless a signature verifies.
        keys: Public keys (paths of PEM files) of those who may run code on this host. If any are given, the
            bundle must be signed with one of them, even without programs.
        part: ``whole`` for the model's own inputs, ``dense`` for looked-up rows.
        serving: Warm-up, and the number of requests that are answered at a time on a GPU.

    Raises:
        BundleInvalid: The bundle does not verify, or none of the given keys signed it.
        EngineError: Nothing in it runs here, not even the FP32 model.
        ConfigError: There is no such part, a key cannot be read, or `keys` is a single path.
    """
    try:
        wanted = _PARTS[str(part)]
    except KeyError:
        known = " and ".join(f"'{part}'" for part in _PARTS)
        raise ConfigError(f"E1312 there is no part '{part}' to load", evidence=f"there are {known}") from None
    if isinstance(keys, str | bytes | PathLike):
        raise ConfigError(
            "E1311 `keys` is one path, and not a list of paths",
            evidence=f"{keys!r}",
            remedy="write `keys=[…]`",
        )
    bundle, accepted = Path(bundle), tuple(Path(key) for key in keys or ())
    for _ in range(ATTEMPTS):
        with ExitStack() as stack:
            pin = stack.enter_context(pinned(stack.enter_context(as_directory(bundle))))
            try:
                verified = verify_directory(pin.path, accepted)
                trusted_by = verified.signer or (CALLER if trust else "")
                opener = _Opener(pin, str(bundle), verified.manifest, trusted_by, options, wanted, serving)
                engine = opener.first()
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


@dataclass
class _Opener:
    """Loads engines of one verified bundle, and records those that do not run here."""

    pin: Pin
    name: str
    manifest: Manifest
    trusted_by: str
    options: SessionOptions | None
    wanted: Part
    serving: Serving
    skipped: list[Skipped] = field(default_factory=list)
    lookup: OnnxSession | None = None

    def first(self) -> Engine:
        """Return the first engine that serves, warm, with the engines of its routes."""
        usable, out = [], []
        for entry in self.manifest.candidates:
            problem = obstacle(entry, self.wanted, is_trusted=bool(self.trusted_by))
            if problem is None:
                usable.append(entry)
            else:
                out.append(entry.id)
                self._skip(problem)
        ordered = in_order(self.manifest, usable)
        for entry in ordered:
            engine = None if self._was_skipped(entry) else self._open(entry)
            if engine is None or not self._add_routes(engine):
                continue
            if entry == self.manifest.fallback:
                _LOG.warning("%s: no emitted engine runs here; serving the FP32 model", self.name)
            order = (*(entry.id for entry in ordered), *out)
            engine.set_origin(self.skipped, order, self.trusted_by)
            _LOG.info("%s: engine '%s' is ready", self.name, entry.id)
            return engine
        raise EngineError(
            "E1307 no engine of the bundle runs here",
            where=self.name,
            evidence="; ".join(f"'{s.engine}': {s.reason}" for s in self.skipped),
            remedy="see `loka-onnx doctor` for what this host can run",
        )

    def _was_skipped(self, entry: EngineEntry) -> bool:
        return any(skipped.engine == entry.id for skipped in self.skipped)

    def _open(self, entry: EngineEntry) -> Engine | None:
        """Open an engine that reproduces its expected outputs; None where it does not run here."""
        cause = Cause.OPEN
        try:
            sample = read_sample(self.pin.path, self.manifest, entry)
            runner = self._runner(entry)
            cause = Cause.SELF_TEST
            try:
                engine = Engine(self.manifest, entry, runner, sample, self.wanted)
                health = engine.health()
                if not health.ready:
                    raise EngineError("E1308 the self-test fails", evidence=health.detail)
                if self.serving.warm_up:
                    engine.warm_up()
            except BaseException:
                runner.close()
                raise
        except Exception as error:
            # Libraries raise errors of any type for a bad file; the next engine serves.
            self._skip(Skipped(entry.id, in_line(error), cause))
            return None
        return engine

    def _runner(self, entry: EngineEntry) -> Runner:
        """Open an engine's session, behind the lookup where requests hold ids and it takes looked-up rows."""
        path, manifest = self.pin.path / entry.path, self.manifest
        if not self.trusted_by:
            _refuse_programs(path, entry, self.options)
        runner = self._session(path, entry)
        try:
            _check_names(runner, manifest.inputs_of(entry.part), manifest.outputs)
            if entry.part is Part.DENSE and self.wanted is Part.WHOLE:
                return SplitRunner(self._shared_lookup(), runner)
        except BaseException:
            runner.close()
            raise
        return runner

    def _session(self, path: Path, entry: EngineEntry) -> Runner:
        spec = get_spec(entry.backend)
        with ExitStack() as opened:
            # ONNX Runtime answers concurrent requests on the CPU in one session.
            sessions = [
                opened.enter_context(spec.open(path, entry.architecture, entry.version, self.options))
                for _ in range(1 if entry.architecture == CPU else self.serving.sessions)
            ]
            opened.pop_all()
        return sessions[0] if len(sessions) == 1 else ParallelRunner(sessions)

    def _skip(self, skipped: Skipped) -> None:
        skipped = replace(skipped, reason=self.pin.worded(skipped.reason))
        self.skipped.append(skipped)
        # Expected: a bundle has engines for other devices, and a request for the dense part excludes engines
        # with ids.
        level = logging.INFO if skipped.cause in {Cause.DEVICE, Cause.PART} else logging.WARNING
        _LOG.log(level, "%s: engine '%s' is not used: %s", self.name, skipped.engine, skipped.reason)

    def _shared_lookup(self) -> OnnxSession:
        """Reference to the lookup model, which engines share because tables are large."""
        cut = self.manifest.cut
        if cut is None:
            what = "an engine takes looked-up rows, and the manifest has no cut"
            raise InternalError(what, where=self.name)
        if self.lookup is None:
            threads = 0 if self.options is None else self.options.threads
            # Tables stay on the CPU whatever runs the dense part.
            lookup = onnx_session.OnnxSession(self.pin.path / cut.lookup, SessionOptions(threads=threads))
            asked = [spec for spec in self.manifest.inputs if spec.name in cut.lookup_inputs]
            _check_names(lookup, asked, cut.tensors)
            self.lookup = lookup
        return self.lookup.shared()

    def _add_routes(self, engine: Engine) -> bool:
        """Load the engines that take other sizes in the engine's place, and warm up all of them."""
        main, manifest = engine.entry.id, self.manifest
        choice = next((t for t in manifest.choice.targets if t.routes and main in t.engines), None)
        if choice is None:
            return True
        entries = {entry.id: entry for entry in manifest.engines}
        opened: dict[str, Engine] = {main: engine}
        with ExitStack() as undone:
            undone.callback(_close_all, opened)
            for name in choice.engines:
                if name in opened or self._was_skipped(entries[name]):
                    continue
                other = self._open(entries[name])
                if other is not None:
                    opened[name] = other
            is_routed = len(opened) > 1
            while is_routed and main in opened:
                engine.set_routes([(r.batch, opened.get(r.engine, engine)) for r in choice.routes])
                failing = self._failing(engine)
                if failing is None:
                    break
                opened.pop(failing.entry.id).close()
            if main not in opened:
                return False
            undone.pop_all()
        if len(opened) > 1:
            _LOG.info("%s: requests go by their size to %s", self.name, ", ".join(opened))
        else:
            engine.set_routes([])
        return True

    def _failing(self, engine: Engine) -> Engine | None:
        """Return the first engine that fails at a routed size, after recording it as skipped."""
        for size in engine.sizes if self.serving.warm_up else ():
            try:
                engine.warm_up([size])
            except Exception as error:
                failing = engine.engine_for(size)
                self._skip(Skipped(failing.entry.id, f"{size} rows: {in_line(error)}", Cause.SELF_TEST))
                return failing
        return None


def _refuse_programs(path: Path, entry: EngineEntry, options: SessionOptions | None) -> None:
    """Refuse a model with a program for a requested provider."""
    asked = () if options is None else options.providers
    if is_program(entry) or all(name in _HARMLESS for name in asked):
        return
    if EP_CONTEXT in operators(read_model(path)):
        raise EngineError(
            f"E1309 the model holds a program, in a node {EP_CONTEXT}",
            evidence=f"providers {asked}",
            remedy="vouch for the bundle with `keys=[…]` or `trust=True`",
        )


def _check_names(runner: Runner, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> None:
    """Check the names of a file's inputs and outputs, where it states them, against the manifest."""
    taken, answered = {spec.name for spec in inputs}, {spec.name for spec in outputs}
    if runner.output_names and (not {*runner.input_names} <= taken or {*runner.output_names} != answered):
        raise EngineError(
            "E1310 the engine is not the one that the manifest describes",
            evidence=f"it takes {sorted(runner.input_names)} and answers {sorted(runner.output_names)}, the "
            f"manifest has {sorted(taken)} and {sorted(answered)}",
        )


def _close_all(engines: Mapping[str, Engine]) -> None:
    with ExitStack() as stack:
        for engine in engines.values():
            stack.callback(engine.close)


def is_program(entry: EngineEntry) -> bool:
    """True if loading an engine runs code in it."""
    return get_spec(entry.backend).is_program(entry.architecture)


def obstacle(entry: EngineEntry, wanted: Part, *, is_trusted: bool) -> Skipped | None:
    """Reason why an engine is not tried on this host for a part of the model; None where it is."""
    obstacles = list(_before_the_library(entry, wanted, is_trusted=is_trusted))
    if obstacles:
        cause = obstacles[0][0]
        return Skipped(entry.id, "; ".join(reason for each, reason in obstacles), cause)
    if not is_program(entry):
        return None
    # Programs belong to one version. Last, as only the library knows its version, and is imported for it.
    spec = get_spec(entry.backend)
    try:
        here = spec.version()
    except MissingPackage as error:
        return Skipped(entry.id, in_phrase(error), Cause.LIBRARY)
    if spec.loads(entry.version, here):
        return None
    reason = (
        f"the engine was built by another version of {spec.title}: by {entry.version}, this host has {here}; "
        "install that one, or build the engine again"
    )
    return Skipped(entry.id, reason, Cause.VERSION)


def _before_the_library(entry: EngineEntry, wanted: Part, *, is_trusted: bool) -> Iterator[tuple[Cause, str]]:
    """Yield obstacles that are known without importing a vendor's library."""
    backend, architecture = entry.backend, entry.architecture
    if wanted is Part.DENSE and entry.part is not Part.DENSE:
        yield (
            Cause.PART,
            "this engine takes ids, not looked-up rows; load the whole, or build with "
            "`model.split_sparse: true`",
        )
        return
    try:
        is_known = has_spec(backend) and get_spec(backend).knows(architecture)
    except MissingPackage as error:
        yield Cause.LIBRARY, in_phrase(error)
        return
    if not is_known:
        yield Cause.BACKEND, f"this loader runs no engine of {backend} on {architecture}"
        return
    if is_program(entry) and not is_trusted:
        yield (
            Cause.UNTRUSTED,
            f"this engine of {backend} on {architecture} is a program: loading it runs the code in it, and a "
            "digest does not say who made it; pass `keys=[…]` with the public key of who signs your bundles, "
            "or `trust=True` when this one comes from who may run code here",
        )
        return
    spec = get_spec(backend)
    if reason := spec.library_obstacle():
        yield Cause.LIBRARY, reason
    if architecture != CPU and (reason := spec.device_obstacle(architecture)):
        yield Cause.DEVICE, f"cannot run here: {reason}"
    needed = [requirement.version for requirement in entry.requires if requirement.name == INSTRUCTIONS]
    here = integer_instructions() if needed else ()
    if not {*needed} <= {*here}:
        yield (
            Cause.DEVICE,
            f"its INT8 sums were certified with {', '.join(needed)}, and this processor has "
            f"{', '.join(here) or 'no such instructions'}: they may saturate differently",
        )


def in_order(manifest: Manifest, usable: Sequence[EngineEntry]) -> tuple[EngineEntry, ...]:
    """Sort usable engines, given in the manifest's order, into the order of trial (see the module)."""

    def rank(entry: EngineEntry) -> tuple[int, int]:
        if entry == manifest.fallback:
            return (3, 0)
        differs = int(entry.version != get_spec(entry.backend).version())
        if entry.architecture == CPU:
            return (2, differs)
        name = device_called(device_of_architecture(entry.architecture), entry.architecture)
        return (0 if name == entry.target else 1, differs)

    return tuple(sorted(usable, key=rank))

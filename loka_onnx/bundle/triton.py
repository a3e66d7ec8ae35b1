"""Writes a model repository of NVIDIA Triton Inference Server from a verified bundle.

Layout, for the name ``ranker``::

    loka-onnx.json                  what is here and from which bundle; Triton looks at directories only
    ranker/                         what clients call: an ensemble in front of the preferred engine
    ranker-<engine>/                one engine with the bundle's own inputs and outputs
    ranker-<engine>-dense/          …-dense: what an ensemble ranker-<engine> runs behind the lookup
    ranker-<engine>-program/        …-program: what it runs where the backend names inputs by position
    ranker-lookup/                  looks ids up on the CPU, of a model that was cut at its embeddings
    ranker-fallback-fp32/           the exported FP32 model

Each model has `config.pbtxt`, its only version in `1/`, and the first row of the sample in `warmup/`. Files
that are one file in the bundle are one file here too, under several names.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from loka_onnx.bundle.format.archive import as_directory
from loka_onnx.bundle.format.files import read_sample, verify_bundle
from loka_onnx.bundle.format.replace import not_replaced, staged_directory
from loka_onnx.bundle.writer import Copies
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_file
from loka_onnx.core.manifest import MANIFEST_NAME, BundleFile, EngineEntry, Manifest, SparseCut
from loka_onnx.core.rewrite import Part
from loka_onnx.core.serde import STRICT
from loka_onnx.engines.inductor.triton import rename_program
from loka_onnx.engines.triton.forms import BundledEngine, Form, Refusal, form_of
from loka_onnx.engines.triton.models import (
    PARAMETER,
    VERSION,
    BackendModel,
    Ensemble,
    EnsembleStep,
    ModelFile,
    TritonOptions,
    ports_of,
)
from loka_onnx.errors import (
    BundleError,
    BundleInvalid,
    ConfigError,
    EngineError,
    LokaError,
    OutputError,
    UserError,
)

LOOKED_UP = "looked_up/"
"""Prefix of the names of tensors between the steps of an ensemble."""
RECORD_NAME = "loka-onnx.json"
"""File of a repository that lists the files that this project wrote into it."""
BYTE_CODE = "__pycache__"
"""Directory that Python writes beside the models of the Python backend when a server runs them."""


@dataclass(frozen=True)
class RepositoryModel:
    """A model that clients call with the bundle's own inputs. `backend` is Triton's name; `runs` are the
    models that it consists of, itself alone unless it is an ensemble; `remarks` say what Triton does
    otherwise than `load`, and what the host must have.
    """

    __pydantic_config__ = STRICT

    name: str
    engine: str
    backend: str
    runs: tuple[str, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeclinedEngine:
    """An engine of the bundle that is not in the repository, and why."""

    __pydantic_config__ = STRICT

    engine: str
    reason: str


@dataclass(frozen=True)
class TritonRepository:
    """A repository that was written (`loka-onnx.json`).

    Attributes:
        bundle: SHA-256 of the manifest of the bundle that it was made from.
        model: Digest of the exported model.
        name: The model that clients call.
        preferred: Id of the engine behind it.
        models: Models that take the bundle's own inputs, the preferred first.
        directories: The directory of every model, sorted.
        files: Every file but this document, by its path.
        remarks: What holds for the repository as a whole.
    """

    SCHEMA: ClassVar[str] = "triton-repository/1"
    __pydantic_config__ = STRICT

    bundle: str
    model: str
    name: str
    preferred: str
    models: tuple[RepositoryModel, ...]
    directories: tuple[str, ...]
    files: tuple[BundleFile, ...]
    declined: tuple[DeclinedEngine, ...] = ()
    remarks: tuple[str, ...] = ()


def export_triton(bundle: Path, repository: Path, options: TritonOptions) -> TritonRepository:
    """Write a model repository atomically; an old one of this project is replaced as a whole. Raises
    BundleInvalid if the bundle does not verify, or a file changed while it was copied, BundleError if the
    model has inputs or outputs that Triton cannot have, ConfigError for an engine that is not in the bundle,
    or that Triton cannot serve, OutputError if the place cannot be written, or holds anything else.
    """
    destination = Path(os.path.realpath(repository))
    _check_destination(destination, Path(os.path.realpath(bundle)))
    with as_directory(bundle) as directory:
        manifest = verify_bundle(directory)
        plan = _Plan(directory, manifest, options)
        configs = {model.name: model.config(options) for model in plan.models}
        configs |= {ensemble.name: ensemble.config() for ensemble in plan.ensembles}
        with staged_directory(destination) as stage:
            for name, config in configs.items():
                # The server wants the directory of the version of an ensemble too.
                (stage / name / VERSION).mkdir(parents=True)
                (stage / name / "config.pbtxt").write_text(config, encoding="utf-8")
            copies = Copies()
            for model in plan.models:
                for file in model.files:
                    _write_file(file, stage / model.name / file.path, directory, manifest, copies)
            paths = sorted(path for path in stage.rglob("*") if path.is_file())
            files = (
                BundleFile(path.relative_to(stage).as_posix(), path.stat().st_size, digest_file(path))
                for path in paths
            )
            record = replace(plan.record, files=tuple(files))
            serde.write(record, stage / RECORD_NAME)
    return record


class _Plan:
    """Models that a repository consists of."""

    def __init__(self, bundle: Path, manifest: Manifest, options: TritonOptions) -> None:
        self._bundle, self._manifest, self._options = bundle, manifest, options
        self._sample = read_sample(bundle, manifest, manifest.fallback)
        self._digest = digest_file(bundle / MANIFEST_NAME)
        self.models: list[BackendModel] = []
        self.ensembles: list[Ensemble] = []
        called: list[RepositoryModel] = []
        declined: list[DeclinedEngine] = []
        for entry in _asked(manifest, options):
            form = self._form(entry)
            if isinstance(form, Form):
                called.append(self._add(entry, form))
                continue
            if entry.id in options.engines:
                raise ConfigError(
                    f"E1230 Triton cannot serve engine '{entry.id}'",
                    evidence=form.reason,
                    remedy="leave it out of `--engine`",
                )
            declined.append(DeclinedEngine(entry.id, form.reason))
        entry = next(e for e in manifest.candidates if e.id == called[0].engine)
        model = next(model for model in self.models if model.name == called[0].runs[-1])
        self._add_ensemble(options.name, self._steps(entry, model), entry)
        names = [*(model.name for model in self.models), *(ensemble.name for ensemble in self.ensembles)]
        # Systems that ignore case would lay two models over one another.
        if len({name.lower() for name in names}) != len(names):
            raise BundleError(
                "E1226 two models of the repository would have one name",
                evidence=", ".join(sorted(names)),
                remedy="name fewer engines with `--engine`",
            )
        self.record = TritonRepository(
            bundle=self._digest,
            model=manifest.model_digest,
            name=options.name,
            preferred=called[0].engine,
            models=tuple(called),
            directories=tuple(sorted(names)),
            files=(),  # known when they are written
            declined=tuple(declined),
            remarks=tuple(_remarks(manifest, [model.engine for model in called])),
        )

    def _form(self, entry: EngineEntry) -> Form | Refusal:
        if entry.part is Part.REQUEST:
            return Refusal("it takes users and candidates apart, and requests to Triton hold plain rows")
        name = f"{self._name(entry)}-dense" if entry.part is Part.DENSE else self._name(entry)
        try:
            form = form_of(self._source(entry, name))
        except (UserError, EngineError) as error:
            return Refusal(str(error))
        if isinstance(form, Form) and form.model.platform == "torch_aoti" and entry.part is Part.WHOLE:
            return replace(form, model=replace(form.model, name=f"{name}-program"))
        return form

    def _add(self, entry: EngineEntry, form: Form) -> RepositoryModel:
        name, model = self._name(entry), form.model
        steps = self._steps(entry, model)
        self.models.append(model)
        if model.name != name:
            self._add_ensemble(name, steps, entry)
        runs = tuple(step.model for step in steps)
        return RepositoryModel(name, entry.id, model.backend, runs, form.remarks)

    def _steps(self, entry: EngineEntry, model: BackendModel) -> tuple[EnsembleStep, ...]:
        """From the bundle's inputs to its outputs."""
        cut = self._manifest.cut
        own = {port.tensor: port.name for port in (*model.inputs, *model.outputs)}
        outputs = {own[spec.name]: spec.name for spec in self._manifest.outputs}
        if entry.part is Part.WHOLE or cut is None:
            return (EnsembleStep(model.name, {own[i.name]: i.name for i in self._manifest.inputs}, outputs),)
        lookup = self._lookup(cut, model.maximum)
        taken = [port.tensor for port in model.inputs]
        between = {spec.name: f"{LOOKED_UP}{spec.name}" for spec in cut.tensors}
        return (
            EnsembleStep(lookup, {name: name for name in cut.lookup_inputs}, between),
            EnsembleStep(model.name, {own[name]: between.get(name, name) for name in taken}, outputs),
        )

    def _lookup(self, cut: SparseCut, maximum: int) -> str:
        """Name of the lookup model, which engines of the dense part share; it is added once."""
        name = f"{self._options.name}-lookup"
        known = next((model for model in self.models if model.name == name), None)
        if known is not None:
            wider = replace(known, maximum=max(known.maximum, maximum))
            self.models[self.models.index(known)] = wider
            return name
        fallback = self._manifest.fallback
        file = self._manifest.file(cut.lookup)
        entry = replace(
            fallback, id="lookup", path=cut.lookup, bytes=file.bytes, digest=file.sha256, evaluation=None
        )
        entry = replace(entry, batch=replace(entry.batch, max=maximum))
        inputs = tuple(spec for spec in self._manifest.inputs if spec.name in cut.lookup_inputs)
        form = form_of(replace(self._source(entry, name), inputs=inputs, outputs=cut.tensors))
        if isinstance(form, Refusal):
            raise BundleError(f"E1227 Triton cannot serve the lookup model: {form.reason}")
        # Requests wait in front of the engine; waiting in front of the lookup as well would be twice.
        self.models.append(replace(form.model, queues=False))
        return name

    def _add_ensemble(self, name: str, steps: tuple[EnsembleStep, ...], entry: EngineEntry) -> None:
        read = {tensor for step in steps for tensor in step.inputs.values()}
        inputs = tuple(spec for spec in self._manifest.inputs if spec.name in read)
        self.ensembles.append(
            Ensemble(
                name=name,
                inputs=ports_of(inputs),
                outputs=ports_of(self._manifest.outputs),
                maximum=min(m.maximum for m in self.models if m.name in {step.model for step in steps}),
                steps=steps,
                parameters=self._lineage(entry),
            )
        )

    def _source(self, entry: EngineEntry, name: str) -> BundledEngine:
        return BundledEngine(
            bundle=self._bundle,
            entry=entry,
            name=name,
            inputs=self._manifest.inputs_of(entry.part),
            outputs=self._manifest.outputs,
            sample={**self._sample.inputs, **self._sample.looked_up},
            parameters=self._lineage(entry),
            instances=self._options.instances,
        )

    def _lineage(self, entry: EngineEntry) -> dict[str, str]:
        values = {
            "bundle": self._digest,
            "model": self._manifest.model_digest,
            "created_by": self._manifest.created_by,
            "engine": entry.id,
            "engine_digest": entry.digest,
            "plan": entry.plan,
            "backend": entry.backend,
            "backend_version": entry.version,
        }
        return {f"{PARAMETER}{key}": value for key, value in values.items()}

    def _name(self, entry: EngineEntry) -> str:
        # Ids may hold characters that names in addresses may not.
        return f"{self._options.name}-{re.sub(r'[^A-Za-z0-9_.-]', '_', entry.id)}"


def _write_file(file: ModelFile, target: Path, bundle: Path, manifest: Manifest, copies: Copies) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not file.source:
        target.write_bytes(file.content)
    elif file.program:
        rename_program(bundle / file.source, file.program, target)
    else:
        digest = copies.copy(bundle / file.source, target)
        if digest != manifest.file(file.source).sha256:
            raise BundleInvalid(
                f"E1228 file '{file.source}' changed while it was copied",
                where=str(bundle),
                evidence=f"sha256 {digest[:16]}…",
                remedy="copy the bundle again from where it was written",
            )


def _asked(manifest: Manifest, options: TritonOptions) -> tuple[EngineEntry, ...]:
    """Engines to serve in the order of the manifest, the FP32 model last."""
    known = {entry.id for entry in manifest.candidates}
    unknown = [engine for engine in options.engines if engine not in known]
    if unknown:
        raise ConfigError(
            f"E1229 the bundle has no engine '{unknown[0]}'",
            evidence=f"it has {', '.join(sorted(known))}",
            remedy="name one of these with `--engine`",
        )
    chosen = {*options.engines} or known
    return tuple(e for e in manifest.candidates if e.id in chosen or e == manifest.fallback)


def _remarks(manifest: Manifest, engines: list[str]) -> Iterator[str]:
    served = [entry for entry in manifest.candidates if entry.id in engines]
    targets = sorted({entry.architecture for entry in served} - {"cpu"})
    if len(targets) > 1:
        yield (
            f"models for {' and '.join(targets)} are here, and a server loads all of them: name those of its "
            "GPU with `--engine`, or start it with `--model-control-mode=explicit`"
        )
    for choice in manifest.choice.targets:
        if len({route.engine for route in choice.routes} & set(engines)) > 1:
            yield (
                f"the bundle's own loader gives requests of '{choice.target}' to engines by their size; "
                "Triton gives them to the model that was called"
            )
    for entry in served:
        if entry.batch.min > 1:
            yield f"engine '{entry.id}' takes {entry.batch.min} rows and more; Triton pads no batch"


def _check_destination(destination: Path, bundle: Path) -> None:
    if destination == bundle or bundle in destination.parents:
        raise OutputError(
            f"E1231 '{destination}' is in the bundle",
            evidence="a bundle holds exactly the files that its manifest lists",
            remedy="choose another directory",
        )
    problem = _why_in_the_way(destination) if os.path.lexists(destination) else ""
    if problem:
        raise not_replaced(destination, problem)


def _why_in_the_way(destination: Path) -> str:
    """Reason why a repository may not replace an existing path; empty where it may: an empty directory, or a
    repository in which everything is as this project wrote it, or missing.
    """
    try:
        if not destination.is_dir():
            return "it is not a directory"
        if not any(destination.iterdir()):
            return ""
        record = serde.read(TritonRepository, destination / RECORD_NAME)
        return next(itertools.chain(_additions(destination, record), _changes(destination, record)), "")
    except (LokaError, OSError) as error:
        reason = error.what if isinstance(error, LokaError) else str(error)
        return f"it exists and is no repository that this project wrote, so it is not replaced: {reason}"


def _additions(root: Path, record: TritonRepository) -> Iterator[str]:
    """Yield files and directories beside those of the record; links are not followed."""
    files = {RECORD_NAME, *(file.path for file in record.files)}
    folders = {parent.as_posix() for path in files for parent in Path(path).parents}
    folders |= {f"{name}{end}" for name in record.directories for end in ("", f"/{VERSION}")}
    for path in sorted(root.rglob("*")):
        name, mode = path.relative_to(root).as_posix(), path.lstat().st_mode
        if stat.S_ISDIR(mode):
            is_known = name in folders or path.name == BYTE_CODE
        else:
            is_code = path.parent.name == BYTE_CODE and path.suffix == ".pyc"
            is_known = stat.S_ISREG(mode) and (name in files or is_code)
        if not is_known:
            yield f"it holds '{name}', which this project did not write"


def _changes(root: Path, record: TritonRepository) -> Iterator[str]:
    """Files of the record that are there with another content, the sizes of all first."""
    present = [file for file in record.files if os.path.lexists(root / file.path)]
    sizes = (file for file in present if (root / file.path).lstat().st_size != file.bytes)
    contents = (file for file in present if digest_file(root / file.path) != file.sha256)
    for file in itertools.chain(sizes, contents):
        yield f"'{file.path}' was changed after this project wrote it"

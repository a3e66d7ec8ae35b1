"""The first stages: export of the model, and checks of all inputs before the first long stage."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from loka_onnx.config import ModelConfig
from loka_onnx.core.artifact import ModelArtifact, TensorSpec
from loka_onnx.core.digests import digest_file, digest_json
from loka_onnx.core.site import HIGH_ERROR, SiteKind
from loka_onnx.data import Dataset, ensure_disjoint, open_dataset
from loka_onnx.errors import Collected, ConfigError, DataError, InternalError, ModelError, UserError, nearest
from loka_onnx.evaluation.columns import read_scores, read_truth
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.export.preflight import KEY, Batches, check_conversion, preflight
from loka_onnx.export.torch_module import export_torch, import_torch, load_builder
from loka_onnx.graph.entry import open_inputs
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.storage import model_digest
from loka_onnx.pipeline.context import CHECK_ROWS, LABEL_ROWS, Context, RunSettings
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.pipeline.mods import ChosenMods, rewrite
from loka_onnx.pipeline.outlook import Outlook, look_ahead
from loka_onnx.pipeline.plans import check_targets
from loka_onnx.pipeline.rows import bind_columns, fixed_widths, generated_rows, open_rows, open_splits
from loka_onnx.pipeline.survival import find_fatal_batch
from loka_onnx.planning.policy import PlanOptions, check_patterns
from loka_onnx.sessions.runner import Arrays

if TYPE_CHECKING:
    from torch import nn

EXPORT = DocumentStage("export", "model/exported.json", ModelArtifact)


def export_model(settings: RunSettings) -> ModelArtifact:
    """Torch or a foreign ONNX file → `model/exported.onnx` with named sites."""
    config, target = settings.config, settings.path("model/exported.onnx")
    if config.model.onnx is not None:
        source = config.model.onnx
        reads: dict[str, Any] = {"onnx": [source.name, model_digest(source)]}
        widths: dict[str, int] = {}
        # The import and the check of the data say what is wrong with either.
        with contextlib.suppress(UserError):
            widths = fixed_widths(config, open_inputs(source))
        reads |= {"widths": widths} if widths else {}

        def make() -> ModelArtifact:
            return import_onnx(source, target, settings.specs, widths=widths)
    else:
        torch_model = build_torch_model(config.model, config.directory)
        reads = {"torch": torch_model.key}

        def make() -> ModelArtifact:
            bindings = bind_columns(config.data.inputs, torch_model.inputs)
            rows = next(open_splits(config, bindings).calibration.batches(CHECK_ROWS))
            return export_torch(torch_model.module, rows.inputs, target, settings.specs)

    return settings.directory.document(EXPORT, {**reads, "outputs": settings.outputs_without_limits}, make)


@dataclass(frozen=True)
class Accepted:
    """A run with accepted inputs: notes for the report, rows to add to the profile, and the outlook."""

    context: Context
    notes: tuple[str, ...] = ()
    added: Dataset | None = None
    outlook: Outlook = field(default_factory=Outlook)


def accept(
    settings: RunSettings, *, added: Path | None = None, goes_on: bool = True, most: int | None = None
) -> Accepted:
    """Check all inputs of a run before its first long stage, and raise all errors at once.

    `added` is a file whose rows are to be added to the profile. Where all stages follow (`goes_on`), patterns
    of `plan.keep` and `plan.force` must name sites, which `export` lists, and there is an outlook. The first
    `most` rows of each split are read; all for None.

    Raises UserError if a device, backend, option, mod, column, row, label, weight or pattern cannot be used;
    the model does not import, does not run at every batch size, or its rows are not independent; or an
    output does not hold what its kind allows. `SeveralErrors` where it is more than one of these.
    """
    wrong = Collected()
    exported: ModelArtifact | None = None
    opened: Dataset | None = None
    with wrong.check():
        check_targets(settings.config)
    with wrong.check():
        ChosenMods(settings.config)
    with wrong.check():
        exported = export_model(settings)
    with settings.directory.watched("check data"):
        if exported is None:
            with wrong.check():
                # Without the model's inputs, the other columns.
                _ = settings.config.columns and open_splits(settings.config, ())
            wrong.raise_any()
            raise InternalError("a model that was not exported has an error")
        context = Context(**vars(settings), exported=exported)
        notes = _checked(context, wrong, most)
        with wrong.check():
            opened = None if added is None else open_added(context, added)
        if goes_on and not wrong.errors:
            check_plan_patterns(context)
        wrong.raise_any()
        return Accepted(context, notes, opened, look_ahead(context) if goes_on else Outlook())


def _checked(context: Context, wrong: Collected, most: int | None) -> tuple[str, ...]:
    """Check the model on the first rows, or on generated ones where these cannot be used; then all rows."""
    notes: tuple[str, ...] = ()
    rows: Arrays | None = None
    with wrong.check():
        rows = context.first_rows(CHECK_ROWS)
    with wrong.check():
        notes = _preflight(context, rows)
        if rows is not None:
            outputs = context.open_exported().run(rows)
            for spec in context.specs:
                read_scores(outputs, spec, None, is_reference=True)
    with wrong.check():
        splits = context.splits
        for data in (splits.calibration, splits.selection, splits.certification):
            with wrong.check():
                data.check(most)
        with wrong.check():
            check_requests(context, most)
        for data in (splits.selection, splits.certification):
            with wrong.check():
                _check_labels(context, data, most, are_judged=True)
    return notes


def _preflight(context: Context, rows: Arrays | None) -> tuple[str, ...]:
    """Run a few batches through the exported model, generated where there are no rows; return its notes."""
    config, exported = context.config, context.exported
    model, inputs = GraphModel.load(exported.path), exported.inputs
    drawn = rows or generated_rows(inputs, bind_columns({}, inputs, id_bounds(model)), CHECK_ROWS)
    batches = Batches(drawn, config.batch.min, config.batch.max, context.threads, rows is None)
    fatal = find_fatal_batch(exported.path, exported.other_products, batches)
    if fatal is not None:
        raise fatal.error(config.model.onnx or exported.path)
    judged, notes = [spec.name for spec in context.specs], []
    for finding in preflight(model, batches, judged):
        if config.model.require_independent_rows or not finding.is_about_rows:
            raise finding.error(config.model.onnx or exported.path)
        notes.append(
            f"The model {finding.what} ({finding.operator}; {finding.evidence}). The run went on because "
            f"`{KEY}` is false: every figure is of the batches that were run."
        )
    if config.model.onnx is not None and not notes:
        check_conversion(config.model.onnx, model, batches, judged)
    return tuple(notes)


def open_added(context: Context, path: Path) -> Dataset:
    """Open and check rows to add to the profile; ConfigError for judged rows, DataError for unusable ones."""
    added = open_rows(context.config, path, context.bindings)
    ensure_disjoint(added, context.splits.selection, context.splits.certification)
    added.check()
    _check_labels(context, added)
    return added


def _check_labels(
    context: Context, data: Dataset, most: int | None = None, *, are_judged: bool = False
) -> None:
    names = dict.fromkeys(n for spec in context.specs for n in (spec.label, spec.weight) if n is not None)
    if not names:
        return
    batches = list(context.read_columns(data, tuple(names), most))
    columns = {name: np.concatenate([batch[name] for batch in batches]) for name in names}
    wrong, where = Collected(), f"'{data.name}'"
    for spec in context.specs:
        with wrong.check():
            try:
                labels = read_truth(columns, spec, None).labels
            except DataError as error:
                error.restate(where=where)
                raise
            if are_judged and labels is not None and labels.min() == labels.max():
                raise DataError(
                    f"E1534 column '{spec.label}' holds one label alone",
                    where=where,
                    evidence=f"all of {labels.size} rows are {labels[0]:g}",
                    remedy="name the column of the outcome, or give rows with both; a loss is judged on both",
                )
    wrong.raise_any()


def check_requests(context: Context, most: int | None = None) -> None:
    """Check that the inputs of `data.request` are known, and equal within a request, in every split."""
    request = context.config.data.request
    if request is None:
        return
    known = [spec.name for spec in context.exported.inputs]
    for index, name in enumerate(request.inputs):
        if name not in known:
            raise ConfigError(
                f"E1535 the model has no input '{name}'",
                where=f"data.request.inputs[{index}]",
                evidence=f"its inputs are {', '.join(known)}",
                remedy=nearest(name, known) or "remove it",
            )
    bindings = [binding for binding in context.bindings if binding.input in request.inputs]
    for data in vars(context.splits).values():
        alone = open_dataset(data.path, bindings, (request.column,), data.selection)
        for batch in alone.batches(LABEL_ROWS, stop=min(data.rows, most or data.rows)):
            ids = batch.columns[request.column]
            _, first, group = np.unique(ids, return_index=True, return_inverse=True)
            for name in request.inputs:
                values = batch.inputs[name]
                row = int((values != values[first][group]).reshape(len(values), -1).any(axis=1).argmax())
                before, after = values[first[group[row]]], values[row]
                if (before != after).any():
                    raise DataError(
                        f"E1536 input '{name}' differs within a request",
                        where=f"'{data.name}'",
                        evidence=f"rows with {request.column} {ids[row]} hold {before} and {after}",
                        remedy="remove it from `data.request.inputs`, or correct `data.request.column`",
                    )


def check_plan_patterns(context: Context) -> None:
    """Refuse patterns of `plan.keep` and `plan.force` that name nothing, before the first long stage.

    A user who has read a report may name what mods made, so they are applied where the exported model lacks a
    name. Which high-error channels are split off is known after calibration only: a pattern may name the
    product of those of any linear site. Raises ConfigError, also for a site that is kept and forced.
    """
    chosen, exported = context.config.plan, context.exported
    options = PlanOptions(keep=chosen.keep, force=chosen.force)
    try:
        check_patterns(exported, options)
    except ConfigError:
        with TemporaryDirectory(prefix=".mods-", dir=exported.path.parent) as scratch:
            modified = rewrite(context, Path(scratch) / "modified.onnx").model
            named = any(HIGH_ERROR in pattern for pattern in (*chosen.keep, *chosen.force))
            if named and context.config.mods.split_channels:
                parts = (
                    replace(s, name=f"{s.name}{HIGH_ERROR}")
                    for s in modified.sites
                    if s.kind is SiteKind.LINEAR
                )
                modified = replace(modified, sites=(*modified.sites, *parts))
            check_patterns(modified, replace(options, exported=exported))


# Torch models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TorchModel:
    """Module and inputs that a builder returned; the key is of its source, arguments and checkpoint."""

    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    key: str


def build_torch_model(config: ModelConfig, directory: Path) -> TorchModel:
    """Call the builder, looked for in the run file's directory too, and load the checkpoint.

    Raises ModelError if the builder cannot be imported, fails, or does not return a module and its inputs, or
    if the checkpoint does not fit; MissingPackage if PyTorch is not installed.
    """
    import_torch()
    reference = config.torch or ""
    with _importable(directory):
        builder = load_builder(reference)
        source = inspect.getsourcefile(builder)
        with ModelError(f"E1530 the model builder '{reference}' failed").in_place_of(TypeError):
            built = builder(**config.arguments)
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], Mapping)):
        raise ModelError(
            f"E1531 the model builder '{reference}' must return a module and its example inputs",
            evidence=f"it returned a {type(built).__name__}",
            remedy="return (module, {'dense': array, 'ids': array}): it tells names, types and widths",
        )
    module, example = built
    if config.checkpoint is not None:
        _load_weights(module, config.checkpoint, reference)
    key = {
        "builder": reference,
        "source": digest_file(Path(source)) if source else "",
        # As text: the order of a mapping may be that of the model's tables, and digests sort keys.
        "arguments": json.dumps(config.arguments),
        "checkpoint": digest_file(config.checkpoint) if config.checkpoint else "",
    }
    arrays = {name: np.asarray(array) for name, array in example.items()}
    inputs = tuple(TensorSpec(n, a.dtype.name, (None, *map(int, a.shape[1:]))) for n, a in arrays.items())
    return TorchModel(module.eval(), inputs, digest_json(key))


def _load_weights(module: nn.Module, checkpoint: Path, reference: str) -> None:
    from loka_onnx.export.checkpoint import load_checkpoint

    misfit = ModelError(
        f"E1532 checkpoint '{checkpoint}' does not fit the model of '{reference}'",
        remedy="build the model with the sizes that the checkpoint was trained with",
    )
    state = load_checkpoint(checkpoint)
    with misfit.in_place_of(RuntimeError, words=lambda error: " ".join(str(error).split())[:300]):
        module.load_state_dict(state)


@contextlib.contextmanager
def _importable(directory: Path) -> Iterator[None]:
    """Let modules beside the run file be imported, as a script's own directory is."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))

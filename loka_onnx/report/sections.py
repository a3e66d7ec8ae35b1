"""The report as a document: content and order."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.rewrite import RewriteRecord
from loka_onnx.report import numbers
from loka_onnx.report.choice_tables import choice_sections
from loka_onnx.report.correction_tables import corrections_sections
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Column, Document, Section, Table, Tone, cell
from loka_onnx.report.engine_tables import engines_section, fallbacks_section
from loka_onnx.report.figures import Figure, Place, at, derive, formed, shown, told
from loka_onnx.report.provenance import Pointers, located
from loka_onnx.report.refinement_tables import refinement_sections
from loka_onnx.report.site_tables import calibration_facts, sites_section
from loka_onnx.report.slice_tables import slices_sections
from loka_onnx.report.throughput_tables import throughput_sections
from loka_onnx.report.verdict import verdicts

SYNTHETIC_BANNER = "SYNTHETIC DATA: every number below was measured on generated rows, not on yours"


def build_document(data: ReportData, pointers: Pointers | None = None) -> Document:
    """Arrange the facts of a run for reading; `pointers` are computed anew when None."""
    sections = (
        *([Section("notes", "Notes", items=data.notes)] if data.notes else []),
        engines_section(data),
        *choice_sections(data),
        *throughput_sections(data),
        *refinement_sections(data),
        *slices_sections(data),
        sites_section(data),
        *corrections_sections(data),
        _rewrites_section(data),
        fallbacks_section(data),
        _data_section(data),
        _model_section(data),
        _lineage_section(data),
    )
    banner = SYNTHETIC_BANNER if data.is_synthetic else ""
    return located(Document(data.title, banner, verdicts(data), sections), pointers or Pointers(data))


def _rewrites_section(data: ReportData) -> Section:
    records = [(name, record) for name, log in data.rewrites.items() for record in log.records]
    if not records:
        return Section("rewrites", "Rewrites", ("Nothing was rewritten.",))
    summary = Table(
        "Transforms",
        (
            Column("Sequence"),
            Column("Transform"),
            Column("Applied", numeric=True),
            Column("Declined", numeric=True),
            Column("Largest change", numeric=True),
            Column("Tolerance", numeric=True),
            Column("Result"),
            Column("Time", numeric=True),
        ),
        tuple(
            (
                cell(name),
                cell(record.transform),
                cell(_length(record, "applied")),
                cell(_length(record, "declined")),
                cell(shown(numbers.scientific, record, "max_abs")),
                cell(shown(numbers.scientific, record, "tolerance")),
                cell(*_result(record)),
                cell(_time(record)),
            )
            for name, record in records
        ),
    )
    applied = [
        (cell(record.transform), cell(item.at), cell(item.what))
        for _, record in records
        for item in record.applied
        if not record.rolled_back
    ]
    declined = [
        (cell(record.transform), cell(item.at), cell(item.reason))
        for _, record in records
        for item in record.declined
    ]
    rolled_back = [
        (cell(record.transform), cell(item.at), cell(told("{}: {}", item.what, _moved(record))))
        for _, record in records
        for item in record.applied
        if record.rolled_back
    ]
    tables = [summary]
    for caption, heading, rows in (
        ("Rewritten", "What", applied),
        ("Rolled back", "What, and why not", rolled_back),
        ("Declined", "Why not", declined),
    ):
        if rows:
            columns = (Column("Transform"), Column("At"), Column(heading, prose=True))
            tables.append(Table(caption, columns, tuple(rows), keys=2))
    return Section("rewrites", "Rewrites", tables=tuple(tables))


def _length(owner: object, name: str) -> str:
    return formed(numbers.count, derive("count", Place(owner, name)))


def _time(record: RewriteRecord) -> str:
    return formed(numbers.seconds, derive("sum", at(record, "seconds"), at(record, "check_seconds")))


def _result(record: RewriteRecord) -> tuple[str, Tone]:
    if record.rolled_back:
        return "rolled back", Tone.BAD
    if not record.applied:
        return "nothing to do", Tone.MUTED
    # Precision transforms change outputs on purpose; their engines are evaluated instead.
    return ("kept", Tone.GOOD) if record.max_abs is not None else ("kept, not an equivalence", Tone.PLAIN)


def _moved(record: RewriteRecord) -> str:
    if record.max_abs is None or record.tolerance is None:
        return "discarded"
    return told(
        "discarded, because an output moved by {}; the tolerance is {}",
        shown(numbers.scientific, record, "max_abs"),
        shown(numbers.scientific, record, "tolerance"),
    )


def _data_section(data: ReportData) -> Section:
    columns = (
        Column("Split"),
        Column("Source"),
        Column("Rows", numeric=True),
        Column("Digest of what is read"),
        Column("Which rows", prose=True),
    )
    rows = tuple(
        (
            cell(item.split),
            cell(item.name),
            cell(shown(numbers.count, item, "rows")),
            cell(numbers.digest(item.digest)),
            cell(item.rule),
        )
        for item in data.data.splits
    )
    items = [
        f"Labels: {data.data.label_rule}",
        *calibration_facts(data.profile),
    ]
    if data.is_synthetic:
        items.insert(0, "The data is synthetic.")
    said = (
        "The digest of a split is made of that of its file and of what is read from the file. It tells "
        "whether two runs were measured on the same; it is not the digest of the file itself."
    )
    return Section("data", "Data", (said,), tuple(items), (Table("Splits", columns, rows),))


def _model_section(data: ReportData) -> Section:
    columns = (
        Column("Model"),
        Column("SHA-256"),
        Column("Opset", numeric=True),
        Column("Sites", numeric=True),
        Column("FP8-able FLOPs per row", numeric=True),
        Column("FLOPs of all products per row", numeric=True),
        Column("Producer"),
    )
    models = [("exported", data.exported)]
    models += [("after mods", data.modified)] if data.modified.digest != data.exported.digest else []
    rows = tuple(
        (
            cell(name),
            cell(numbers.digest(model.digest)),
            cell(shown(str, model, "opset")),
            cell(_length(model, "sites")),
            cell(formed(numbers.count, derive("fp8_able_flops", Place(model, "sites")))),
            cell(formed(numbers.count, _product_flops(model))),
            cell(model.producer),
        )
        for name, model in models
    )
    parity = data.exported.parity
    items = list(data.exported.notes)
    if parity is not None:
        items.insert(
            0,
            told(
                "Parity with the original module on {} rows: largest difference {}, tolerance {}",
                shown(numbers.count, parity, "rows"),
                shown(numbers.scientific, parity, "max_abs"),
                shown(numbers.scientific, parity, "tolerance"),
            ),
        )
    tables = (Table("Models", columns, rows), *_other_products(data.modified))
    return Section("model", "Model", items=tuple(items), tables=tables)


def _product_flops(model: ModelArtifact) -> Figure:
    return derive("product_flops", Place(model, "sites"), Place(model, "other_products"))


def _other_products(model: ModelArtifact) -> Iterator[Table]:
    """Yield products of the model after mods that no plan decides."""
    columns = (
        Column("Node"),
        Column("Operator"),
        Column("FLOPs per row", numeric=True),
        Column("Share of all products", numeric=True),
        Column("Why it is no site", prose=True),
    )
    whole = _product_flops(model)
    flops = [(product, at(product, "flops_per_example")) for product in model.other_products]
    rows = [
        (
            cell(product.name),
            cell(product.op_type),
            cell(formed(numbers.count, figure, numbers.NOT_KNOWN)),
            cell(formed(numbers.share, derive("ratio", figure, whole), numbers.NOT_KNOWN)),
            cell(product.reason),
        )
        for product, figure in flops
    ]
    if rows:
        yield Table("Products that are no site: they run in the base precision", columns, tuple(rows))


def _lineage_section(data: ReportData) -> Section:
    versions = Table(
        "Versions",
        (Column("Package"), Column("Version")),
        tuple((cell(name), cell(version)) for name, version in sorted(data.versions.items())),
    )
    stages = Table(
        "Stages",
        (
            Column("Stage"),
            Column("Key"),
            Column("Reads"),
            Column("Files", numeric=True),
            Column("Time", numeric=True),
        ),
        tuple(
            (
                cell(stage.stage),
                cell(numbers.digest(stage.key)),
                cell(", ".join(f"{n} {numbers.digest(d)}" for n, d in sorted(stage.parents.items()))),
                cell(_length(stage, "files")),
                cell(shown(numbers.seconds, stage, "seconds")),
            )
            for stage in data.lineage
        ),
    )
    return Section(
        "lineage",
        "Versions and lineage",
        ("Digests are shortened here; report.json has all of them.",),
        tables=(versions, *([stages] if stages.rows else [])),
    )

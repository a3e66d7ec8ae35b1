"""The report as a document: content and order."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.lineage import StageRecord
from loka_onnx.core.rewrite import RewriteRecord
from loka_onnx.core.site import OtherProduct
from loka_onnx.report import numbers
from loka_onnx.report.choice_tables import (
    choice_sections,
    corrections_sections,
    refinement_sections,
    throughput_sections,
)
from loka_onnx.report.data import ReportData, SplitDescription
from loka_onnx.report.document import (
    Cell,
    Column,
    Document,
    Section,
    Table,
    Tone,
    fact,
    number,
    prose,
    table_of,
    text,
)
from loka_onnx.report.engine_tables import engines_section, fallbacks_section
from loka_onnx.report.figures import Figure, Place, counted, derive, formed, shown, told
from loka_onnx.report.provenance import Pointers, located
from loka_onnx.report.site_tables import calibration_facts, sites_section
from loka_onnx.report.slice_tables import slices_sections
from loka_onnx.report.verdict import verdicts

SYNTHETIC_BANNER = "SYNTHETIC DATA: every number below was measured on generated rows, not on yours"


def build_document(data: ReportData) -> Document:
    """Arrange the facts of a run for reading."""
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
    document: Document = located(Document(data.title, banner, verdicts(data), sections), Pointers(data))
    return document


def _rewrites_section(data: ReportData) -> Section:
    records = [(name, record) for name, log in data.rewrites.items() for record in log.records]
    if not records:
        return Section("rewrites", "Rewrites", ("Nothing was rewritten.",))
    columns: tuple[Column[tuple[str, RewriteRecord]], ...] = (
        text("Sequence", lambda row: row[0]),
        text("Transform", lambda row: row[1].transform),
        number("Applied", lambda row: counted(row[1], "applied")),
        number("Declined", lambda row: counted(row[1], "declined")),
        number("Largest change", lambda row: shown(numbers.scientific, row[1], "max_abs")),
        number("Tolerance", lambda row: shown(numbers.scientific, row[1], "tolerance")),
        text("Result", lambda row: _result(row[1])),
        number("Time", lambda row: formed(numbers.seconds, _seconds(row[1]))),
    )
    tables = (table_of("Transforms", columns, records), _entries([record for _, record in records]))
    return Section("rewrites", "Rewrites", tables=tables)


def _seconds(record: RewriteRecord) -> Figure:
    return derive("sum", Place(record, "seconds"), Place(record, "check_seconds"))


def _entries(records: list[RewriteRecord]) -> Table:
    rows: list[tuple[str, str, str, Cell]] = []
    for record in records:
        for item in record.applied:
            undone = Cell(told("{}: {}", item.what, _moved(record)), Tone.BAD)
            how, what = ("rolled back", undone) if record.rolled_back else ("done", Cell(item.what))
            rows.append((record.transform, item.at, how, what))
        rows += [(record.transform, left.at, "declined", Cell(left.reason)) for left in record.declined]
    columns: tuple[Column[tuple[str, str, str, Cell]], ...] = (
        text("Transform", lambda row: row[0]),
        text("At", lambda row: row[1]),
        text("Result", lambda row: row[2], is_choice=True),
        prose("What, or why not", lambda row: row[3]),
    )
    return table_of("Rewritten, rolled back and declined", columns, rows)


def _result(record: RewriteRecord) -> Cell:
    if record.rolled_back:
        return Cell("rolled back", Tone.BAD)
    if not record.applied:
        return Cell("nothing to do", Tone.MUTED)
    # Precision transforms change outputs on purpose; their engines are evaluated instead.
    return Cell("kept", Tone.GOOD) if record.max_abs is not None else Cell("kept, not an equivalence")


def _moved(record: RewriteRecord) -> str:
    if record.max_abs is None or record.tolerance is None:
        return "discarded"
    limits = (shown(numbers.scientific, record, name) for name in ("max_abs", "tolerance"))
    return told("discarded, because an output moved by {}; the tolerance is {}", *limits)


def _data_section(data: ReportData) -> Section:
    columns: tuple[Column[SplitDescription], ...] = (
        text("Split", "split"),
        text("Source", "name"),
        fact("Rows", "rows", numbers.count),
        text("Digest of what is read", lambda split: numbers.digest(split.digest)),
        prose("Which rows", "rule"),
    )
    items = [f"Labels: {data.data.label_rule}", *calibration_facts(data.profile)]
    if data.is_synthetic:
        items.insert(0, "The data is synthetic.")
    note = (
        "The digest of a split is made of that of its file and of what is read from the file. It tells "
        "whether two runs were measured on the same; it is not the digest of the file itself."
    )
    return Section("data", "Data", (note,), tuple(items), (table_of("Splits", columns, data.data.splits),))


def _model_section(data: ReportData) -> Section:
    models = [("exported", data.exported)]
    models += [("after mods", data.modified)] if data.modified.digest != data.exported.digest else []

    def able(row: tuple[str, ModelArtifact]) -> str:
        return formed(numbers.count, derive("fp8_able_flops", Place(row[1], "sites")))

    columns: tuple[Column[tuple[str, ModelArtifact]], ...] = (
        text("Model", lambda row: row[0]),
        text("SHA-256", lambda row: numbers.digest(row[1].digest)),
        number("Opset", lambda row: shown(str, row[1], "opset")),
        number("Sites", lambda row: counted(row[1], "sites")),
        number("FP8-able FLOPs per row", able),
        number("FLOPs of all products per row", lambda row: formed(numbers.count, _product_flops(row[1]))),
        text("Producer", lambda row: row[1].producer),
    )
    parity, items = data.exported.parity, list(data.exported.notes)
    if parity is not None:
        limits = (shown(numbers.scientific, parity, name) for name in ("max_abs", "tolerance"))
        template = "Parity with the original module on {} rows: largest difference {}, tolerance {}"
        items.insert(0, told(template, shown(numbers.count, parity, "rows"), *limits))
    tables = (table_of("Models", columns, models), *_other_products(data.modified))
    return Section("model", "Model", items=tuple(items), tables=tables)


def _product_flops(model: ModelArtifact) -> Figure:
    return derive("product_flops", Place(model, "sites"), Place(model, "other_products"))


def _other_products(model: ModelArtifact) -> Iterator[Table]:
    """Yield products of the model after mods that no plan decides."""
    whole = _product_flops(model)

    def flops(product: OtherProduct) -> str:
        return formed(numbers.count, Place(product, "flops_per_example"), numbers.NOT_KNOWN)

    def share(product: OtherProduct) -> str:
        figure = derive("ratio", Place(product, "flops_per_example"), whole)
        return formed(numbers.share, figure, numbers.NOT_KNOWN)

    columns: tuple[Column[OtherProduct], ...] = (
        text("Node", "name"),
        text("Operator", "op_type"),
        number("FLOPs per row", flops),
        number("Share of all products", share),
        prose("Why it is no site", "reason"),
    )
    if model.other_products:
        caption = "Products that are no site: they run in the base precision"
        yield table_of(caption, columns, model.other_products)


def _lineage_section(data: ReportData) -> Section:
    def parents(stage: StageRecord) -> str:
        return ", ".join(f"{name} {numbers.digest(key)}" for name, key in sorted(stage.parents.items()))

    packages: tuple[Column[tuple[str, str]], ...] = (
        text("Package", lambda row: row[0]),
        text("Version", lambda row: row[1]),
    )
    stages: tuple[Column[StageRecord], ...] = (
        text("Stage", "stage"),
        text("Key", lambda stage: numbers.digest(stage.key)),
        text("Reads", parents),
        number("Files", lambda stage: counted(stage, "files")),
        fact("Time", "seconds", numbers.seconds),
    )
    tables = [table_of("Versions", packages, sorted(data.versions.items()))]
    tables += [table_of("Stages", stages, data.lineage)] if data.lineage else []
    note = "Digests are shortened here; report.json has all of them."
    return Section("lineage", "Versions and lineage", (note,), tables=tuple(tables))

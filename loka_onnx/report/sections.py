"""The report as a document: content and order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import Latency, TargetChoice
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
from loka_onnx.report.data import CERTIFICATION, ReportData, SplitDescription
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
from loka_onnx.report.engine_tables import engines_section, fallbacks_section, load_columns
from loka_onnx.report.figures import (
    Figure,
    Place,
    Pointers,
    Told,
    counted,
    derive,
    formed,
    joined,
    located,
    shown,
    told,
)
from loka_onnx.report.site_tables import calibration_facts, sites_section
from loka_onnx.report.slice_tables import scores_sections, slices_sections
from loka_onnx.report.verdict import parts, verdicts

SYNTHETIC_BANNER = "SYNTHETIC DATA: every number below was measured on generated rows, not on yours"

_OPEN = ("slices", "scores", "engines", "sites", "operating")
"""Sections of which the first table is not folded."""
_COMMANDS = (
    "Check: loka-onnx bundle verify bundle; the digest of the bundle: loka-onnx bundle inspect bundle",
    "Serve: loka-onnx bundle serve bundle; on other hosts: loka-onnx bundle push bundle URL#NAME",
    "Let a name stand for it: loka-onnx bundle promote URL#NAME prod",
    "Roll back: loka-onnx bundle promote URL#sha256:DIGEST prod, with the digest of the bundle before",
)


def build_document(data: ReportData) -> Document:
    """Arrange the facts of a run for reading."""
    sections = (
        *([Section("notes", "Notes", items=data.notes)] if data.notes else []),
        *slices_sections(data),
        *scores_sections(data),
        engines_section(data),
        *choice_sections(data),
        *throughput_sections(data),
        *refinement_sections(data),
        sites_section(data),
        *corrections_sections(data),
        _rewrites_section(data),
        fallbacks_section(data),
        *([_operating_section(data)] if data.choice.targets else []),
        _data_section(data),
        _model_section(data),
        _lineage_section(data),
    )
    sections = tuple(replace(s, unfolded=int(s.anchor in _OPEN)) for s in sections)
    banner = SYNTHETIC_BANNER if data.is_synthetic else ""
    overview = _overview(data) if len(data.choice.targets) > 1 else None
    whole = Document(data.title, banner, verdicts(data), sections, overview, _about(data))
    document: Document = located(whole, Pointers(data))
    return document


def _about(data: ReportData) -> str:
    """Return the day, the model and the rows in a line."""
    rows = (split for split in data.data.splits if split.split == CERTIFICATION)
    parts = [Told(data.evaluations.date)] if data.evaluations.date else []
    parts.append(Told(f"model {numbers.digest(data.exported.digest)}"))
    parts += [told("certified on {} rows of {}", shown(numbers.count, r, "rows"), r.file) for r in rows]
    return joined(" · ", parts)


def _overview(data: ReportData) -> Table:
    """Return what is emitted, a row for each target."""
    columns: tuple[Column[TargetChoice], ...] = (
        text("Target", "target"),
        text("Plan", lambda choice: " and ".join(choice.plans)),
        text("Speed", lambda choice: parts(data, choice)[0]),
        text("Cost", lambda choice: parts(data, choice)[1]),
    )
    return table_of("Emitted", columns, data.choice.targets)


def _operating_section(data: ReportData) -> Section:
    """Return latencies, throughput and digest of what is emitted, and the commands to serve it."""
    emitted = [
        (engine, latency)
        for name in dict.fromkeys(name for choice in data.choice.targets for name in choice.engines)
        if (engine := data.engine(name)) is not None
        for latency in data.latencies(name) or (None,)
    ]

    def us(title: str, name: str) -> Column[tuple[EngineArtifact, Latency | None]]:
        return number(
            title,
            lambda row: (
                Cell(numbers.NOT_MEASURED, Tone.MUTED)
                if row[1] is None or not row[1].counts_for_choice or row[0].simulated
                else shown(numbers.latency, row[1], name)
            ),
        )

    def rate(row: tuple[EngineArtifact, Latency | None]) -> str:
        sizes = (row[0].id, row[1].batch if row[1] is not None else 0)
        measured = (m for m in data.throughput.measurements if (m.engine, m.batch) == sizes)
        first = next((m for m in measured if m.requests_per_s), None)
        return numbers.NOT_MEASURED if first is None else shown("{:,.1f}".format, first, "requests_per_s")

    columns: tuple[Column[tuple[EngineArtifact, Latency | None]], ...] = (
        text("Engine", lambda row: row[0].id),
        number(
            "Batch", lambda row: numbers.NONE if row[1] is None else shown(numbers.count, row[1], "batch")
        ),
        us("p50", "p50_us"),
        us("p90", "p90_us"),
        us("p99", "p99_us"),
        number("Requests/s", rate),
        *load_columns(emitted, lambda row: row[1]),
        number("Size", lambda row: shown(numbers.size, row[0], "bytes")),
        text("SHA-256", lambda row: numbers.digest(row[0].digest)),
    )
    return Section(
        "operating", "Operating", items=_COMMANDS, tables=(table_of("Emitted engines", columns, emitted),)
    )


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

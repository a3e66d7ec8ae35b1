"""The pages of results, from the records of a directory."""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import generic
from benchmarks.results.aims import Outcome
from benchmarks.results.catalog import ENTRIES, OTHERS, PAGES, Entry, entry_of
from benchmarks.results.engines import summary
from benchmarks.results.formats import NOTHING, number, table
from benchmarks.results.records import Record, load_records

DIRECTORY = "results"


@dataclass(frozen=True)
class Shown:
    """A record and how it is shown."""

    record: Record
    entry: Entry

    @property
    def title(self) -> str:
        """Its heading."""
        return self.entry.title.format(self.entry.matched(self.record.name))

    @property
    def command(self) -> str:
        """What measures it again: what the record says, else the benchmark's module."""
        stated = self.record.settings.get("command")
        options = self.entry.options.format(self.entry.matched(self.record.name))
        return str(stated) if stated else f"python -m {self.entry.module} {options}".strip()

    @property
    def outcomes(self) -> list[Outcome]:
        """Aims and what was reached."""
        return list(self.entry.aims(self.record)) if self.entry.aims else []


def result_pages(records: Path) -> dict[str, str]:
    """Address in the site → content: the first page, one for each group, and the records themselves.

    Args:
        records: Directory of records.
    """
    shown = [Shown(held, entry_of(name) or _unknown(name)) for name, held in load_records(records).items()]
    order = {entry: place for place, entry in enumerate(ENTRIES)}
    shown.sort(key=lambda each: (order.get(each.entry, len(order)), each.record.name))
    pages = {f"{DIRECTORY}/index.md": _first(shown)}
    for page in PAGES:
        held = [each for each in shown if each.entry.page is page]
        if held:
            parts = [f"# {page.title}", page.text, *(_section(each) for each in held)]
            pages[f"{DIRECTORY}/{page.address}.md"] = "\n\n".join(parts) + "\n"
    for path in sorted(records.glob("*.json")):
        pages[f"{DIRECTORY}/records/{path.name}"] = path.read_text(encoding="utf-8")
    return pages


def _unknown(name: str) -> Entry:
    return Entry(name, OTHERS, name.replace("_", " ").replace("-", " "), f"benchmarks.{name}")


def _first(shown: list[Shown]) -> str:
    rows = [
        row
        for each in shown
        if each.record.name.startswith(("trained-", "speed-"))
        for row in summary(each.record)
    ]
    head = (
        "case",
        "over today",
        "over our BF16",
        "over FP8 everywhere",
        "FLOPs in FP8",
        "ΔNE, certification",
    )
    every = [(each, outcome) for each in shown for outcome in each.outcomes]
    missed = [(each, outcome) for each, outcome in every if not outcome.is_met]
    return "\n\n".join(
        (
            "# Results",
            "These pages are written from the records in `benchmarks/records`: every figure is one "
            "of a record, "
            "and each record is linked. A record says what was measured, where, with which versions; "
            "`make bench` "
            "measures again what the machine at hand can. Nothing here is a promise about other devices.",
            "## Engines that were chosen",
            "Ratios of times: larger is better for the chosen engine. Plans are made by the benchmark, among "
            "those that a run makes and others; the dense part is timed, without embedding lookups, inputs "
            "on the device. What a run chooses, and requests from host memory: "
            "[the whole product on the zoo](engines.md#zoo-engines). Each section says on which device.",
            table(head, rows),
            "## What was missed",
            f"{number(len(every) - len(missed))} of {number(len(every))} aims are met. These are not:",
            table(("what", "aim", "measured"), [_linked(each, outcome) for each, outcome in missed], texts=3),
            "## Every record",
            table(
                ("record", "shows", "date", "measured on"),
                [
                    (
                        f"[{each.title}]({each.entry.page.address}.md#{each.record.name})",
                        _sentence(each),
                        each.record.date,
                        _where(each.record),
                    )
                    for each in shown
                ],
                texts=4,
            ),
        )
    )


def _linked(each: Shown, outcome: Outcome) -> tuple[str, str, str]:
    link = f"[{each.title}]({each.entry.page.address}.md#{each.record.name})"
    return ": ".join(part for part in (link, outcome.of) if part), outcome.aim, outcome.measured


def _section(each: Shown) -> str:
    parts = [f"## {each.title} {{ #{each.record.name} }}", _description(each)]
    if each.outcomes:
        rows = [
            (outcome.of, outcome.aim, outcome.measured, "met" if outcome.is_met else "**missed**")
            for outcome in each.outcomes
        ]
        parts.append(table(("", "aim", "measured", ""), rows, texts=4))
    parts += [each.entry.render(each.record), _facts(each)]
    return "\n\n".join(part for part in parts if part)


def _description(each: Shown) -> str:
    """What is measured and how: the docstring of the benchmark, its first sentence in front."""
    lines = docstring(each.entry.module)
    if not lines:
        return ""
    first, _, rest = lines.partition("\n\n")
    told = textwrap.indent(rest.strip().replace("::\n", ":\n"), "    ")
    return first + (f'\n\n??? note "How it is measured"\n\n{told}' if rest.strip() else "")


def _sentence(each: Shown) -> str:
    first = docstring(each.entry.module).partition("\n\n")[0]
    return " ".join(first.split())


def docstring(module: str) -> str:
    """The docstring of a module that is not imported for it; empty where there is none."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return ""
    if found is None or found.origin is None:
        return ""
    return ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8"))) or ""


def _facts(each: Shown) -> str:
    record = each.record
    rows = [("date", record.date), ("measured on", _where(record)), ("command", f"`{each.command}`")]
    rows += [(key, value) for key, value in record.device.items() if key != "name"]
    rows += [(key.replace("_", " "), _short(value)) for key, value in _settings(record)]
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())))
    rows.append(("record", f"[{record.name}.json](records/{record.name}.json)"))
    told = textwrap.indent(table(("", ""), rows, texts=2), "    ")
    return f'??? abstract "Where, when and with what"\n\n{told}'


def _settings(record: Record) -> Iterator[tuple[str, object]]:
    for key, value in record.settings.items():
        if key not in ("device", "command"):
            yield key, value


def _short(value: object) -> str:
    if isinstance(value, dict):
        return (
            ", ".join(f"{key}: {_short(held)}" for key, held in value.items() if key != "device") or NOTHING
        )
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return "; ".join(f"({number}) {_short(each)}" for number, each in enumerate(value, 1))
    return generic.scalar(value) if generic.is_scalar(value) else str(value)


def _where(record: Record) -> str:
    cores = f"{record.machine.get('cores', NOTHING)} cores {record.machine.get('processor', '')}".strip()
    return f"{record.device['name']}, {cores}" if record.device.get("name") else cores

"""Actions of the mods, by site.

A record of a mod names a site, another node or a tensor. An entry belongs to every site named in its place,
among the origins of a new site, or in quotes in its text. A name stands for a site when it is the site, one
of its tensors, or a node or tensor of the site's module (``over.fc1/relu`` for ``over.fc1``, ``dots/gather``
for ``dots.matmul``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loka_onnx.core.rewrite import Applied, Declined, RewriteLog, RewriteRecord
from loka_onnx.core.site import Site

_QUOTED = re.compile(r"(?<!output )'([^']+)'")
"""A quoted name. A rolled-back mod also names the output that moved, which is no place."""


class Mark(StrEnum):
    """Outcome at one place."""

    APPLIED = "applied"
    DECLINED = "declined"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True)
class Line:
    """One entry of a mod's record.

    Attributes:
        at: Node, site or tensor.
        text: Action, or the reason for none.
    """

    transform: str
    mark: Mark
    at: str
    text: str


@dataclass(frozen=True)
class SiteStory:
    """Actions on one site.

    Attributes:
        became: Sites after the mods that replace it; empty for a site that is still there.
        is_gone: Whether no site after the mods has this name.
        lines: Its entries, in the order of the mods.
    """

    site: str
    became: tuple[str, ...]
    is_gone: bool
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Explanation:
    """Actions of the mods by site.

    Attributes:
        sites: Sites after the mods in model order, then those that are gone.
        elsewhere: Entries that concern no site.
    """

    sites: tuple[SiteStory, ...]
    elsewhere: tuple[Line, ...]


def explain(log: RewriteLog, before: Sequence[Site], after: Sequence[Site]) -> Explanation:
    """Group a log by site."""
    places = _Places((*after, *before))
    found: defaultdict[str, list[Line]] = defaultdict(list)
    elsewhere: list[Line] = []
    for record in log.records:
        entries: tuple[Applied | Declined, ...] = (*record.applied, *record.declined)
        for entry in entries:
            line = _line(record, entry)
            sites = places.of(_names(entry))
            for site in sites:
                found[site].append(line)
            if not sites:
                elsewhere.append(line)
    there = {site.name for site in after}
    gone = [site.name for site in before if site.name not in there]
    stories = [SiteStory(site.name, (), False, tuple(found[site.name])) for site in after]
    for name in gone:
        became = tuple(site.name for site in after if name in site.merged_from)
        stories.append(SiteStory(name, became, True, tuple(found[name])))
    return Explanation(tuple(stories), tuple(elsewhere))


def _names(entry: Applied | Declined) -> list[str]:
    text = entry.what if isinstance(entry, Applied) else entry.reason
    origins: Mapping[str, tuple[str, ...]] = entry.origins if isinstance(entry, Applied) else {}
    replaced = (name for names in origins.values() for name in names)
    return [entry.at, *origins, *replaced, *_QUOTED.findall(text)]


def _line(record: RewriteRecord, entry: Applied | Declined) -> Line:
    if isinstance(entry, Declined):
        # A rollback turns applied entries into declined ones, with the output that moved.
        undone = record.rolled_back and entry.reason.startswith("rolled back")
        mark = Mark.ROLLED_BACK if undone else Mark.DECLINED
        return Line(record.transform, mark, entry.at, entry.reason)
    if not record.rolled_back:
        return Line(record.transform, Mark.APPLIED, entry.at, entry.what)
    moved = "" if record.max_abs is None else f": moved an output by {record.max_abs:.3g}"
    held = "" if record.tolerance is None else f", tolerance {record.tolerance:.3g}"
    return Line(record.transform, Mark.ROLLED_BACK, entry.at, f"{entry.what}; rolled back{moved}{held}")


class _Places:
    """Sites that a name stands for."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self._sites: set[str] = set()
        self._by_tensor: defaultdict[str, list[str]] = defaultdict(list)
        self._by_module: defaultdict[str, list[str]] = defaultdict(list)
        for site in sites:
            self._sites.add(site.name)
            for tensor in (site.output, *(operand.tensor for operand in site.operands)):
                self._by_tensor[tensor].append(site.name)
            for module in (site.name, site.name.rpartition(".")[0]):
                self._by_module[module].append(site.name)

    def of(self, names: Iterable[str]) -> list[str]:
        """Return the sites, each once."""
        return list(dict.fromkeys(site for name in names for site in self._one(name)))

    def _one(self, name: str) -> Sequence[str]:
        if name in self._sites:
            return [name]
        module = name.rpartition("/")[0]
        return [*self._by_tensor.get(name, ()), *(self._by_module.get(module, ()) if module else ())]

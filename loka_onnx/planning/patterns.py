"""Match user patterns with sites, the sites that they were merged from, nodes, and modules.

A shell pattern matches the name of a site or node, the name of a site that it replaces (users write the names
that `loka-onnx export` lists; mods merge them), or a module that contains one: `tower.calibrator` matches
`tower.calibrator.fc` and `tower.calibrator/mul`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.errors import ConfigError
from loka_onnx.graph.model import GraphModel


@dataclass(frozen=True)
class Named:
    """Matched sites, other nodes (of patterns without a site), and the patterns without any match."""

    sites: Mapping[str, str]
    nodes: Mapping[str, str]
    nothing: tuple[str, ...] = ()


def named_places(
    patterns: Sequence[str],
    sites: Sequence[Site],
    nodes: Iterable[str] | None,
    key: str,
    earlier: Iterable[str] = (),
) -> Named:
    """Return the sites that patterns match, and the other nodes that patterns without a site match.

    Without `nodes` a pattern must match sites. `earlier` are names in the exported model, whose matches mods
    may have removed; a pattern that matches nothing in either is a ConfigError, which names the config key
    `key`.
    """
    named = find_places(patterns, sites, nodes or ())
    known = list(earlier) if named.nothing else []
    for pattern in named.nothing:
        if any(_names(pattern, name) for name in known):
            continue
        names = [name for site in sites for name in (site.name, *site.merged_from)]
        near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
        raise ConfigError(
            f"E0706 pattern '{pattern}' matches {'no site' if nodes is None else 'no site and no node'}",
            where=key,
            evidence=f"the nearest of {len(sites)} sites is '{near[0]}'" if near else "there are no sites",
            remedy="`loka-onnx export` lists the sites of a model",
        )
    return named


def find_places(patterns: Sequence[str], sites: Sequence[Site], nodes: Iterable[str]) -> Named:
    """Match patterns; those without a match are returned, not refused."""
    matched: dict[str, str] = {}
    others: dict[str, str] = {}
    nothing: list[str] = []
    all_nodes = list(nodes)
    for pattern in patterns:
        hits = [s.name for s in sites if any(_names(pattern, n) for n in (s.name, *s.merged_from))]
        matched.update(dict.fromkeys(hits, pattern))
        if hits:
            continue
        more = [node for node in all_nodes if _names(pattern, node)]
        others.update(dict.fromkeys(more, pattern))
        if not more:
            nothing.append(pattern)
    return Named(matched, others, tuple(nothing))


def wishes(
    model: ModelArtifact,
    graph: GraphModel,
    keep: Sequence[str],
    force: Sequence[str],
    exported: ModelArtifact | None,
) -> tuple[Named, Named]:
    """Return the matches of `plan.keep` (sites and nodes) and of `plan.force` (products).

    `exported` is the model before mods; None where it is the same. Raises ConfigError if a pattern matches
    nothing in either model, or a site is kept and forced.
    """
    products = [site for site in model.sites if site.kind is not SiteKind.NORM]
    nodes = (node.name for node in graph.nodes)
    earlier = () if exported is None else (s.name for s in exported.sites if s.kind is not SiteKind.NORM)
    # Generators: the exported model is loaded when a pattern matches nothing.
    models = () if exported is None else (exported.path,)
    before = (node.name for path in models for node in GraphModel.load(path).nodes)
    kept = named_places(keep, model.sites, nodes, "plan.keep", before)
    forced = named_places(force, products, None, "plan.force", earlier)
    both = sorted(set(kept.sites) & set(forced.sites))
    if both:
        raise ConfigError(
            f"E0705 site '{both[0]}' is both kept and forced",
            evidence=f"plan.keep has '{kept.sites[both[0]]}', plan.force has '{forced.sites[both[0]]}'",
            remedy="make one of the patterns narrower",
        )
    return kept, forced


def nothing_left(key: str, patterns: Sequence[str]) -> Iterator[str]:
    """Return a note for each pattern that decides nothing."""
    return (
        f"'{pattern}' of {key} decides nothing: mods removed all that it names in the exported model"
        for pattern in patterns
    )


def _names(pattern: str, name: str) -> bool:
    """True if a pattern matches a name or a module that contains it."""
    module, slash, _ = name.rpartition("/")
    parts = (module if slash else name.rpartition(".")[0]).split(".")
    modules = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(fnmatchcase(each, pattern) for each in (name, *modules) if each)

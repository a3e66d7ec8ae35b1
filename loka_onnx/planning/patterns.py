"""What the patterns of a user name: sites, the sites that they were merged from, nodes, and modules.

A pattern is that of a shell. It names a site or node when it matches its name, the name of a site that it
replaces (a user writes the names that `loka-onnx export` lists; mods merge them), or a module that one of
these is in: `tower.calibrator` names `tower.calibrator.fc` and `tower.calibrator/mul`.
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
    """Sites that patterns name, each with the pattern.

    Attributes:
        sites: By name.
        nodes: Those that are no sites, by name; only of patterns that name no site.
        nothing: Patterns that name neither.
    """

    sites: Mapping[str, str]
    nodes: Mapping[str, str]
    nothing: tuple[str, ...] = ()


def matching_sites(patterns: Sequence[str], sites: Sequence[Site], key: str) -> dict[str, str]:
    """Sites that a pattern names, each with the pattern.

    Raises:
        ConfigError: A pattern names no site.
    """
    return dict(named_places(patterns, sites, None, key).sites)


def named_places(
    patterns: Sequence[str],
    sites: Sequence[Site],
    nodes: Iterable[str] | None,
    key: str,
    earlier: Iterable[str] = (),
) -> Named:
    """Sites that a pattern names, and for a pattern that names none, the other nodes.

    Args:
        patterns: The patterns.
        sites: Sites of the model.
        nodes: Names of its nodes; None where a pattern must name sites.
        key: Where the user wrote the patterns.
        earlier: Names that the exported model had. Mods may have removed all that a pattern named there.

    Raises:
        ConfigError: A pattern names nothing, and named nothing earlier.
    """
    found = find_places(patterns, sites, nodes or ())
    known = list(earlier) if found.nothing else []
    for pattern in found.nothing:
        if not any(_names(pattern, name) for name in known):
            raise _nothing(pattern, sites, key, "no site" if nodes is None else "no site and no node")
    return found


def find_places(patterns: Sequence[str], sites: Sequence[Site], nodes: Iterable[str]) -> Named:
    """What patterns name; a pattern that names nothing is told, not refused."""
    found: dict[str, str] = {}
    others: dict[str, str] = {}
    nothing: list[str] = []
    all_nodes = list(nodes)
    for pattern in patterns:
        hits = [s.name for s in sites if any(_names(pattern, n) for n in (s.name, *s.merged_from))]
        found.update(dict.fromkeys(hits, pattern))
        if hits:
            continue
        more = [node for node in all_nodes if _names(pattern, node)]
        others.update(dict.fromkeys(more, pattern))
        if not more:
            nothing.append(pattern)
    return Named(found, others, tuple(nothing))


def wishes(
    model: ModelArtifact,
    graph: GraphModel,
    keep: Sequence[str],
    force: Sequence[str],
    exported: ModelArtifact | None,
) -> tuple[Named, Named]:
    """What the patterns of `plan.keep` name, and those of `plan.force`.

    Args:
        model: The model.
        graph: The same.
        keep: Patterns of sites and nodes.
        force: Patterns of products.
        exported: The model before mods; None where it is the same.

    Raises:
        ConfigError: A pattern names nothing in either model, or a site is kept and forced.
    """
    products = [site for site in model.sites if site.kind is not SiteKind.NORM]
    nodes = (node.name for node in graph.nodes)
    kept = named_places(keep, model.sites, nodes, "plan.keep", _names_of(exported))
    forced = named_places(force, products, None, "plan.force", _products_of(exported))
    both = sorted(set(kept.sites) & set(forced.sites))
    if both:
        raise ConfigError(
            f"site '{both[0]}' is both kept and forced",
            evidence=f"plan.keep has '{kept.sites[both[0]]}', plan.force has '{forced.sites[both[0]]}'",
            remedy="make one of the patterns narrower",
        )
    return kept, forced


def nothing_left(key: str, patterns: Sequence[str]) -> Iterator[str]:
    """A note for each pattern that decides nothing."""
    return (
        f"'{pattern}' of {key} decides nothing: mods removed all that it names in the exported model"
        for pattern in patterns
    )


def _names_of(model: ModelArtifact | None) -> Iterator[str]:
    """Names of all nodes, sites among them; the model is read when they are asked for."""
    if model is not None:
        yield from (node.name for node in GraphModel.load(model.path).nodes)


def _products_of(model: ModelArtifact | None) -> Iterator[str]:
    sites = () if model is None else model.sites
    return (site.name for site in sites if site.kind is not SiteKind.NORM)


def _names(pattern: str, name: str) -> bool:
    return any(fnmatchcase(each, pattern) for each in _with_modules(name))


def _with_modules(name: str) -> Iterator[str]:
    yield name
    module, slash, _ = name.rpartition("/")
    if not slash:
        module = name.rpartition(".")[0]
    while module:
        yield module
        module = module.rpartition(".")[0]


def _nothing(pattern: str, sites: Sequence[Site], key: str, what: str) -> ConfigError:
    names = [name for site in sites for name in (site.name, *site.merged_from)]
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
    return ConfigError(
        f"pattern '{pattern}' matches {what}",
        where=key,
        evidence=f"the nearest of {len(sites)} sites is '{near[0]}'" if near else "there are no sites",
        remedy="`loka-onnx export` lists the sites of a model",
    )

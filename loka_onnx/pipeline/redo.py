"""Profiles of a model after mods: sites that are measured now beside those that did not change.

All are measured on the same rows and under the same recipes. How many of the rows it took to reach a verdict
may differ from site to site.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.exact_sum import NOTHING_ADDED
from loka_onnx.core.profile import Profile, Sampling
from loka_onnx.core.statistics import TensorRange
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import GraphModel


def changed_sites(earlier: Profile, model: ModelArtifact) -> frozenset[str]:
    """Return sites that a profile of the model before mods does not cover.

    New ones, those that a mod says it replaced or changed, and those whose operands have other names: a mod
    that writes a constant gives it a new one.
    """
    known = {entry.site: set(entry.operands) for entry in earlier.sites}
    return frozenset(
        site.name
        for site in model.sites
        if site.merged_from or known.get(site.name) != {operand.tensor for operand in site.operands}
    )


def with_partners(model: ModelArtifact, names: Collection[str]) -> frozenset[str]:
    """Return sites with those that share a tensor with one of them in FP8: they are measured together."""
    graph = GraphModel.load(model.path)
    readers: dict[str, set[str]] = {}
    for site in model.sites:
        if site.is_fp8_able:
            tensor = layout_root(graph.node(site.name).inputs[site.activation.index]).tensor
            readers.setdefault(tensor.name, set()).add(site.name)
    partners = (group for group in readers.values() if group & set(names))
    return frozenset(names).union(*partners)


def with_sites(earlier: Profile, later: Profile, model: ModelArtifact) -> Profile:
    """Replace sites of the earlier profile by those of the later one, for a model that has them all.

    Facts of all sites hold for each: rows are the fewest of both, and intervals are those that hold
    at any number of rows where either was stopped by what it saw.

    Args:
        later: Sites that were measured now, with their partners (`with_partners`).
        model: The model; it decides which sites there are, and their order.
    """
    entries = {entry.site: entry for entry in (*earlier.sites, *later.sites)}
    again = {entry.site for entry in later.sites}
    order = [site.name for site in model.sites]
    kept = [
        group for group in earlier.groups if again.isdisjoint(group.sites) and set(group.sites) <= set(order)
    ]
    operands = {tensor for name in order for tensor in entries[name].operands}
    return replace(
        earlier,
        model_digest=model.digest,
        error_rows=min(earlier.error_rows, later.error_rows),
        sampling=_sampling(earlier, later, set(order) - again),
        sites=tuple(entries[name] for name in order),
        scales={
            rounding: {**earlier.scales.get(rounding, {}), **later.scales.get(rounding, {})}
            for rounding in sorted({*earlier.scales, *later.scales})
        },
        seconds={
            name: earlier.seconds.get(name, NOTHING_ADDED).merge(later.seconds.get(name, NOTHING_ADDED))
            for name in sorted({*earlier.seconds, *later.seconds})
        },
        groups=tuple(sorted((*kept, *later.groups), key=lambda group: order.index(group.sites[0]))),
        weights=tuple(sorted({*earlier.weights, *later.weights} & operands)),
        tensors=_tensors(earlier, model),
    )


def carried(earlier: Profile, model: ModelArtifact) -> Profile:
    """Return the earlier profile for a model of which every site is known."""
    order = [site.name for site in model.sites]
    entries = {entry.site: entry for entry in earlier.sites}
    return replace(
        earlier,
        model_digest=model.digest,
        sites=tuple(entries[name] for name in order),
        groups=tuple(group for group in earlier.groups if set(group.sites) <= set(order)),
        tensors=_tensors(earlier, model),
    )


def _tensors(earlier: Profile, model: ModelArtifact) -> dict[str, TensorRange]:
    """Return ranges of tensors; none for another model, because a mod may have changed any of them."""
    return earlier.tensors if earlier.model_digest == model.digest else {}


def _sampling(earlier: Profile, later: Profile, kept: Collection[str]) -> Sampling:
    one, two = earlier.sampling, later.sampling
    still_open = [name for name in one.undecided if name in kept]
    return Sampling(
        min(one.rows, two.rows),
        max(one.looks, two.looks),
        two.tightest_at,
        tuple(sorted({*still_open, *two.undecided})),
        one.may_stop_early or two.may_stop_early,
    )

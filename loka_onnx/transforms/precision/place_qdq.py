"""Keep one Q/DQ pair per tensor, at its producer.

Rounding is elementwise under one scale, so it commutes with every operator L that only moves or repeats
values, bit for bit, and with Concat where all parts have that scale::

    DQ(Q(L(x))) = L(DQ(Q(x)))          DQ(Q(Concat(x₁, …, xₘ))) = Concat(DQ(Q(x₁)), …, DQ(Q(xₘ)))

Three steps, all of which keep every value:

1. *Hoist*: a pair moves in front of the operators that move its values, if nothing else reads their input
   (`qdq_flow`). The DQ stays with its Q, in front of L: ONNX defines Concat, Slice, Split and Gather for
   floats only, and an engine that commutes the two moves FP8 values (`Fusions.moved_in_float8`).
2. *Share*: pairs of one tensor and one key become one, also where one stands behind a view that is also read
   exactly: the view is copied, which costs nothing.
3. *Chains* are found and reported (`qdq_chains`).

Exact readers of a tensor stay exact: a norm reads the residual sum in front of it, and no Q
comes between the two. Declined, with the reason: a tensor under two scales; a selection from a tensor whose
rest is read exactly; a Concat of rows of embedding tables, which TensorRT for RTX stores
in FP8 for one Q behind the Concat and in the base precision for a Q behind each lookup.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from networkx.utils import UnionFind

from loka_onnx.core.backends import Fusions
from loka_onnx.core.rewrite import Applied, Declined, RewriteRecord
from loka_onnx.graph.layout import reapply
from loka_onnx.graph.model import GraphModel, Node, Tensor, producer
from loka_onnx.transforms.precision.qdq_chains import find_chains
from loka_onnx.transforms.precision.qdq_flow import Flow
from loka_onnx.transforms.precision.qdq_pairs import (
    VIEWS,
    Key,
    Pair,
    add_pair,
    bypass_pair,
    find_pairs,
    move_pair,
    moved,
)

_NAMED = 4
"""Most operators that a report names."""


def place_qdq(model: GraphModel, quantized_sites: Collection[str], fusions: Fusions) -> RewriteRecord:
    """Move the Q/DQ pairs of a graph to the producers of their tensors; in place.

    Args:
        model: A graph with a pair in front of each FP8 site, before it is cast to another precision.
        fusions: What the backend computes in one kernel, and moves in FP8.
    """
    applied: list[Applied] = []
    while True:
        nodes = model.sorted_nodes()
        pairs = find_pairs(model, nodes)
        placing = _Placing(model, Flow(model, nodes, pairs.found, fusions.moved_in_float8))
        placing.collect(nodes, pairs.found)
        applied += placing.hoist_and_share()
        copied = placing.share_behind_views(fusions)
        applied += copied
        model.remove(placing.dropped)
        if not copied:
            break
        # A view that lost a reader to its copy may now have readers of one key only.
    placed = placing.placed
    chains = find_chains(model, placed, quantized_sites, fusions)
    declined = (*pairs.declined, *placing.why_not_further(), *_other_keys(placed), *chains.declined)
    return RewriteRecord("place-qdq", (*applied, *chains.applied), declined)


@dataclass
class _Place:
    """A tensor that gets one pair.

    Attributes:
        key: How it is rounded.
        direct: Pairs that read it already.
        edges: Carrying operators, and the input positions where they read it.
    """

    tensor: Tensor
    key: Key
    direct: list[Pair] = field(default_factory=list)
    edges: list[tuple[Node, int]] = field(default_factory=list)
    pair: Pair | None = None


@dataclass
class _Region:
    """Connected carrying operators, the tensors in front of them and the pairs behind."""

    places: dict[int, _Place] = field(default_factory=dict)
    carrying: list[Node] = field(default_factory=list)
    behind: list[Pair] = field(default_factory=list)


class _Placing:
    """Collects tensors to quantize, then edits."""

    def __init__(self, model: GraphModel, flow: Flow) -> None:
        self._model, self._flow = model, flow
        self._places: dict[tuple[int, Key], _Place] = {}
        self._groups = UnionFind()
        self._carrying: list[Node] = []
        self._behind: list[Pair] = []
        self.dropped: list[Node] = []

    @property
    def placed(self) -> tuple[Pair, ...]:
        """Pairs at their present positions."""
        return tuple(place.pair for place in self._places.values() if place.pair is not None)

    def collect(self, nodes: list[Node], pairs: tuple[Pair, ...]) -> None:
        """Find the tensors that get a pair; the graph is not changed."""
        by_node = {id(pair.q): pair for pair in pairs}
        for node in nodes:
            pair = by_node.get(id(node))
            if pair is not None:
                self._collect_pair(pair)
            elif self._flow.carries(node):
                self._collect_carrying(node)

    def _collect_pair(self, pair: Pair) -> None:
        maker = producer(pair.source)
        if self._flow.carries(maker):
            self._behind.append(pair)
        else:
            self._place(pair.source, pair.key).direct.append(pair)

    def _collect_carrying(self, node: Node) -> None:
        self._carrying.append(node)
        key = next(k for t in node.outputs if (k := self._flow.demand(t).key) is not None)
        values = {id(tensor) for tensor in moved(node)}
        for index, tensor in enumerate(node.inputs):
            if id(tensor) not in values:
                continue
            maker = producer(tensor)
            if self._flow.carries(maker):
                self._groups.union(id(node), id(maker))
            else:
                place = self._place(tensor, key)
                place.edges.append((node, index))
                self._groups.union(id(node), id(place))

    def _place(self, tensor: Tensor, key: Key) -> _Place:
        return self._places.setdefault((id(tensor), key), _Place(tensor, key))

    def hoist_and_share(self) -> list[Applied]:
        """Give every tensor one pair; pairs behind carrying operators move in front of them."""
        regions: dict[int, _Region] = {}
        for place in self._places.values():
            self._region(regions, id(place)).places[id(place)] = place
        for node in self._carrying:
            self._region(regions, id(node)).carrying.append(node)
        for pair in self._behind:
            self._region(regions, id(producer(pair.source))).behind.append(pair)
        applied: list[Applied] = []
        for region in regions.values():
            applied += self._settle(region)
        return applied

    def _region(self, regions: dict[int, _Region], member: int) -> _Region:
        return regions.setdefault(self._groups[member], _Region())

    def _settle(self, region: _Region) -> list[Applied]:
        places = list(region.places.values())
        before = len(region.behind) + sum(len(place.direct) for place in places)
        for pair in region.behind:
            bypass_pair(self._model, pair, pair.source)
        free = iter(region.behind)
        for place in places:
            if place.direct:
                place.pair = place.direct[0]
            elif (spare := next(free, None)) is not None:
                place.pair = Pair(spare.q, spare.dqs[:1], spare.key)
                self.dropped += spare.dqs[1:]
                move_pair(place.pair, place.tensor)
            else:
                place.pair = add_pair(self._model, place.tensor, region.behind[0])
            for extra in place.direct[1:]:
                self.dropped += bypass_pair(self._model, extra, place.pair.rounded)
            for node, index in place.edges:
                node.inputs[index] = place.pair.rounded
        self.dropped += [node for pair in free for node in (pair.q, *pair.dqs)]
        return _told(region, before)

    def share_behind_views(self, fusions: Fusions) -> list[Applied]:
        """Remove the Q behind a view of a tensor that has a pair of the same key: the view is copied."""
        views = VIEWS & fusions.moved_in_float8
        applied: list[Applied] = []
        for place in list(self._places.values()):
            chain: list[Node] = []
            tensor, other = place.tensor, None
            while other is None and (maker := producer(tensor)) is not None and moved(maker, views):
                chain.append(maker)
                tensor = maker.inputs[0]
                other = self._places.get((id(tensor), place.key))
            if other is None or other.pair is None or place.pair is None:
                continue
            copy = reapply(self._model, chain[::-1], other.pair.rounded, place.pair.name)
            copy.shape = place.tensor.shape
            self.dropped += bypass_pair(self._model, place.pair, copy)
            what = f"shares the Q/DQ '{other.pair.name}' through a copy of {_names(chain)}"
            applied.append(Applied(place.pair.name, what))
            del self._places[id(place.tensor), place.key]
        return applied

    def why_not_further(self) -> list[Declined]:
        """Return why pairs stay behind operators that move their values."""
        return [
            Declined(place.pair.name, reason)
            for place in self._places.values()
            if place.pair is not None and (reason := self._flow.why_behind(place.tensor))
        ]


def _told(region: _Region, before: int) -> list[Applied]:
    """Report the pairs of a region that moved or merged."""
    pairs = [place.pair for place in region.places.values() if place.pair is not None]
    shared = f"{before} pairs made {len(pairs)}" if len(pairs) < before else ""
    if region.carrying:
        tensors = ", ".join(f"'{place.tensor.name}'" for place in list(region.places.values())[:_NAMED])
        more = f" and {len(region.places) - _NAMED} more" if len(region.places) > _NAMED else ""
        what = f"hoisted in front of {_names(region.carrying)}, to {tensors}{more}"
        return [Applied(pairs[0].name, f"{what}; {shared}" if shared else what)]
    return [Applied(pairs[0].name, f"shared: {shared}")] if shared else []


def _names(nodes: list[Node]) -> str:
    named = ", ".join(f"{node.op} '{node.name}'" for node in nodes[:_NAMED])
    return f"{named} and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else named


def _other_keys(pairs: tuple[Pair, ...]) -> list[Declined]:
    """Return tensors that several pairs round differently."""
    by_source: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_source.setdefault(id(pair.source), []).append(pair)
    return [
        Declined(
            same[0].name,
            f"'{same[0].source.name}' is rounded under several scales, which stay apart: "
            + "; ".join(f"'{pair.name}' {pair.key}" for pair in same),
        )
        for same in by_source.values()
        if len(same) > 1
    ]

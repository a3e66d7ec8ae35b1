"""Keep one Q/DQ pair per tensor, at its producer.

Rounding is elementwise under one scale, so it commutes with every operator L that only moves or repeats
values, bit for bit, and with Concat where all parts have that scale::

    DQ(Q(L(x))) = L(DQ(Q(x)))          DQ(Q(Concat(x₁, …, xₘ))) = Concat(DQ(Q(x₁)), …, DQ(Q(xₘ)))

Three steps, all of which keep every value:

1. *Hoist*: a pair moves in front of the operators that move its values, if nothing else reads their input
   (`qdq_pairs`). The DQ stays with its Q, in front of L: ONNX defines Concat, Slice, Split and Gather for
   floats only, and an engine that commutes the two moves FP8 values (`Fusions.moved_in_float8`).
2. *Share*: pairs of one tensor and one key become one, also where one stands behind a view that is also read
   exactly: the view is copied, which costs nothing.
3. *Chains* are found and reported: sites that feed another site in FP8. A Q directly behind an operator whose
   kernel can quantize costs no pass over memory. Where such operators lead back to a product in FP8, with no
   tensor between that another node reads, bias, activation function, gate and norm run inside a kernel.

Exact readers of a tensor stay exact: a norm reads the residual sum in front of it, and no Q
comes between the two. Declined, with the reason: a tensor under two scales; a selection from a tensor whose
rest is read exactly; a Concat of rows of embedding tables, which TensorRT for RTX stores
in FP8 for one Q behind the Concat and in the base precision for a Q behind each lookup.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from loka_onnx.core.backends import Fusions
from loka_onnx.core.rewrite import Applied, Declined, RewriteRecord
from loka_onnx.graph.layout import reapply
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, is_constant, producer
from loka_onnx.graph.sites import PRODUCT_OPS
from loka_onnx.transforms.base import Found, record
from loka_onnx.transforms.precision.qdq_pairs import (
    MOVEMENTS,
    VIEWS,
    Flow,
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
_SILENT = MOVEMENTS | PRODUCT_OPS
"""Without a report where no chain ends: data movement (its pair is reported elsewhere) and exact products."""


def place_qdq(model: GraphModel, quantized_sites: Collection[str], fusions: Fusions) -> RewriteRecord:
    """Move Q/DQ pairs to the producers of their tensors, and share them, in place; return what was done."""
    said: list[Applied | Declined] = []
    while True:
        nodes = model.sorted_nodes()
        pairs = Found.of(find_pairs(model, nodes))
        placing = _Placing(model, nodes, Flow(model, nodes, pairs.matches, fusions.moved_in_float8))
        said += placing.hoist_and_share()
        copied = placing.share_behind_views(fusions)
        said += copied
        model.remove(placing.dropped)
        if not copied:
            break
        # A view that lost a reader to its copy may now have readers of one key only.
    placed = [place.pair for place in placing.places.values() if place.pair is not None]
    said += [*pairs.declined, *placing.why_not_further(), *_other_keys(placed)]
    said += _chains(model, placed, quantized_sites, fusions)
    return record("place-qdq", said)


@dataclass
class _Place:
    """A tensor that gets one pair; `direct` are those that read it already.

    `edges` are carrying operators, and the input positions where they read it.
    """

    tensor: Tensor
    key: Key
    direct: list[Pair] = field(default_factory=list)
    edges: list[tuple[Node, int]] = field(default_factory=list)
    pair: Pair | None = None


@dataclass
class _Region:
    """Connected carrying operators, the tensors in front of them and the pairs behind."""

    places: list[_Place] = field(default_factory=list)
    carrying: list[Node] = field(default_factory=list)
    behind: list[Pair] = field(default_factory=list)


class _Placing:
    """Collects tensors to quantize, then edits."""

    def __init__(self, model: GraphModel, nodes: Sequence[Node], flow: Flow) -> None:
        self._model, self._flow = model, flow
        self.places: dict[tuple[int, Key], _Place] = {}
        from networkx.utils import UnionFind

        self._groups = UnionFind()
        self._carrying = [node for node in nodes if flow.carries(node)]
        self._behind: list[Pair] = []
        self.dropped: list[Node] = []
        for node in nodes:
            pair = flow.pairs.get(id(node))
            if flow.carries(node):
                self._collect(node)
            elif pair is not None and flow.carries(producer(pair.source)):
                self._behind.append(pair)
            elif pair is not None:
                self._place(pair.source, pair.key).direct.append(pair)

    def _collect(self, node: Node) -> None:
        """Join a carrying operator with those in front of it, and with the tensors that get a pair."""
        key = next(k for t in node.outputs if (k := self._flow.demand(t).key) is not None)
        values = {id(tensor) for tensor in moved(node)}
        for index, tensor in enumerate(node.inputs):
            maker = producer(tensor)
            if id(tensor) not in values:
                continue
            if self._flow.carries(maker):
                self._groups.union(id(node), id(maker))
            else:
                place = self._place(tensor, key)
                place.edges.append((node, index))
                self._groups.union(id(node), id(place))

    def _place(self, tensor: Tensor, key: Key) -> _Place:
        return self.places.setdefault((id(tensor), key), _Place(tensor, key))

    def hoist_and_share(self) -> list[Applied]:
        """Give every tensor one pair; pairs behind carrying operators move in front of them."""
        regions: defaultdict[int, _Region] = defaultdict(_Region)
        for place in self.places.values():
            regions[self._groups[id(place)]].places.append(place)
        for node in self._carrying:
            regions[self._groups[id(node)]].carrying.append(node)
        for pair in self._behind:
            regions[self._groups[id(producer(pair.source))]].behind.append(pair)
        return [applied for region in regions.values() for applied in self._settle(region)]

    def _settle(self, region: _Region) -> list[Applied]:
        before = len(region.behind) + sum(len(place.direct) for place in region.places)
        for pair in region.behind:
            bypass_pair(self._model, pair, pair.source)
        free = iter(region.behind)
        for place in region.places:
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
        for place in list(self.places.values()):
            chain: list[Node] = []
            tensor, other = place.tensor, None
            while other is None and (maker := producer(tensor)) is not None and moved(maker, views):
                chain.append(maker)
                tensor = maker.inputs[0]
                other = self.places.get((id(tensor), place.key))
            if other is None or other.pair is None or place.pair is None:
                continue
            copy = reapply(self._model, chain[::-1], other.pair.rounded, place.pair.name)
            copy.shape = place.tensor.shape
            self.dropped += bypass_pair(self._model, place.pair, copy)
            what = f"shares the Q/DQ '{other.pair.name}' through a copy of {_names(chain)}"
            applied.append(Applied(place.pair.name, what))
            del self.places[id(place.tensor), place.key]
        return applied

    def why_not_further(self) -> list[Declined]:
        """Return why pairs stay behind operators that move their values."""
        return [
            Declined(place.pair.name, reason)
            for place in self.places.values()
            if place.pair is not None and (reason := self._flow.why_behind(place.tensor))
        ]


def _told(region: _Region, before: int) -> list[Applied]:
    """Report the pairs of a region that moved or merged."""
    pairs = [place.pair for place in region.places if place.pair is not None]
    shared = f"{before} pairs made {len(pairs)}" if len(pairs) < before else ""
    if region.carrying:
        tensors = ", ".join(f"'{place.tensor.name}'" for place in region.places[:_NAMED])
        more = f" and {len(region.places) - _NAMED} more" if len(region.places) > _NAMED else ""
        what = f"hoisted in front of {_names(region.carrying)}, to {tensors}{more}"
        return [Applied(pairs[0].name, f"{what}; {shared}" if shared else what)]
    return [Applied(pairs[0].name, f"shared: {shared}")] if shared else []


def _names(nodes: list[Node]) -> str:
    named = ", ".join(f"{node.op} '{node.name}'" for node in nodes[:_NAMED])
    return f"{named} and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else named


def _other_keys(pairs: Sequence[Pair]) -> Iterator[Declined]:
    """Return tensors that several pairs round differently."""
    by_source: defaultdict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_source[id(pair.source)].append(pair)
    for first, *others in by_source.values():
        if others:
            keys = "; ".join(f"'{pair.name}' {pair.key}" for pair in (first, *others))
            reason = f"'{first.source.name}' is rounded under several scales, which stay apart: {keys}"
            yield Declined(first.name, reason)


# Chains ----------------------------------------------------------------------------------------------


def _chains(
    model: GraphModel, pairs: Sequence[Pair], quantized_sites: Collection[str], fusions: Fusions
) -> Iterator[Applied | Declined]:
    """Trace every pair back to the sites that feed it."""
    if not fusions.quantized_in_place:
        return
    readers = _readers(model, quantized_sites)
    for pair in pairs:
        maker = producer(pair.source)
        if maker is None:
            continue
        if _may_quantize(maker, quantized_sites, fusions):
            sites, through = _feeding(model, maker, quantized_sites, fusions)
            names = " and ".join(f"'{name}'" for name in sites)
            path = f" through {', '.join(through)}" if through else ""
            to = ", ".join(f"'{name}'" for name in readers.get(id(pair.rounded), ()))
            if sites:
                yield Applied(pair.name, f"chain: {names} feeds {to or 'it'} in FP8{path}")
        elif maker.op not in _SILENT:
            reason = f"no kernel is known that computes {maker.op} '{maker.name}' and quantizes it"
            yield Declined(pair.name, reason)


def _may_quantize(node: Node, quantized_sites: Collection[str], fusions: Fusions) -> bool:
    """Return whether a kernel of the backend can end with this node and a Q, or pass on one that does."""
    return (
        node.name in quantized_sites
        or node.op in fusions.quantized_in_place
        or node.op in VIEWS & fusions.moved_in_float8
    )


def _feeding(
    model: GraphModel, maker: Node, quantized_sites: Collection[str], fusions: Fusions
) -> tuple[list[str], list[str]]:
    """Trace a chain back within one kernel; return the sites at its start, and the operators between."""
    sites: dict[str, None] = {}
    through: dict[str, None] = {}
    waiting: dict[int, int] = {}
    pending = [maker]
    while pending:
        node = pending.pop()
        if node.name in quantized_sites:
            sites[node.name] = None
            continue
        if not _may_quantize(node, quantized_sites, fusions):
            continue
        through[node.op] = None
        for tensor in {id(t): t for t in node.inputs if not is_constant(t)}.values():
            left = waiting.get(id(tensor), len(consumers(tensor))) - 1
            waiting[id(tensor)] = left
            earlier = producer(tensor)
            if not left and not model.is_output(tensor) and earlier is not None:
                pending.append(earlier)
    return list(sites), list(reversed(through))


def _readers(model: GraphModel, quantized_sites: Collection[str]) -> dict[int, tuple[str, ...]]:
    """Return the FP8 sites that read a tensor's values, moved or not, by identity of the tensor."""
    readers: dict[int, tuple[str, ...]] = {}

    def of(tensor: Tensor) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for node in consumers(tensor):
            if node.name in quantized_sites:
                names[node.name] = None
            elif any(tensor is read for read in moved(node)):
                names |= {name: None for output in node.outputs for name in readers.get(id(output), ())}
        return tuple(names)

    for node in reversed(model.sorted_nodes()):
        if moved(node) or node.op == "DequantizeLinear":
            readers |= {id(tensor): of(tensor) for tensor in node.outputs}
    return readers

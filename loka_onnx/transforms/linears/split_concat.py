"""Let a linear layer multiply each tensor of a concatenation once, and before it is copied.

With parts pᵢ = Σⱼ cᵢⱼ ⊙ sⱼ that are linear in tensors sⱼ, some of them copied along axes::

    Concat(p₁, …, pₘ)·W + b   =   Σⱼ sⱼ·(Σᵢ diag(cᵢⱼ) Wᵢ) + b

Target attention (DIN, arXiv 1706.06978) reads the candidate q, copied to each position of a history k, as::

    Concat(q, k, q − k, q ⊙ k)·W + b   =   Concat(k, q ⊙ k)·[W_k − W_d; W_p] + (q·(W_q + W_d) + b)

where the bracket is computed once a candidate, and the sum broadcasts it. A user's features beside those of
many candidates are copied too, and a learned row, which is multiplied here. Tensors that are not copied stay
together and keep the name of the site: apart they save a copy and cost a product, up to 3.2 times the time on
one H100 (`benchmarks/micro/site_shapes.py`). Weights are summed in FP64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import (
    GraphModel,
    Node,
    Tensor,
    consumers,
    is_constant,
    producer,
    shape_of,
    values_of,
)
from loka_onnx.graph.shape_values import Dim, dimensions, read_dimensions, static_shape
from loka_onnx.transforms.base import Mod, NotRewritten, find
from loka_onnx.transforms.linears.pattern import (
    NOMINAL_LENGTH,
    Linear,
    Vector,
    Work,
    is_along_last,
    is_candidate,
    made_by,
    read_linear,
    set_bias,
    static_dim,
)

MOVED, SUMMED = 16, 3
"""Operations of a product in the time of a copied element, and copied elements in that of a summed one: fits
40 layers in ONNX Runtime (FP32, one core with AVX-512), K of 64 and 256, N of 16 to 256."""
_DEEPEST = 8
"""Most operators between a part and its terms; both operands of a sum are followed."""
_VIEWS = frozenset({"Reshape", "Flatten"})


@dataclass(frozen=True)
class Term:
    """A tensor with a factor for each channel, (K,), or what these become: its weight, (K, N)."""

    tensor: Tensor
    factors: Vector


@dataclass(frozen=True)
class Concatenated:
    """A layer that reads a concatenation, and the terms of its parts.

    Attributes:
        view: The Reshape or Flatten to (rows, K) between them, if any.
        whole: Terms of the Concat's shape but for the last axis.
        shared: Terms that the parts copy, in groups of one shape.
        constant: Bias and constant terms, (N,) or broadcast to the result.
        copies: Nodes and positions where they read a copy and may read the tensor itself.
        now, then: Work before and after, with the elements that are copied.
    """

    layer: Linear
    concat: Node
    view: Node | None
    whole: tuple[Term, ...]
    shared: tuple[tuple[Term, ...], ...]
    constant: Vector
    copies: tuple[tuple[Node, int], ...]
    now: Work
    then: Work


class SplitConcat(Mod[Concatenated]):
    """Linear of a Concat → linear of its distinct tensors, and a smaller one of those that it copies."""

    name = "split-concat"
    tolerance = 3e-5
    """Terms of a difference are rounded by themselves, relative to the larger of them."""

    def _find(self, model: GraphModel) -> Iterator[Concatenated | Declined]:
        return find(filter(is_candidate, model.nodes), lambda node: _read(model, node))

    def rewrite(self, model: GraphModel, match: Concatenated) -> Applied:
        """Give the site the whole terms, and add products of the others, and constants."""
        layer, site = match.layer, str(match.layer.node.name)
        for reader, position in match.copies:
            reader.inputs[position] = _copied(reader.inputs[position])
        addends: list[Tensor] = []
        origins: dict[str, tuple[str, ...]] = {}
        for terms in match.shared:
            weight = model.constant(f"{site}.weight.shared", _stacked(layer, terms))
            inputs = [_joined(model, terms, match.concat), weight]
            addends.append(model.add("MatMul", inputs, f"{site}.shared"))
            model.rename(addends[-1].inputs[0], f"{site}.shared")
            origins[addends[-1].inputs[0].name] = (site,)
        constant = match.constant.astype(values_of(layer.weight).dtype)
        source, weight_kn = _joined(model, match.whole, match.concat), _stacked(layer, match.whole)
        if addends or constant.ndim > 1:
            if constant.any():
                addends.append(model.constant(f"{site}.bias", constant))
            while len(addends) > 1:
                addends[:2] = [model.add("Add", addends[:2], f"{site}/shared")]
            _place(model, match, source, weight_kn, addends[0])
        else:
            if match.view is not None:
                source = _rows(model, source, len(weight_kn), site)
            weight = model.constant(f"{site}.weight.part", layer.stored(weight_kn))
            layer.node.inputs = [source, weight, *layer.node.inputs[2:]]
            if (constant != layer.bias_n()).any():
                set_bias(model, layer, constant)
        widths = [sum(len(term.factors) for term in terms) for terms in (match.whole, *match.shared)]
        what = f"K {layer.k} → {' + '.join(map(str, widths))}: {match.now.flops} → {match.then.flops}"
        return Applied(site, f"{what} operations at a batch of {NOMINAL_LENGTH}", origins)


def _place(model: GraphModel, match: Concatenated, source: Tensor, weight: Vector, addend: Tensor) -> None:
    """Let the site multiply a tensor, and add a tensor in place of its bias."""
    layer, node, site = match.layer, match.layer.node, str(match.layer.node.name)
    if match.view is None:
        node.inputs = [source, model.constant(f"{site}.weight.part", layer.stored(weight))]
        if layer.add is not None:
            layer.add.inputs = [node.outputs[0], addend]
        else:
            model.insert_behind(node.outputs[0], "Add", [addend], f"{site}/sum")
        return
    # The sum broadcasts along axes that the view joins.
    model.rename(node, f"{site}/rows")
    operands = [source, model.constant(f"{site}.weight.part", weight)]
    product = model.add("MatMul", operands, f"{site}/matmul")
    summed = model.add("Add", [product, addend], f"{site}/sum")
    model.hand_over(layer.result, _rows(model, summed, layer.n, site))
    model.rename(product.inputs[0], site)


def _rows(model: GraphModel, tensor: Tensor, width: int, site: str) -> Tensor:
    target = model.constant(f"{site}.shape", np.array([-1, width], np.int64))
    return model.add("Reshape", [tensor, target], f"{site}/view")


def _stacked(layer: Linear, terms: Sequence[Term]) -> Vector:
    return np.concatenate([term.factors for term in terms]).astype(values_of(layer.weight).dtype)


def _joined(model: GraphModel, terms: Sequence[Term], concat: Node) -> Tensor:
    """Return the input of a product: one tensor, or a Concat made once for all layers."""
    tensors = [term.tensor for term in terms]
    if len(tensors) == 1:
        return tensors[0]
    for node in consumers(tensors[0]):
        is_along_k = node.op == "Concat" and is_along_last(node, tensors[0])
        if is_along_k and [id(tensor) for tensor in node.inputs] == [id(tensor) for tensor in tensors]:
            return node.outputs[0]
    joined = model.add("Concat", tensors, f"{concat.name}/rest", attrs={"axis": -1})
    joined.shape = [*shape_of(tensors[0])[:-1], sum(len(term.factors) for term in terms)]
    return joined


def _read(model: GraphModel, node: Node) -> Concatenated | None:
    """Return a layer whose K is a Concat; None for others. Raises NotRewritten where it does not pay."""
    try:
        layer = read_linear(model, node)
    except NotRewritten:
        return None
    view = producer(layer.source)
    view = view if view is not None and view.op in _VIEWS and len(shape_of(layer.source)) == 2 else None
    joined = layer.source if view is None else view.inputs[0]
    concat = made_by(joined, "Concat")
    if concat is None or layer.on_left or not is_along_last(concat, joined):
        return None
    widths = [static_dim(part, -1) or 0 for part in concat.inputs]
    if not all(widths):
        raise NotRewritten("the width of a part of its Concat is not known")
    ends = np.cumsum(widths)
    if ends[-1] != layer.k:
        # A view that divides rows.
        return None
    known = _known(concat)
    constant, weights = layer.bias_n().astype(np.float64), dict[int, Term]()
    parts = _terms_of_parts(concat, known)
    for terms, rows in zip(parts, np.split(layer.weight_kn().astype(np.float64), ends[:-1]), strict=True):
        for term in terms:
            if is_constant(term.tensor):
                constant = constant + (values_of(term.tensor).astype(np.float64) * term.factors) @ rows
                continue
            before = weights.get(id(term.tensor), Term(term.tensor, np.zeros(())))
            weights[id(term.tensor)] = Term(term.tensor, before.factors + term.factors[:, None] * rows)
    groups: dict[tuple[Dim, ...] | None, list[Term]] = {None: []}
    for term in weights.values():
        shape = None if _is_whole(term.tensor, known) else (dimensions(term.tensor) or ())[:-1]
        groups.setdefault(shape, []).append(term)
    whole, *shared = map(tuple, groups.values())
    if not whole:
        raise NotRewritten("every part of its Concat is the same along an axis")
    if not shared and len(whole) == len(parts):
        reason = "no part of its Concat is the same along an axis, or a sum of others"
        raise NotRewritten(f"{reason}: the copy costs less than {len(parts)} products")
    constant = constant.reshape(-1) if constant.size == layer.n else constant
    now, then = _costs(layer, concat, known, whole, shared, constant)
    if then.flops + MOVED * then.elements >= now.flops + MOVED * now.elements:
        raise NotRewritten(
            f"it takes {now.flops} operations at a batch of {NOMINAL_LENGTH}, with each tensor by itself "
            f"{then.flops} and {then.elements - now.elements} more elements to move"
        )
    copies = tuple(_copies(whole, known))
    return Concatenated(layer, concat, view, whole, tuple(shared), constant, copies, now, then)


Known = tuple[frozenset[Dim], ...]
"""Lengths and names of each axis of a Concat but the last."""


def _known(concat: Node) -> Known:
    shapes = [dimensions(t) or () for t in (*concat.inputs, *concat.outputs)]
    axes = range(len(shape_of(concat.outputs[0])) - 1)
    return tuple(frozenset(shape[axis] for shape in shapes if shape) for axis in axes)


def _is_whole(tensor: Tensor, known: Known) -> bool:
    """True if a tensor has the shape of the Concat but for the last axis."""
    shape = dimensions(tensor) or ()
    return len(shape) == len(known) + 1 and all(d in names for d, names in zip(shape, known, strict=False))


def _is_shared(tensor: Tensor, known: Known) -> bool:
    """True if a Concat with a tensor repeats it along an axis."""
    shape = static_shape(tensor)
    axes = zip(reversed(shape[:-1]), reversed(known), strict=False)
    return bool(shape) and (len(shape) <= len(known) or any(d == 1 and 1 not in names for d, names in axes))


def _costs(
    layer: Linear,
    concat: Node,
    known: Known,
    whole: Sequence[Term],
    shared: Sequence[Sequence[Term]],
    constant: Vector,
) -> tuple[Work, Work]:
    """Return the cost of a layer with its Concat, and with terms in place of it."""
    rows = prod(max((d for d in names if isinstance(d, int)), default=NOMINAL_LENGTH) for names in known)
    behind = [reader for node in consumers(concat.outputs[0]) for reader in _behind_views(node)]
    width, n = sum(len(term.factors) for term in whole), layer.n
    flops, moved = 2 * rows * width * n, rows * width if len(whole) > 1 else 0
    if layer.add is None and (shared or constant.ndim > 1):
        moved += SUMMED * rows * n
    for terms in shared:
        small = prod(d or NOMINAL_LENGTH for d in static_shape(terms[0].tensor)[:-1])
        flops += 2 * small * n * sum(len(term.factors) for term in terms)
        moved += SUMMED * small * n
    now = Work(2 * rows * layer.k * n, rows * layer.k if all(map(is_candidate, behind)) else 0)
    return now, Work(flops, moved)


def _behind_views(node: Node) -> list[Node]:
    return consumers(node.outputs[0]) if node.op in _VIEWS else [node]


def _copies(whole: Sequence[Term], known: Known) -> Iterator[tuple[Node, int]]:
    """Yield operands of products that are copies, and need not be: the other one is whole."""
    for node in (node for term in whole if (node := made_by(term.tensor, "Mul")) is not None):
        for at, tensor in enumerate(node.inputs):
            if _copied(tensor) is not tensor and _is_whole(_copied(node.inputs[1 - at]), known):
                yield node, at


def _copied(tensor: Tensor) -> Tensor:
    """Return the tensor that is copied along axes other than the last; the tensor itself where none is."""
    node = producer(tensor)
    while node is not None and _is_copy(node):
        tensor = node.inputs[0]
        node = producer(tensor)
    return tensor


def _is_copy(node: Node) -> bool:
    source = static_shape(node.inputs[0]) if node.inputs else ()
    if not source or source[-1] is None:
        return False
    if node.op == "Expand":
        return source[-1] == static_dim(node.outputs[0], -1)
    if node.op == "Tile":
        times = read_dimensions(node.inputs[1]) or ()
        return times[-1:] == (1,) and all(n == 1 or d == 1 for n, d in zip(times, source, strict=True))
    if node.op == "Concat":
        axis = int(node.attrs["axis"]) % len(source)
        is_one = all(tensor is node.inputs[0] for tensor in node.inputs)
        return is_one and source[axis] == 1 and axis < len(source) - 1
    return False


def _terms_of_parts(concat: Node, known: Known) -> list[list[Term]]:
    """Return the terms of each part, or the part as one term where they would add a product."""
    widths = [(part, static_dim(part, -1) or 0) for part in concat.inputs]
    itself = [[Term(part, np.ones(width))] for part, width in widths]
    parts = [_terms(part, width, known) for part, width in widths]
    whole = [
        {id(t.tensor) for t in terms if not is_constant(t.tensor) and _is_whole(t.tensor, known)}
        for terms in parts
    ]
    # A part, or the only whole term of several parts, is multiplied anyway.
    read = Counter(each for ids in whole if len(ids) == 1 for each in ids)
    multiplied = {id(part) for part in concat.inputs} | {each for each, times in read.items() if times > 1}
    is_usable = [
        all(is_constant(t.tensor) or _is_whole(t.tensor, known) or _is_shared(t.tensor, known) for t in terms)
        for terms in parts
    ]
    choices = zip(parts, itself, whole, is_usable, strict=True)
    return [terms if fits and ids <= multiplied else alone for terms, alone, ids, fits in choices]


def _terms(tensor: Tensor, width: int, known: Known, depth: int = _DEEPEST) -> list[Term]:
    """Return terms whose sum, broadcast, is a tensor."""
    tensor = _copied(tensor)
    node, ones = producer(tensor), np.ones(width)
    scaled: list[tuple[Tensor, Vector]] = []
    if node is None or not depth or _is_shared(tensor, known):
        return [Term(tensor, ones)]
    has_bias = any(map(is_constant, node.inputs)) and any(made_by(t, "MatMul") for t in node.inputs)
    if node.op in {"Add", "Sub"} and not has_bias:
        # The bias of another layer stays with it.
        scaled = [(node.inputs[0], ones), (node.inputs[1], ones if node.op == "Add" else -ones)]
    elif node.op == "Neg":
        scaled = [(node.inputs[0], -ones)]
    elif node.op in {"Mul", "Div"}:
        for at in (1, 0) if node.op == "Mul" else (1,):
            factors = _factors(node.inputs[at], width)
            if factors is not None and factors.all():
                scaled = [(node.inputs[1 - at], factors if node.op == "Mul" else 1 / factors)]
                break
    if not scaled or not all(_has_width(each, width) for each, _ in scaled):
        return [Term(tensor, ones)]
    return [
        Term(term.tensor, term.factors * factors)
        for each, factors in scaled
        for term in _terms(each, width, known, depth - 1)
    ]


def _has_width(tensor: Tensor, width: int) -> bool:
    if is_constant(tensor):
        return values_of(tensor).shape[-1:] in {(), (1,), (width,)}
    return static_dim(tensor, -1) == width


def _factors(tensor: Tensor, width: int) -> Vector | None:
    """Return a number for each channel that a tensor holds in every row; None for another tensor."""
    node = producer(tensor)
    if node is not None and node.op == "ConstantOfShape":
        value = node.attrs.get("value")
        return np.full(width, 0.0 if value is None else values_of(value).item())
    source = node.inputs[0] if node is not None and node.op == "Expand" else tensor
    if not is_constant(source):
        return None
    values = values_of(source)
    is_row = values.size in {1, width} and values.shape[-1:] in {(), (values.size,)}
    return np.broadcast_to(values.astype(np.float64).reshape(-1), (width,)) if is_row else None

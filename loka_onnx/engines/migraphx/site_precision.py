"""Precision of each planned site, read from compiled programs.

MIGraphX multiplies FP8 and INT8 only in ``quant_dot``: as that operator, in a kernel that rocMLIR names after
it (``mlir_quant_dot_mul``; K below 1024), or in hipBLASLt and rocBLAS (``gpu::hip_quant_gemm``,
``gpu::quant_gemm``). A site that it could not take is a plain ``dot`` without Q/DQ, which no result shows;
sites are therefore counted here.

Printed names of ONNX nodes identify sites where the release has them. Otherwise the size does: K and N of the
stored factor, the weight. Products that read one tensor may be merged into one of N₁ + N₂ columns: where the
columns of all FP8 products over K equal those of all FP8 sites over K, every such site runs in FP8. Where
they do not, a product may be one site of its size or all sites that read one tensor; with fewer FP8 products
of a size than that, the fallen-back sites are unknown, and all are reported as fallbacks. INT8 is counted by
itself, in the same way.

The reference target multiplies in the base precision: a site of two DQs of its format is simulated there.

A program is printed with one line per instruction (``src/instruction.cpp`` of ROCm/AMDMIGraphX): name,
operator with its attributes, inputs, type, lengths and strides; newer releases add ONNX nodes::

    module: "main"
    x = @param:x -> float_type, {8, 64}, {64, 1}
    @1 = @literal{ ... } -> fp8e4m3fnuz_type, {64, 32}, {32, 1}
    @5 = quant_dot(@4,@1) -> float_type, {8, 32}, {32, 1}
    @7 = gpu::code_object[code_object=4832,symbol_name=mlir_quant_dot_mul,…](@4,@1,@6) -> float_type, …  # fc0
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Site, SiteKind

TYPES = {Precision.BF16: "bf16", Precision.FP16: "half", Precision.FP32: "float"}
QUANTIZED = {
    Precision.FP8: frozenset({"fp8e4m3fn", "fp8e4m3fnuz"}),
    Precision.INT8: frozenset({"int8"}),
}
"""Element types of quantized factors."""
_STORED = frozenset[str]().union(*QUANTIZED.values())
_QUANTIZED_PRODUCT = re.compile(r"quant_dot|quant_gemm")
_PRODUCT = re.compile(r"(?:^|_|::)dot(?:_|\d|\[|$)|gpu::gemm|hip_gemm")
_LAYOUT = frozenset(
    {
        *("contiguous", "multibroadcast", "broadcast", "transpose", "convert"),
        *("reshape", "reshape_lazy", "squeeze", "unsqueeze"),
    }
)
_MOVED = _LAYOUT | {"quantizelinear", "dequantizelinear"}
_CONSTANTS = frozenset({"@literal", "hip_copy_literal"})
Reading = tuple[tuple[str, ...], bool, str]
"""Types of the factors, whether the planned precision engaged, and the evidence."""
_SHAPE = re.compile(r" -> (?P<type>\w+), \{(?P<lengths>[\d, ]*)\}, \{[\d, ]*\}(?:, target_id=\d+)?$")
_ASSIGNED = re.compile(r"^\s*(?P<name>\S+) = (?P<operation>\S.*)$")
_INPUTS = re.compile(r"\((?P<inputs>[^()]*)\)(?:, \[[^\]]*\])?$")
_SYMBOLS = re.compile(r"(?P<line>.*\})\s+# (?P<symbols>.+)$")
_KERNEL = re.compile(r"symbol_name=(?P<kernel>\w+)")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its operator (``quant_dot``, ``gpu::code_object``), the element type of its result
    (``fp8e4m3fn``; empty where not printed), and the names of its ONNX nodes, where the release prints them.
    """

    name: str
    operation: str
    attributes: str
    inputs: tuple[str, ...]
    type: str
    shape: tuple[int, ...]
    symbols: tuple[str, ...] = ()

    @property
    def operator(self) -> str:
        """Operator without its target: ``dot`` of ``ref::dot``, ``dot`` and ``gpu::dot``."""
        return self.operation.rpartition("::")[2]

    @property
    def kernel(self) -> str:
        """Kernel name of a code object; else operator and attributes."""
        kernel = _KERNEL.search(self.attributes)
        return kernel["kernel"] if kernel else f"{self.operation}{self.attributes}"

    @property
    def label(self) -> str:
        """Readable name: ``quant_dot @5``."""
        return f"{self.kernel.removesuffix(self.attributes)} {self.name}"


@dataclass(frozen=True)
class ProgramText:
    """A printed program: its instructions by name, in order."""

    instructions: Mapping[str, Instruction]

    def inputs_of(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Printed inputs of an instruction."""
        known = self.instructions
        return tuple(known[name] for name in instruction.inputs if name in known)

    @property
    def types(self) -> frozenset[str]:
        """Element types of all results."""
        return frozenset(each.type for each in self.instructions.values() if each.type)


def parse_program(text: str) -> ProgramText:
    """Parse a printed program; lines without an instruction are skipped."""
    lines = (_parse_line(line) for line in text.splitlines())
    return ProgramText({each.name: each for each in lines if each is not None})


def _parse_line(line: str) -> Instruction | None:
    symbols = kind = lengths = inputs = ""
    if with_symbols := _SYMBOLS.match(line):
        line, symbols = with_symbols["line"], with_symbols["symbols"]
    assigned = _ASSIGNED.match(line.rstrip())
    if assigned is None:
        return None
    operation = assigned["operation"]
    if shape := _SHAPE.search(operation):
        kind, lengths = shape["type"].removesuffix("_type"), shape["lengths"]
        operation = operation[: shape.start()]
    # A literal's values and a parameter's name are no inputs.
    read = None if operation.startswith(("@literal", "@param")) else _INPUTS.search(operation)
    if read:
        inputs, operation = read["inputs"], operation[: read.start()]
    bare, bracket, rest = operation.partition("[")
    read_by, sizes, nodes = (
        tuple(filter(None, map(str.strip, listed.split(",")))) for listed in (inputs, lengths, symbols)
    )
    name, operator = assigned["name"], bare.partition("{")[0]
    return Instruction(name, operator, bracket + rest, read_by, kind, tuple(map(int, sizes)), nodes)


@dataclass(frozen=True)
class CompiledProduct:
    """A product of a compiled program. `factors` are the types of the multiplied values, FP8 or INT8 where
    they come from a DQ of it; `weight` is K and N of the stored factor, None where both are computed;
    `is_quantized`: FP8 or INT8 is multiplied.
    """

    instruction: Instruction
    factors: tuple[str, ...]
    weight: tuple[int, int] | None
    shapes: tuple[tuple[int, ...], ...]
    is_quantized: bool

    @property
    def is_simulated(self) -> bool:
        """True if FP8 or INT8 values are multiplied in a wider type."""
        return not self.is_quantized and self.format is not None

    @property
    def format(self) -> Precision | None:
        """FP8 or INT8 if both factors have its values, in whatever type they are multiplied."""
        return next((p for p, t in QUANTIZED.items() if self.factors and t.issuperset(self.factors)), None)

    def fits(self, site: Site) -> bool:
        """True if it has a site's size: K × N of the weight, else of either factor."""
        if site.weight is not None or self.weight is not None:
            return self.weight == (site.k, site.n) and site.weight is not None
        size = sorted((site.k, site.n))
        return site.n in self.instruction.shape[-2:] and any(sorted(s[-2:]) == size for s in self.shapes)

    def is_named(self, site: Site) -> bool:
        """True if the release printed the site's name."""
        return site.name in self.instruction.symbols


def products_of(program: ProgramText) -> tuple[CompiledProduct, ...]:
    """All products of a program."""
    products = []
    for instruction in program.instructions.values():
        is_named = _QUANTIZED_PRODUCT.search(instruction.kernel) is not None
        if instruction.operation.startswith("@") or not (is_named or _PRODUCT.search(instruction.kernel)):
            continue
        # A GPU kernel's last input is the memory for its result.
        read = program.inputs_of(instruction)
        inputs = read[:-1] if instruction.operation.startswith("gpu::") else read
        # A kernel may also quantize its activation. FP8 and INT8 have the same names; so has memory of bytes.
        matrices = (each.type for each in inputs if is_named and len(each.shape) > 1)
        kind = next((type for type in matrices if type in _STORED), "")
        factors = (kind, kind) if kind else tuple(_factor_type(program, each) for each in inputs[:2])
        weight = _weight(program, instruction, inputs, kind)
        shapes = tuple(each.shape for each in inputs)
        products.append(CompiledProduct(instruction, factors, weight, shapes, bool(kind)))
    return tuple(products)


def _weight(
    program: ProgramText, product: Instruction, inputs: Sequence[Instruction], kind: str
) -> tuple[int, int] | None:
    """K and N of the stored matrix of a product, with element type `kind` where given. It is K × N as the
    second factor and N × K as the first, unless the kernel transposes it: N is in the result, and K in
    another input.
    """
    possible = []
    for index, each in enumerate(inputs):
        matrix = each.shape[-2:]
        # A broadcast bias stores fewer elements than its shape has.
        if len(matrix) < 2 or (kind and each.type != kind) or _stored(program, each) < prod(matrix):
            continue
        others = {length for other in inputs if other is not each for length in other.shape[-2:]}
        sizes = [(matrix[0], matrix[1]), (matrix[1], matrix[0])]
        for k, n in reversed(sizes) if index == 0 else sizes:
            if n in product.shape[-2:]:
                possible.append(((k, n), k in others))
    return next((size for size, is_read in possible if is_read), possible[0][0] if possible else None)


def _stored(program: ProgramText, value: Instruction) -> int:
    """Elements of the constant behind changes of layout or type; 0 for a computed value."""
    if value.operator in _CONSTANTS:
        return prod(value.shape)
    read = program.inputs_of(value)
    if value.operator == "concat":
        parts = [_stored(program, each) for each in read]
        return sum(parts) if all(parts) else 0
    return _stored(program, read[0]) if value.operator in _MOVED and read else 0


def _factor_type(program: ProgramText, factor: Instruction) -> str:
    """Type of the values before dequantization, or of the factor itself."""
    each: Instruction | None = factor
    while each is not None and each.operator in _LAYOUT:
        each = next(iter(program.inputs_of(each)), None)
    if each is None or each.operator != "dequantizelinear":
        return factor.type
    stored = next(iter(program.inputs_of(each)), None)
    return stored.type if stored is not None and stored.type in _STORED else factor.type


def site_precisions(
    programs: Sequence[ProgramText], planned: Sequence[tuple[Site, Precision]]
) -> tuple[SitePrecision, ...]:
    """Return the precision of each planned site; the worst of the programs for all batch sizes."""
    by_program = [_of_program(program, planned) for program in programs]
    return tuple(
        next((each for each in several if not each.engaged), several[0])
        for several in zip(*by_program, strict=True)
    )


def _of_program(program: ProgramText, planned: Sequence[tuple[Site, Precision]]) -> list[SitePrecision]:
    products = products_of(program)
    quantized = {precision: _QuantizedSites(precision, products, planned) for precision in QUANTIZED}
    precisions = []
    for site, precision in planned:
        if site.kind is SiteKind.NORM:
            # A norm is fused with its neighbours: only the presence of its type is known.
            wanted = TYPES[precision]
            is_there = wanted in program.types
            evidence = f"norms lose their names; {wanted} is {'there' if is_there else 'nowhere'}"
            reading: Reading = (wanted,) * is_there, is_there, evidence
        elif precision in quantized:
            reading = quantized[precision].reading(site)
        else:
            reading = _wide(products, site, TYPES[precision])
        types, engaged, evidence = reading
        evidence = f"compiled program: {evidence}"
        precisions.append(SitePrecision(site.name, precision, types, engaged, evidence))
    return precisions


class _QuantizedSites:
    """Sites of a plan and products of a program in FP8, or in INT8."""

    def __init__(
        self,
        format: Precision,
        products: Sequence[CompiledProduct],
        planned: Sequence[tuple[Site, Precision]],
    ) -> None:
        self._format, self._products = format, products
        names = {site.name for site, _ in planned}
        printed = {name for product in products for name in product.instruction.symbols}
        sites = (site for site, precision in planned if precision is format)
        self._sites = [s for s in sites if s.kind is not SiteKind.NORM and s.name not in printed]
        self._unnamed = [p for p in products if p.format is format and not names & {*p.instruction.symbols}]

    def reading(self, site: Site) -> Reading:
        named = next((product for product in self._products if product.is_named(site)), None)
        if named is not None:
            does = named.format.upper() if named.format and named.is_quantized else " by ".join(named.factors)
            evidence = f"{named.instruction.label}, named after the site, multiplies {does}"
            return named.factors, named.format is self._format, evidence
        size, alike = f"{self._format.upper()} products of {site.k} × {site.n}", self._claims(site)
        honoured = [product for product in self._unnamed if product.fits(site)]
        accounted = self._accounted(site)
        if honoured and (len(honoured) >= alike or accounted):
            evidence = honoured[0].instruction.label
            if alike > 1:
                evidence += f", one of {len(honoured)} {size} for {alike} sites"
            return honoured[0].factors, True, evidence + self._simulated(honoured[0])
        merged = next((product for product in accounted if (product.weight or (0, 0))[1] > site.n), None)
        if merged is not None:
            columns = f"columns of all {self._format.upper()} products over {site.k} add up"
            evidence = f"{merged.instruction.label}, merged: {columns}{self._simulated(merged)}"
            return merged.factors, True, evidence
        plain = next((p for p in self._products if p.fits(site) and p.format is not self._format), None)
        types = plain.factors if plain is not None else ()
        evidence = f"{len(honoured)} {size} for {alike} planned sites"
        if honoured:
            evidence += ", and it does not say which sites they are"
        if plain is not None:
            evidence += f"; {plain.instruction.label} multiplies {' by '.join(types)}"
        return types, False, evidence

    def _claims(self, site: Site) -> int:
        """Products of a site's size that its plan asks for: one for each site of that size, and one for each
        group of sites on one tensor whose columns add up to it, as they may be merged.
        """
        groups: dict[str, list[int]] = {}
        for each in self._sites:
            if each.k == site.k:
                groups.setdefault(each.activation.tensor, []).append(each.n)
        merged = sum(len(columns) > 1 and sum(columns) == site.n for columns in groups.values())
        return merged + sum((each.k, each.n) == (site.k, site.n) for each in self._sites)

    def _accounted(self, site: Site) -> list[CompiledProduct]:
        """Products over a site's K if their columns equal those of all its sites in the format; else none."""
        over_k = [product for product in self._unnamed if product.weight and product.weight[0] == site.k]
        columns = sum(product.weight[1] for product in over_k if product.weight)
        planned = sum(each.n for each in self._sites if each.k == site.k and each.weight is not None)
        return over_k if site.weight is not None and columns == planned else []

    def _simulated(self, product: CompiledProduct) -> str:
        around = f"; simulated: {self._format.upper()} Q/DQ around a product in the base precision"
        return around if product.is_simulated else ""


def _wide(products: Sequence[CompiledProduct], site: Site, wanted: str) -> Reading:
    """Read a site in the base precision from a product of its size, else from all products."""
    plain = [product for product in products if product.format is None]
    named = [product for product in plain if product.is_named(site)]
    own = named or [product for product in plain if product.fits(site)]
    candidates = own or plain
    right = next((p for p in candidates if {*p.factors} == {wanted}), None)
    wrong = next((p for p in candidates if {*p.factors} != {wanted}), None)
    # A product of its size is enough; for a merged one, every product must have the type.
    engaged = right is not None and (bool(own) or wrong is None)
    shown = right if engaged else (wrong or right)
    if shown is None:
        return (), False, "it has no product"
    merged = "" if own else f", none of {site.k} × {site.n}: merged or fused with others"
    return shown.factors, engaged, shown.instruction.label + merged

"""What compiled programs run each planned site in.

MIGraphX multiplies FP8 in ``quant_dot`` only: as that operator, inside a kernel that rocMLIR names after it
(``mlir_quant_dot_mul``; K below 1024), or in hipBLASLt and rocBLAS (``gpu::hip_quant_gemm``,
``gpu::quant_gemm``). A site that it could not take is a plain ``dot``, and its Q/DQ are gone: nothing in the
results shows that, so it is counted here.

A program names its kernels, not the nodes they came from. A site is therefore found by its size: K and N are
those of an FP8 factor, N of the result as well. Where several planned sites have one size and there are fewer
FP8 products of it than sites, it is unknown which of them fell back, and all are reported to. Releases that
print the nodes' names are believed.

The reference target keeps every Q and DQ and multiplies in the base precision: there a site is simulated when
both factors come from a DQ of FP8.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.engines.migraphx.program_text import Instruction, ProgramText

TYPES = {Precision.BF16: "bf16", Precision.FP16: "half", Precision.FP32: "float"}
FLOAT8_TYPES = frozenset({"fp8e4m3fn", "fp8e4m3fnuz"})
_FLOAT8_PRODUCT = re.compile(r"quant_dot|quant_gemm")
_PRODUCT = re.compile(r"(?:^|_|::)dot(?:_|\d|$)|gpu::gemm|hip_gemm")
_LAYOUT = frozenset(
    {"contiguous", "multibroadcast", "broadcast", "transpose", "reshape", "convert", "squeeze"}
)


@dataclass(frozen=True)
class PlannedSite:
    """A site, and what the plan asks for."""

    site: Site
    precision: Precision


@dataclass(frozen=True)
class Product:
    """A product of a compiled program.

    Attributes:
        instruction: What computes it.
        factors: Types of the values that were multiplied: FP8 where they came from a DQ of FP8.
        shapes: Lengths of its inputs.
        is_float8: Whether the device multiplies FP8.
    """

    instruction: Instruction
    factors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_float8: bool

    @property
    def is_simulated(self) -> bool:
        """Whether FP8 values are multiplied in a wider type."""
        return not self.is_float8 and len(self.factors) == 2 and FLOAT8_TYPES.issuperset(self.factors)

    def fits(self, site: Site) -> bool:
        """Whether it has the size of a site: K × N of one factor, and N in the result."""
        size = sorted((site.k, site.n))
        return site.n in self.instruction.shape[-2:] and any(sorted(s[-2:]) == size for s in self.shapes)


def products_of(program: ProgramText) -> tuple[Product, ...]:
    """Every product of a program."""
    found = []
    for instruction in program.instructions.values():
        is_float8 = _FLOAT8_PRODUCT.search(instruction.kernel) is not None
        if instruction.operation.startswith("@") or not (is_float8 or _PRODUCT.search(instruction.kernel)):
            continue
        # The last input of a GPU's kernel is the memory for its result.
        read = program.inputs_of(instruction)
        inputs = read[:-1] if instruction.operation.startswith("gpu::") else read
        if is_float8:
            inputs = tuple(each for each in inputs if each.type in FLOAT8_TYPES)
        factors = tuple(_factor_type(program, each) for each in inputs[:2])
        found.append(Product(instruction, factors, tuple(each.shape for each in inputs), is_float8))
    return tuple(found)


def _factor_type(program: ProgramText, factor: Instruction) -> str:
    """Type of the values before they were dequantized, or of the factor itself."""
    each: Instruction | None = factor
    while each is not None and each.operation in _LAYOUT:
        each = next(iter(program.inputs_of(each)), None)
    if each is None or each.operation != "dequantizelinear":
        return factor.type
    stored = next(iter(program.inputs_of(each)), None)
    return stored.type if stored is not None and stored.type in FLOAT8_TYPES else factor.type


def site_precisions(
    programs: Sequence[ProgramText], planned: Sequence[PlannedSite]
) -> tuple[SitePrecision, ...]:
    """What each planned site runs in; of several programs, the least of them.

    Args:
        programs: One for each batch size.
        planned: Every site that the plan decides.
    """
    by_program = [_of_program(program, planned) for program in programs]
    return tuple(
        next((found for found in several if not found.engaged), several[0])
        for several in zip(*by_program, strict=True)
    )


def _of_program(program: ProgramText, planned: Sequence[PlannedSite]) -> list[SitePrecision]:
    products = products_of(program)
    found = []
    for each in planned:
        if each.site.kind is SiteKind.NORM:
            found.append(_norm(program, each))
        elif each.precision is Precision.FP8:
            found.append(_float8(products, each.site, planned))
        else:
            found.append(_wide(products, each))
    return found


def _float8(products: Sequence[Product], site: Site, planned: Sequence[PlannedSite]) -> SitePrecision:
    def precision(types: tuple[str, ...], engaged: bool, evidence: str) -> SitePrecision:
        return SitePrecision(site.name, Precision.FP8, types, engaged, evidence)

    named = next((p for p in products if site.name in p.instruction.symbols), None)
    if named is not None:
        does = "multiplies FP8" if named.is_float8 else f"multiplies {' by '.join(named.factors)}"
        evidence = f"compiled program: {named.instruction.label}, named after the site, {does}"
        return precision(named.factors, named.is_float8 or named.is_simulated, evidence)
    alike = [
        each.site
        for each in planned
        if each.precision is Precision.FP8
        and each.site.kind is not SiteKind.NORM
        and (each.site.k, each.site.n) == (site.k, site.n)
    ]
    fitting = [product for product in products if product.fits(site)]
    honoured = [product for product in fitting if product.is_float8 or product.is_simulated]
    size = f"{site.k} × {site.n}"
    if len(honoured) >= len(alike):
        first = honoured[0]
        evidence = f"compiled program: {first.instruction.label}"
        if len(alike) > 1:
            evidence += f", one of {len(honoured)} FP8 products of {size} for {len(alike)} sites"
        if first.is_simulated:
            evidence += "; simulated: FP8 Q/DQ around a product in the base precision"
        return precision(first.factors, True, evidence)
    plain = next((product for product in fitting if product not in honoured), None)
    types = plain.factors if plain is not None else ()
    evidence = f"compiled program: {len(honoured)} FP8 products of {size} for {len(alike)} planned sites"
    if honoured:
        evidence += ", and it does not say which sites they are"
    if plain is not None:
        evidence += f"; {plain.instruction.label} multiplies {' by '.join(types)}"
    return precision(types, False, evidence)


def _wide(products: Sequence[Product], planned: PlannedSite) -> SitePrecision:
    """A site in the base precision: its own product where one of its size is there, else all of them."""
    site, wanted = planned.site, TYPES[planned.precision]
    plain = [product for product in products if not product.is_float8 and not product.is_simulated]
    named = [product for product in plain if site.name in product.instruction.symbols]
    own = named or [product for product in plain if product.fits(site)]
    candidates = own or plain
    right = next((p for p in candidates if p.factors and {*p.factors} == {wanted}), None)
    wrong = next((p for p in candidates if p is not right and {*p.factors} != {wanted}), None)
    # One of its size is enough; where it was merged with others, every product has to be of the type.
    engaged = right is not None and (bool(own) or wrong is None)
    shown = right if engaged else (wrong or right)
    if shown is None:
        return SitePrecision(site.name, planned.precision, (), False, "no product in the compiled program")
    evidence = f"compiled program: {shown.instruction.label}"
    if not own:
        evidence += f", none of {site.k} × {site.n}: merged or fused with others"
    return SitePrecision(site.name, planned.precision, shown.factors, engaged, evidence)


def _norm(program: ProgramText, planned: PlannedSite) -> SitePrecision:
    """A norm is fused with its neighbours; that its type is there at all is what can be read."""
    wanted = TYPES[planned.precision]
    engaged = wanted in program.types
    evidence = f"compiled program: norms lose their names; {wanted} is {'there' if engaged else 'nowhere'}"
    return SitePrecision(
        planned.site.name, planned.precision, (wanted,) if engaged else (), engaged, evidence
    )

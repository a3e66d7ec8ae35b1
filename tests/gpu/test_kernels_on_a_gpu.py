"""Our Triton kernels, compiled for the GPU of this host, against float64 on it; replayed from CUDA graphs.

Tolerances are in units of the base precision's eps. The kernels round an inner product to it, as the graph
does, where float64 may stand on the other side of a tie: several eps of a normalized value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from loka_onnx.engines.inductor.choosing import SPLIT_TILES, TILES  # noqa: E402
from loka_onnx.engines.inductor.kernels.products import Tile  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("float8_gpu")]

BASES = [torch.bfloat16, torch.float16]
ALL_TILES = (*TILES, *SPLIT_TILES)
FP8 = torch.float8_e4m3fn
LIMIT = 448.0
HALF_STEP = 2.0**-4
"""Rounding to E4M3 moves a value by at most this much of it, and near zero by `LEAST_STEP` / 2."""
LEAST_STEP = 2.0**-9
SHAPES = [(27, 16, 5), (64, 128, 32), (128, 128, 64)]
"""Tokens, their length, and columns: what needs masks, and both Wukong stacks."""


@dataclass(frozen=True)
class Ends:
    """What follows a product."""

    bias: bool = False
    relu: bool = False
    cross: bool = False
    first: bool = False


EPILOGUES = {
    "plain": Ends(),
    "bias, relu": Ends(bias=True, relu=True),
    "cross": Ends(bias=True, cross=True),
    "first cross": Ends(bias=True, cross=True, first=True),
}


def random(*shape: int, base: Any, scale: float = 1.0) -> Any:
    return (torch.randn(*shape, device="cuda") * scale).to(base)


def bits(value: Any) -> Any:
    return value.view(torch.uint8).clone()


def eps(base: Any) -> float:
    return float(torch.finfo(base).eps)


def layer_norm(z: Any, gamma: Any, beta: Any) -> Any:
    centred = z - z.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double() + beta.double()


def assert_close(found: Any, exact: Any, *, relative: float, absolute: float) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=relative, atol=absolute)


def assert_quantized(found: Any, exact: Any, *, relative: float, absolute: float) -> None:
    """Every value is one of E4M3 that is no farther from the exact one than rounding explains."""
    assert found.dtype is FP8
    exact = exact.clamp(-LIMIT, LIMIT)
    assert_close(found.float(), exact, relative=HALF_STEP + relative, absolute=LEAST_STEP / 2 + absolute)
    # It spans the format: not all of it is saturated, or zero.
    assert found.float().abs().max() > LIMIT / 16
    assert (found.float().abs() < LIMIT).any()


# Interaction and norm ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interaction:
    x: Any
    y: Any
    gamma: Any
    beta: Any

    @classmethod
    def of(cls, shape: tuple[int, int, int], base: Any, batch: int = 7) -> Interaction:
        n, d, k = shape
        draw = [random(n, k, base=base, scale=n**-0.5), *(random(n * k, base=base) for _ in range(2))]
        return cls(random(batch, n, d, base=base), *draw)

    def exact(self) -> Any:
        p = torch.einsum("bnd,nk->bdk", self.x.double(), self.y.double()).to(self.x.dtype).double()
        s = torch.einsum("bnd,bdk->bnk", self.x.double(), p).reshape(len(self.x), -1)
        return layer_norm(s, self.gamma, self.beta)

    def run(self, inverse_scale: float = 0.0) -> Any:
        from loka_onnx.engines.inductor.kernels.triton_factorization import factorization_norm

        given = (self.x, self.y, self.gamma, self.beta)
        return factorization_norm(*given, 1e-5, inverse_scale, inverse_scale > 0.0)


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_interaction_with_its_norm(shape: tuple[int, int, int], base: Any) -> None:
    case, unit = Interaction.of(shape, base), eps(base)
    exact = case.exact()
    found = case.run()
    assert found.dtype is base
    assert_close(found, exact, relative=2 * unit, absolute=8 * unit)
    assert_quantized(case.run(64.0), exact * 64, relative=4 * unit, absolute=64 * 8 * unit)


# Residual and norm ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    x: Any
    f: Any
    w: Any
    gamma: Any
    beta: Any

    @classmethod
    def of(cls, shape: tuple[int, int, int], base: Any, batch: int = 7) -> Block:
        n, d, later = shape
        x, f = random(batch, n, d, base=base), random(batch, n - later, d, base=base)
        draw = [random(later, n, base=base, scale=n**-0.5), random(d, base=base), random(d, base=base)]
        return cls(x, f, *draw)

    def exact(self) -> Any:
        mix = torch.einsum("ln,bnd->bld", self.w.double(), self.x.double())
        joined = torch.cat([self.f.double(), mix], 1) + self.x.double()
        return layer_norm(joined, self.gamma, self.beta)

    def run(self) -> Any:
        from loka_onnx.engines.inductor.kernels.triton_token_norm import token_residual_norm

        return token_residual_norm(self.x, self.f, self.w, self.gamma, self.beta, 1e-5)


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_residual_block_with_its_norm(shape: tuple[int, int, int], base: Any) -> None:
    case, unit = Block.of(shape, base), eps(base)
    found = case.run()
    assert found.dtype is base
    assert_close(found, case.exact(), relative=4 * unit, absolute=8 * unit)


# Products ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    a: Any
    b: Any
    scale: Any
    bias: Any
    x0: Any
    x: Any
    ends: Ends
    base: Any

    @classmethod
    def of(cls, shape: tuple[int, int, int], base: Any, ends: Ends, *, float8: bool = True) -> Product:
        m, n, k = shape
        if float8:
            factors = [(torch.randn(rows, k, device="cuda") * 60).to(FP8) for rows in (m, n)]
            scale = (torch.rand(n, device="cuda") + 1.0) / (60 * 60 * k**0.5)
        else:
            factors = [random(m, k, base=base), random(n, k, base=base, scale=k**-0.5)]
            scale = None
        bias = random(n, base=base) if ends.bias else None
        x0 = random(m, n, base=base) if ends.cross else None
        x = random(m, n, base=base) if ends.cross and not ends.first else None
        return cls(*factors, scale, bias, x0, x, ends, base)

    def exact(self) -> Any:
        z = self.a.double() @ self.b.double().t()
        z = z if self.scale is None else z * self.scale.double()
        z = z if self.bias is None else z + self.bias.double()
        z = z.clamp(min=0) if self.ends.relu else z
        if self.x0 is None:
            return z
        return self.x0.double() * z + (self.x0 if self.x is None else self.x).double()

    def run(self, tile: Sequence[int], inverse_scale: float = 0.0, *, wide: bool = True) -> list[Any]:
        from loka_onnx.engines.inductor.kernels.triton_product import product

        given = (self.a, self.b, self.scale, self.bias, self.x0, self.x)
        kind = self.base if wide else None
        return list(product(*given, inverse_scale, self.ends.relu, kind, list(tile)))


def tiles(element_size: int) -> list[list[int]]:
    """All that builds choose among."""
    return [replace(tile, depth=tile.depth // element_size).numbers() for tile in ALL_TILES]


def scale_for(exact: Any) -> float:
    """One over a scale that maps the largest value to the upper half of the format, unsaturated."""
    return float(2.0 ** (8 - round(float(exact.abs().max())).bit_length()))


def check_product(case: Product, tile: Sequence[int]) -> None:
    exact, unit = case.exact(), eps(case.base)
    inverse_scale = scale_for(exact)
    wide, narrow = case.run(tile, inverse_scale)
    assert wide.dtype is case.base
    # Tensor cores keep some 14 bits of an FP8 sum (`choosing`), and may lose one unit with each 32 of K.
    lost = 2.0**-13 * -(-case.a.shape[1] // 32) if case.scale is not None else 2.0**-10
    slack = lost * float(exact.abs().max())
    assert_close(wide, exact, relative=unit, absolute=slack)
    assert_quantized(narrow, exact * inverse_scale, relative=unit, absolute=slack * inverse_scale)


@pytest.mark.parametrize("float8", [True, False], ids=["fp8", "base"])
@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("ends", EPILOGUES)
def test_a_product_with_what_follows(ends: str, base: Any, float8: bool) -> None:
    case = Product.of((513, 256, 1024), base, EPILOGUES[ends], float8=float8)
    check_product(case, tiles(1 if float8 else 2)[len(TILES) - 2])


@pytest.mark.parametrize("tile", [TILES[-2], SPLIT_TILES[1]], ids=str)
@pytest.mark.parametrize("float8", [True, False], ids=["fp8", "base"])
@pytest.mark.parametrize("shape", [(21, 48, 80), (3, 32, 48), (1, 16, 16), (2048, 1024, 512)], ids=str)
def test_shapes_of_products(shape: tuple[int, int, int], float8: bool, tile: Tile) -> None:
    """Less than one tile, with K that no step divides, or has fewer steps than parts; sizes that Triton takes
    for constants; and many.
    """
    case = Product.of(shape, torch.bfloat16, EPILOGUES["cross"], float8=float8)
    check_product(case, tiles(1 if float8 else 2)[ALL_TILES.index(tile)])


@pytest.mark.parametrize("float8", [True, False], ids=["fp8", "base"])
@pytest.mark.parametrize("number", range(len(ALL_TILES)))
def test_every_tile(number: int, float8: bool) -> None:
    from triton.runtime.errors import OutOfResources

    case = Product.of((300, 272, 416), torch.bfloat16, EPILOGUES["bias, relu"], float8=float8)
    try:
        check_product(case, tiles(1 if float8 else 2)[number])
    except OutOfResources as error:
        pytest.skip(f"needs a GPU with more shared memory: {error}")


@pytest.mark.parametrize("float8", [True, False], ids=["fp8", "base"])
def test_a_product_with_one_of_its_outputs(float8: bool) -> None:
    case = Product.of((513, 256, 1024), torch.bfloat16, EPILOGUES["bias, relu"], float8=float8)
    tile, inverse_scale = tiles(1 if float8 else 2)[len(TILES) - 2], scale_for(case.exact())
    wide, narrow = case.run(tile, inverse_scale)
    (alone,) = case.run(tile)
    assert torch.equal(alone, wide)
    (alone,) = case.run(tile, inverse_scale, wide=False)
    assert torch.equal(bits(alone), bits(narrow))


@pytest.mark.parametrize("number", range(len(ALL_TILES)))
def test_exact_tiles_lose_no_more_than_one_step(number: int) -> None:
    from triton.runtime.errors import OutOfResources

    # Positive factors: what every addition loses is of one sign, and adds up.
    case = Product.of((300, 272, 3456), torch.float32, EPILOGUES["plain"])
    case = replace(case, a=case.a.float().abs().to(FP8), b=case.b.float().abs().to(FP8))
    exact = case.exact()
    try:
        (fast,), (slow,) = (
            case.run(replace(ALL_TILES[number], is_exact=is_exact).numbers()) for is_exact in (False, True)
        )
    except OutOfResources as error:
        pytest.skip(f"needs a GPU with more shared memory: {error}")
    lost = [float((each.double() - exact).norm() / exact.norm()) for each in (fast, slow)]
    # Tensor cores add 32 products at a time to what a step has so far, and keep 14 bits of it (DeepSeek-V3,
    # arXiv 2412.19437, section 3.3.2); an H100 lost .0006 in steps of 128 and .0019 in steps of 256.
    assert lost[1] < ALL_TILES[number].depth / 32 * 2.0**-12
    assert lost[0] > 2 * lost[1]


def test_nan_stays_and_infinity_saturates() -> None:
    case = Product.of((21, 48, 80), torch.bfloat16, EPILOGUES["bias, relu"])
    case.a.view(torch.uint8)[3, 5] = 0x7F
    case.bias[7] = float("inf")
    wide, narrow = case.run(tiles(1)[len(TILES) - 2], 1.0)
    for each in (wide.float(), narrow.float()):
        assert each[3].isnan().all()
        assert not each[:3].isnan().any()
    assert (narrow.float()[:3, 7] == LIMIT).all()


# Concatenation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("widths", [(128, 72), (200, 56)], ids=str)
def test_a_concatenation_with_its_q(widths: tuple[int, int], rows: int, base: Any) -> None:
    """With a first part that tiles divide, and one that they do not."""
    from loka_onnx.engines.inductor.kernels.triton_concat import concat_quantize

    a, b = random(rows, widths[0], base=torch.float32), random(rows, widths[1], base=base)
    wide, narrow = concat_quantize(a, b, 64.0, base, True)
    assert torch.equal(wide, torch.cat([a.to(base), b], dim=1))
    assert_quantized(narrow, wide.double() * 64, relative=0.0, absolute=0.0)
    (alone,) = concat_quantize(a, b, 64.0, base, False)
    assert torch.equal(bits(alone), bits(narrow))


# Mixes of tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("mix_first", [True, False])
@pytest.mark.parametrize("sizes", [(11, 26, 1, 128), (27, 5, 3, 24), (128, 64, 64, 128)], ids=str)
def test_a_mix_of_tokens_beside_others(sizes: tuple[int, int, int, int], mix_first: bool, base: Any) -> None:
    """MovieLens' tokens made those of a DLRM-DCNv2; what needs masks; those of a Wukong stack."""
    from loka_onnx.engines.inductor.kernels.triton_token_concat import token_concat

    n, m, others, d = sizes
    x, f = random(37, n, d, base=torch.float32), random(37, others, d, base=base)
    w = random(m, n, base=base, scale=n**-0.5)
    mix = torch.matmul(w.double(), x.to(base).double())
    exact = torch.cat([mix, f.double()] if mix_first else [f.double(), mix], dim=1)
    wide, narrow = token_concat(x, w, f, 64.0, base, mix_first, True, True)
    assert_close(wide, exact, relative=eps(base), absolute=eps(base))
    assert_quantized(narrow, wide.double() * 64, relative=0.0, absolute=0.0)
    (alone,) = token_concat(x, w, None, 64.0, base, mix_first, False, True)
    assert torch.equal(bits(alone), bits(narrow[:, :m] if mix_first else narrow[:, others:]))


# CUDA graphs ------------------------------------------------------------------------------------------

REPLAYED: dict[str, Callable[[], tuple[Any, Callable[[], Any]]]] = {}
"""By name, a tensor that a launch reads, and the launch."""


def replayed(make: Callable[[], tuple[Any, Callable[[], Any]]]) -> Callable[[], Any]:
    REPLAYED[make.__name__] = make
    return make


@replayed
def interaction() -> tuple[Any, Callable[[], Any]]:
    case = Interaction.of((64, 128, 32), torch.bfloat16)
    return case.x, lambda: case.run(64.0)


@replayed
def residual() -> tuple[Any, Callable[[], Any]]:
    case = Block.of((64, 128, 32), torch.bfloat16)
    return case.x, case.run


@replayed
def mixed_tokens() -> tuple[Any, Callable[[], Any]]:
    from loka_onnx.engines.inductor.kernels.triton_token_concat import token_concat

    x = random(64, 11, 128, base=torch.float32)
    w = random(26, 11, base=torch.bfloat16)
    return x, lambda: token_concat(x, w, None, 64.0, torch.bfloat16, True, False, True)[0]


@replayed
def short_attention() -> tuple[Any, Callable[[], Any]]:
    from loka_onnx.engines.inductor.kernels.triton_attention import short_attention as kernel

    merged = random(9, 104, 3 * 128, base=torch.bfloat16)
    q, k, v = (part.unflatten(2, (8, 16)).transpose(1, 2) for part in merged.chunk(3, 2))
    return merged, lambda: kernel(q, k.transpose(2, 3), v, None, 0.25, False)


@replayed
def float8_product() -> tuple[Any, Callable[[], Any]]:
    case = Product.of((513, 256, 1024), torch.bfloat16, EPILOGUES["cross"])
    return case.x0, lambda: case.run(tiles(1)[len(TILES) - 2], 4.0)[1]


@replayed
def split_product() -> tuple[Any, Callable[[], Any]]:
    case = Product.of((21, 256, 1152), torch.bfloat16, EPILOGUES["cross"])
    return case.x0, lambda: case.run(SPLIT_TILES[1].numbers(), 4.0)[1]


@replayed
def half_product() -> tuple[Any, Callable[[], Any]]:
    case = Product.of((513, 256, 1024), torch.float16, EPILOGUES["cross"], float8=False)
    return case.x0, lambda: case.run(tiles(2)[len(TILES) - 2])[0]


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_computes_what_a_launch_does(name: str) -> None:
    read, launch = REPLAYED[name]()
    first = bits(launch())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = launch()
    graph.replay()
    assert torch.equal(bits(output), first)
    # Other values at the same address.
    read.copy_(torch.randn_like(read.float()).to(read.dtype))
    graph.replay()
    second = bits(output)
    assert not torch.equal(second, first)
    assert torch.equal(bits(launch()), second)

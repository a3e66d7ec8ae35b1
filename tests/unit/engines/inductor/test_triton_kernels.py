"""The Triton kernels against float64, in Triton's own interpreter, which needs no GPU.

They run in a process of their own: importing Triton decides that it interprets. FP16 throughout: the
interpreter (Triton 3.9) multiplies BF16 as if its bits were integers. It also loses the carry where rounding
to FP8 reaches the next power of two, so that a few quantized values are half of what they should be; a GPU
does neither.
"""

import json
import os
import subprocess
import sys
import traceback

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")
pytest.importorskip("triton", reason="needs triton: pip install triton")

from kernel_cases import ENDS, FP8, Draw, Product, heads_of_one_product, interaction, residual, tokens  # noqa: E402

from loka_onnx.engines.inductor.kernels import triton_attention, triton_concats, triton_norms, triton_product  # noqa: E402

pytestmark = pytest.mark.slow

HALF = torch.float16
DRAW = Draw(HALF, "cpu")
ULP = 2.0**-10
SMALL_TILE = [16, 16, 16, 2, 4, 0, 1]


def close(found: torch.Tensor, expected: torch.Tensor, relative: float, absolute: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=relative, atol=absolute)


def quantized(found: torch.Tensor, exact: torch.Tensor, relative: float, absolute: float) -> None:
    """All but the few that the interpreter gets wrong."""
    assert found.dtype is FP8
    exact = exact.clamp(-448, 448)
    off = (found.to(torch.float64) - exact).abs() > absolute + relative * exact.abs()
    assert off.double().mean() < 0.05


def factorization() -> None:
    """Sizes that are no powers of two, so that masks matter."""
    for shape in ((12, 16, 8), (16, 24, 16), (27, 16, 5)):
        arguments, exact = interaction(DRAW, shape, 3)
        found = triton_norms.factorization_norm(*arguments, 1e-5, 0.0, None)
        close(found, exact, 2 * ULP, 8 * ULP)
        narrow = triton_norms.factorization_norm(*arguments, 1e-5, 64.0, FP8)
        quantized(narrow, exact * 64, 2.0**-4 + 4 * ULP, 64 * 8 * ULP)


def token_norm() -> None:
    for shape in ((16, 16, 6), (12, 24, 5), (32, 16, 16)):
        arguments, exact = residual(DRAW, shape, 3)
        close(triton_norms.token_residual_norm(*arguments, 1e-5), exact, 4 * ULP, 8 * ULP)


def product() -> None:
    # K of one part, of two of unlike length, and of more parts than there are steps.
    tiles = (SMALL_TILE, [32, 16, 32, 2, 4, 1, 1], [16, 16, 16, 2, 4, 0, 2], [16, 32, 32, 2, 4, 1, 4])
    for ends in ENDS:
        case = Product.of(DRAW, (21, 48, 80), ends)
        largest = float(case.exact.abs().max())
        for tile in tiles:
            wide, narrow = case.run(triton_product.product, tile, 16.0)
            assert wide.dtype is HALF
            close(wide, case.exact, 2 * ULP, 4 * ULP * largest)
            quantized(narrow, case.exact * 16, 2.0**-4 + ULP, 2.0**-9)
        (only,) = case.run(triton_product.product, tiles[-1])
        assert torch.equal(only, wide)


def integer_product() -> None:
    """Sums are exact: values are those of the formula in float64, rounded once, and so are quantized ones."""
    tiles = (SMALL_TILE, [32, 16, 32, 2, 4, 1, 1], [16, 32, 32, 2, 4, 1, 4])
    for ends in ENDS:
        case = Product.of(Draw(torch.float32, "cpu"), (21, 48, 80), ends, integer=True)
        for tile in tiles:
            wide, narrow = case.run(triton_product.product, tile, 40.0, narrow=torch.int8)
            close(wide, case.exact, 1e-6, 1e-6)
            integers(narrow, wide.double() * 40)


def integers(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Ties to even and saturated, with both ends of the range."""
    assert found.dtype is torch.int8
    assert torch.equal(found.double(), torch.round(exact).clamp(-128, 127))


def half_product() -> None:
    """Factors that are not quantized have no scale, and sizes that are multiples of 8."""
    for sizes in ((21, 48, 80), (21, 40, 88)):
        case = Product.of(DRAW, sizes, "bias, relu", float8=False)
        wide, narrow = case.run(triton_product.product, SMALL_TILE, 64.0)
        close(wide, case.exact, 2 * ULP, 4 * ULP * float(case.exact.max()))
        quantized(narrow, case.exact * 64, 2.0**-4 + ULP, 2.0**-9)


def concat() -> None:
    """Widths that programs divide, and that they do not; FP32 is rounded as it is read."""
    for m, first, second in ((21, 128, 256), (40, 48, 100), (3, 128, 70)):
        a, b = DRAW(m, first), torch.randn(m, second)
        exact = torch.cat([a, b.to(HALF)], dim=1)
        wide, narrow = triton_concats.concat_quantize(a, b, None, 0, 64.0, HALF, True, FP8)
        torch.testing.assert_close(wide, exact, rtol=0, atol=0)
        quantized(narrow, exact.double() * 64, 2.0**-4, 2.0**-9)
        _, whole = triton_concats.concat_quantize(a, b, None, 0, 64.0, HALF, True, torch.int8)
        integers(whole, exact.double() * 64)
        assert whole.min() == -128 and whole.max() == 127
        (only,) = triton_concats.concat_quantize(a, b, None, 0, 64.0, HALF, False, FP8)
        assert torch.equal(only.view(torch.uint8), narrow.view(torch.uint8))


def lookup_concat() -> None:
    """Rows of a table on either side, ids from its end, and NaN for ids of no row."""
    for d, fields, other, table in ((128, 3, 128, 1), (32, 5, 64, 1), (64, 2, 50, 0), (96, 1, 32, 1)):
        rows, beside = DRAW(11, d), torch.randn(21, other)
        ids = torch.randint(-11, 11, (21, fields))
        looked_up = rows[ids].flatten(1)
        parts = [looked_up, beside.to(HALF)] if table == 0 else [beside.to(HALF), looked_up]
        exact, given = torch.cat(parts, dim=1), (rows, beside) if table == 0 else (beside, rows)
        wide, narrow = triton_concats.concat_quantize(*given, ids, table, 64.0, HALF, True, FP8)
        torch.testing.assert_close(wide, exact, rtol=0, atol=0)
        quantized(narrow, exact.double() * 64, 2.0**-4, 2.0**-9)
        ids[3, 0], ids[4, 0] = 11, -12
        wide, _ = triton_concats.concat_quantize(*given, ids.int(), table, 64.0, HALF, True, FP8)
        missing = wide.isnan().any(1).nonzero().flatten().tolist()
        assert missing == [3, 4] and int(wide.isnan().sum()) == 2 * d


def token_concat() -> None:
    """On either side of other tokens, and alone."""
    for sizes in ((11, 26, 1, 24), (18, 5, 3, 16), (16, 16, 0, 16)):
        for mix_first in (True, False):
            arguments, exact = tokens(DRAW, sizes, mix_first, 3)
            kernel = triton_concats.token_concat
            wide, narrow = kernel(*arguments, 64.0, HALF, mix_first, True, FP8)
            close(wide, exact, 2 * ULP, 4 * ULP)
            quantized(narrow, wide.double() * 64, 2.0**-4, 2.0**-9)
            (only,) = kernel(*arguments, 0.0, HALF, mix_first, True, None)
            assert torch.equal(only, wide)
            (only,) = kernel(*arguments, 64.0, HALF, mix_first, False, FP8)
            assert torch.equal(only.view(torch.uint8), narrow.view(torch.uint8))


def attended(q, kt, v, added, scale: float) -> torch.Tensor:
    """In float64, (batch, queries, heads, width); rows masked throughout are 0."""
    shares = torch.softmax(q.double() @ kt.double() * scale + added, dim=-1).nan_to_num(0.0)
    return (shares.to(HALF).double() @ v.double()).transpose(1, 2)


def attention() -> None:
    """Views of one product, and tensors whose last axis is not contiguous; tiles with and without padding."""
    for sizes in ((2, 2, 20, 16), (3, 70, 17, 24), (1, 16, 16, 16)):
        q, kt, v = heads_of_one_product(DRAW, sizes, 2)
        for given in ((q, kt, v), (q, kt.contiguous(), v.transpose(2, 3).contiguous().transpose(2, 3))):
            found = triton_attention.short_attention(*given, None, 0.3, False)
            assert found.is_contiguous()
            close(found, attended(q, kt, v, 0.0, 0.3), 2 * ULP, 4 * ULP)


def attention_masks() -> None:
    """Of keys and of every product, of one head or all; the second example is masked throughout."""
    batch, (heads, queries, keys, d) = 2, (2, 3, 20, 16)
    q, kt, v = heads_of_one_product(DRAW, (heads, queries, keys, d), batch)
    for shape in ((batch, 1, 1, keys), (1, heads, queries, keys), (batch, heads, queries, keys)):
        drop = torch.rand(shape) < 0.4
        drop[-1, ..., -1, :] = True
        lowest = torch.zeros(shape).masked_fill(drop, float("-inf"))
        exact = attended(q, kt, v, lowest.double(), 0.3)
        assert not exact[-1, -1].any() and exact[0, 0].abs().max() > 0.1
        for mask, is_dropped in ((drop, True), (~drop, False), (lowest.to(HALF), False)):
            found = triton_attention.short_attention(q, kt, v, mask, 0.3, is_dropped)
            close(found, exact, 2 * ULP, 4 * ULP)
        added = torch.randn(shape).to(HALF)
        found = triton_attention.short_attention(q, kt, v, added, 0.3, False)
        close(found, attended(q, kt, v, added.double(), 0.3), 2 * ULP, 4 * ULP)
    # The least number of BF16 swallows the products, so that such rows are uniform.
    least = torch.zeros(batch, 1, 1, keys, dtype=torch.float32)
    least[-1] = torch.finfo(torch.bfloat16).min
    found = triton_attention.short_attention(q, kt, v, least, 0.3, False)
    close(found[-1], v[-1].double().mean(1)[None].expand(queries, heads, d), 2 * ULP, 4 * ULP)


KERNELS = (factorization, token_norm, product, integer_product, half_product, concat, token_concat)
KERNELS += (lookup_concat, attention, attention_masks)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """What went wrong, by kernel."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kernel", [each.__name__ for each in KERNELS])
def test_a_kernel_computes_what_it_says(kernel: str, failures: dict[str, str]) -> None:
    assert failures[kernel] == ""


def main() -> None:
    failures = dict.fromkeys((kernel.__name__ for kernel in KERNELS), "")
    for kernel in KERNELS:
        torch.manual_seed(5)
        try:
            kernel()
        except Exception:
            failures[kernel.__name__] = traceback.format_exc()
    print(json.dumps(failures))


if __name__ == "__main__":
    main()

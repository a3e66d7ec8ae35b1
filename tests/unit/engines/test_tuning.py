"""Timing kernels, with the real ones of the CPU."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: kernels are timed with it")

import torch

from loka_onnx.core.devices import SLICE, device_called
from loka_onnx.core.formats import Precision
from loka_onnx.core.timing import QUANTIZE, Shape
from loka_onnx.engines import tuned_kernels, tuning
from loka_onnx.engines.tuned_kernels import (
    CACHE_BYTES,
    Operands,
    PreparedOperands,
    calls_in_turn,
    copies_in_turn,
    kernels_of,
    turns_of,
)
from loka_onnx.engines.tuning import KernelTimer, Tuned, device_to_time
from loka_onnx.errors import ConfigError, EngineError

ROUNDS = 5
SHAPE = Shape(48, 32, 64)


@pytest.fixture(scope="module")
def timer() -> KernelTimer:
    return KernelTimer("cpu", ROUNDS)


@pytest.fixture(scope="module")
def tuned(timer: KernelTimer) -> Tuned:
    products = [kernel for kernel in timer.kernels if kernel.name != QUANTIZE]
    return timer.measure(products, Operands.generated(SHAPE, 0))


def rounded(values: np.ndarray, axis: int | None, *, is_integer: bool = False) -> np.ndarray:
    """Values as FP8 (by ml_dtypes) or INT8 and its scale hold them."""
    amax = np.abs(values).max(axis=axis, keepdims=True)
    scale = (amax / np.float32(127.0 if is_integer else 448.0)).astype(np.float32)
    stored = np.rint(values / scale) if is_integer else (values / scale).astype(ml_dtypes.float8_e4m3fn)
    return stored.astype(np.float64) * scale


def relative_rms(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2)))


def test_every_kernel_of_the_cpu_is_timed(timer: KernelTimer, tuned: Tuned) -> None:
    names = ("mm/bf16", "scaled_mm/fp8/per_tensor", "scaled_mm-row_wise/fp8/per_channel")
    names += ("int_mm/int8/per_channel",)
    assert [str(each.kernel) for each in tuned.measured] == [f"inductor:{name}" for name in names]
    assert tuned.refused == ()
    for each in tuned.measured:
        assert (each.shape, each.repeats, each.kernel.device) == (SHAPE, ROUNDS, "cpu")
        assert each.us > 0.0
        assert each.spread_us is not None
        assert each.provenance.versions["torch"] == torch.__version__
        assert "single calls" in each.provenance.note


def test_once_is_the_fewest_that_a_kernel_is_timed() -> None:
    assert KernelTimer("cpu", 1).rounds == 1
    with pytest.raises(ConfigError) as error:
        KernelTimer("cpu", 0)
    assert error.value.code == "E2815"


def test_errors_are_those_of_a_product_in_float64(tuned: Tuned) -> None:
    """Held against ml_dtypes and NumPy; what a kernel adds is the rounding of its result to BF16, at most."""
    operands = Operands.generated(SHAPE, 0)
    assert operands.weight is not None
    prepared = PreparedOperands(operands, "cpu")
    for each in tuned.measured:
        name, axis = each.kernel.name, {"scaled_mm-row_wise": 0, "int_mm": 0}.get(each.kernel.name)
        is_integer = name == "int_mm"
        left, right = operands.activation, operands.weight
        if name == "mm":
            left, right = (v.astype(ml_dtypes.bfloat16).astype(np.float64) for v in (left, right))
        else:
            left = rounded(left, None, is_integer=is_integer)
            right = rounded(right, axis, is_integer=is_integer)
        with torch.inference_mode():
            result = prepared.run_of(each.kernel)().to(torch.float64).numpy()
        assert each.error == pytest.approx(relative_rms(result, left @ right), rel=0.02)
        # BF16 has 8 bits: rounding errs by 2**-9 at most, 2**-9/√3 in the mean, and sums in FP32 by far less.
        assert 2.0**-12 < each.error < 2.0**-9


def test_the_cast_has_a_time_and_no_error(timer: KernelTimer) -> None:
    operands = Operands.generated(Shape(48, 0, 64), 0)
    wide = operands.activation.astype(ml_dtypes.bfloat16).astype(np.float32)
    amax = np.abs(operands.activation).max()
    for kernel, largest in zip(timer.kernels[-2:], (127, 448), strict=True):
        (found,) = timer.measure([kernel], operands).measured
        assert (found.kernel.name, found.shape) == (QUANTIZE, Shape(48, 0, 64))
        assert found.error is None
        with torch.inference_mode():
            cast = PreparedOperands(operands, "cpu").run_of(kernel)().to(torch.float32).numpy()
        scaled = np.clip(wide * (1 / (amax / np.float32(largest))), -largest, largest)
        stored = np.rint(scaled) if largest == 127 else scaled.astype(ml_dtypes.float8_e4m3fn)
        assert (cast == stored.astype(np.float32)).all()


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_integers_sum_exactly_in_any_number_of_rows(rows: int) -> None:
    """`torch._int_mm` of the CPU; it refuses so few rows on a GPU, for which they are padded."""
    random = np.random.default_rng(rows)
    a, b = (random.integers(-128, 128, shape, dtype=np.int8) for shape in ((rows, 64), (64, 24)))
    sums = tuned_kernels.integer_sums(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    assert sums.dtype == np.int32 and (sums == a.astype(np.int64) @ b.astype(np.int64)).all()


def test_kernels_that_fail_are_told_and_casts_named_once(timer: KernelTimer) -> None:
    found = timer.measure([timer.kernels[0], timer.kernels[-1]], Operands.generated(Shape(4, 0, 4), 0))
    assert [each.kernel.name for each in found.measured] == [QUANTIZE]
    (refused,) = found.refused
    assert (refused.kernel.name, refused.shape) == ("mm", Shape(4, 0, 4))
    assert refused.reason == "ValueError: there is no weight to multiply by"
    wanted = timer.wanted([Shape(8, 16, 32), Shape(8, 64, 32), Shape(8, 16, 32)])
    products = [pair for pair in wanted if pair[0].name != QUANTIZE]
    assert len(products) == 2 * (len(timer.kernels) - 2)
    assert [pair[1] for pair in wanted if pair[0].name == QUANTIZE] == [Shape(8, 0, 32)] * 2


def test_a_device_that_died_ends_the_work(timer: KernelTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nlong text")

    monkeypatch.setattr(timer, "_synchronize", dead)
    with pytest.raises(EngineError, match="kernel inductor:mm/bf16 on 48×32×64") as error:
        timer.measure(timer.kernels[:1], Operands.generated(SHAPE, 0))
    assert "illegal memory access" in error.value.evidence
    assert "long text" not in error.value.evidence


def test_times_are_taken_in_turns_and_their_median_kept(timer, monkeypatch):
    times = iter([50.0, 1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(tuning, "_clocked", lambda run: next(times))
    (found,) = timer.measure(timer.kernels[:1], Operands.generated(SHAPE, 0)).measured
    assert found.us == 3.0
    # Quartiles of five numbers: between the first two and the last two.
    assert found.spread_us == (27.0 - 1.5) / 2.0
    order: list[int] = []

    def clocked(run: object) -> float:
        order.append(id(run))
        return 1.0

    monkeypatch.setattr(tuning, "_clocked", clocked)
    timer.measure(timer.kernels[:2], Operands.generated(SHAPE, 0))
    assert len(order) == 2 * ROUNDS
    assert order[:2] * ROUNDS == order
    assert order[0] != order[1]


DRIVER_NAMES = {
    "nvidia-h100": ("sm90", "NVIDIA H100 80GB HBM3"),
    "nvidia-h200": ("sm90", "NVIDIA H200"),
    "nvidia-a100": ("sm80", "NVIDIA A100-SXM4-80GB"),
    "nvidia-l4": ("sm89", "NVIDIA L4"),
    "nvidia-l40s": ("sm89", "NVIDIA L40S"),
    "nvidia-rtx-ada": ("sm89", "NVIDIA GeForce RTX 4090"),
    "nvidia-rtx-blackwell": ("sm120", "NVIDIA RTX PRO 6000 Blackwell"),
    "amd-mi300x": ("", "AMD Instinct MI300X"),
    "": ("sm110", "NVIDIA Thor"),
    SLICE: ("sm90", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb"),
}


@pytest.mark.parametrize("device", DRIVER_NAMES)
def test_devices_by_the_names_of_their_drivers(device: str) -> None:
    architecture, *names = DRIVER_NAMES[device]
    assert {device_called(name, architecture) for name in names} == {device}


@pytest.mark.parametrize("device", [None, "nvidia-h100"])
def test_no_kernel_is_timed_on_a_slice(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times would be taken for those of the whole device, whoever names it."""
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    with pytest.raises(ConfigError, match="this GPU is a slice") as error:
        device_to_time(device)
    assert name in error.value.evidence


def test_a_device_that_is_not_here_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a GPU to be absent")
    with pytest.raises(ConfigError, match=r"no 'nvidia-h100'\n  evidence: torch .* sees no GPU"):
        device_to_time("nvidia-h100")
    assert device_to_time(None) == "cpu"


def test_large_weights_take_turns_on_a_gpu() -> None:
    shape = Shape(8, 1024, 2048)
    turns = {kernel.name: turns_of(kernel, shape, "cuda") for kernel in kernels_of("nvidia-h100")}
    weight = shape.k * shape.n
    assert turns["mm"] * 2 * weight == turns["scaled_mm"] * weight == CACHE_BYTES
    assert turns[QUANTIZE] == 1
    assert {turns_of(kernel, Shape(8, 16, 16), "cuda") for kernel in kernels_of("nvidia-h100")} == {1}
    assert {turns_of(kernel, shape, "cpu") for kernel in kernels_of("cpu")} == {1}


def left_in_a_cache(weights: Sequence[int], size: int, cache: int = 50_000_000) -> int:
    """Calls of the second replay that find their weight in a cache which drops what was used longest ago."""
    held: list[int] = []
    found = 0
    for replay in range(2):
        for weight in weights:
            found += replay * (weight in held)
            held = [*(each for each in held if each != weight), weight][-(cache // size) :]
    return found


@pytest.mark.parametrize("least", [10, 20])
def test_no_weight_is_left_in_the_cache_when_a_graph_begins_again(least: int) -> None:
    """With 7 copies of 9.2 MiB, 3 of 10 calls of a graph met a weight of the replay before."""
    for size in range(1 << 20, 40 << 20, 1 << 18):
        copies = copies_in_turn(size)
        calls = calls_in_turn(least, copies)
        assert calls >= least
        assert left_in_a_cache([call % copies for call in range(calls)], size) == 0, size
    assert left_in_a_cache([call % 7 for call in range(10)], 9_600_000) == 3


@pytest.mark.slow
def test_the_cast_is_compiled_for_each_length_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their number, as on an accelerator."""

    compiled: list[int] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        # Lengths that it does not know are inputs.
        compiled.append(sum(not isinstance(each, torch.Tensor) for each in inputs))
        return graph.forward

    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: whole(function, backend=backend))
    tuned_kernels._cast.cache_clear()
    for length in (128, 256, 512, 512, 1024):
        for rows in (8, 24):
            values = torch.randn(rows, length)
            torch._dynamo.maybe_mark_dynamic(values, 0)
            found = tuned_kernels._cast("cuda", length, Precision.FP8)(values, torch.tensor(2.0))
            assert torch.equal(found.float(), (values * 2).to(torch.float8_e4m3fn).float())
    assert compiled == [1] * 4
    tuned_kernels._cast.cache_clear()

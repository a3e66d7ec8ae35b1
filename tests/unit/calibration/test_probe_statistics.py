"""Statistics and errors that the instrumented graph sums, and their limits, against float64."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from small_models import LOGIT, TWO_SITES, W1, artifact_of, columns_of, data_of, dataset_of
from zoo_runs import BATCH, FAST_MODEL, MODEL_NAMES, ROWS, TWO_MODELS, ZooRun, capture, capture_from, zoo_run

from loka_onnx.calibration.calibrate import ProbeOptions, ProfiledModel, calibrate, update
from loka_onnx.calibration.observers.reductions import BatchTotals
from loka_onnx.calibration.observers.site_observers import observe_errors, recipes_for
from loka_onnx.calibration.passes.executors import LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import E4M3FN, E4M3FNUZ, E5M2
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import ErrorStats, RangeStats, TensorRange
from loka_onnx.data.dataset import Dataset
from loka_onnx.errors import CalibrationError, InternalError
from loka_onnx.graph.model import is_constant, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.rounding import fake_quantize, storage_type
from loka_onnx.numerics.scales import weight_scales
from loka_onnx.sessions.onnx_session import OnnxSession

pytest.importorskip("torch", reason="needs torch")

RECIPES = (PER_TENSOR, PER_CHANNEL_WEIGHT)
OPTIONS = PassOptions(recipes=RECIPES, batch_size=BATCH)


class Reference:
    """Sites of one model in float64, from the values that their inputs had in ONNX Runtime."""

    def __init__(self, graph, values, scales):
        self.graph, self.values, self.scales = graph, values, scales

    def output(self, site: Site, recipe: Recipe | None) -> Any:
        """The product; exact for None."""
        node = self.graph.node(site.name)
        inputs = [self.value(tensor) for tensor in node.inputs]
        for operand in site.operands if recipe is not None else ():
            axis, format = channel_axis(operand), recipe.format
            if operand.constant:
                scale = weight_scales(inputs[operand.index], recipe.weight, axis, format)
            else:
                scale = self.scales[recipe.activation_id][operand.tensor]
            inputs[operand.index] = fake_quantize(
                inputs[operand.index], scale, format, axis if np.ndim(scale) else None
            )
        left, right, *bias = (array.astype(np.float64) for array in inputs)
        if node.attrs.get("transB"):
            right = right.T
        return left @ right + (bias[0] if bias else 0.0)

    def norm(self, site: Site, narrow: bool) -> Any:
        """Layer normalization over the last axis, operands and result rounded to BF16 if asked."""
        node = self.graph.node(site.name)
        x, *parameters = (rounded(self.value(tensor), narrow) for tensor in node.inputs)
        spread = np.sqrt(x.var(-1, keepdims=True) + node.attrs["epsilon"])
        result = (x - x.mean(-1, keepdims=True)) / spread * parameters[0]
        if len(parameters) > 1:
            result = result + parameters[1]
        return rounded(result.astype(np.float32), narrow)

    def value(self, tensor: Any) -> Any:
        return values_of(tensor) if is_constant(tensor) else self.values[tensor.name]


def rounded(values: Any, narrow: bool) -> Any:
    return (values.astype(ml_dtypes.bfloat16) if narrow else values).astype(np.float64)


def activations_of(run: ZooRun) -> list[str]:
    return [o.tensor for s in run.artifact.sites for o in s.operands if not o.constant]


def tensors_of(run: ZooRun) -> list[str]:
    return activations_of(run) + [site.output for site in run.artifact.sites]


def range_of(values: Any) -> RangeStats:
    wide = values.astype(np.float64)
    low, high = float(wide.min()), float(wide.max())
    return RangeStats(
        wide.size, max(-low, high), low, high, ExactSum.of([wide.sum()]), ExactSum.of([squares(wide)])
    )


def squares(values: Any) -> float:
    return float(np.square(values).sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_MODELS)
def test_ranges_and_errors_of_both_passes(name, tmp_path):
    """Batches of 512, 512 and 476 rows, against what the same session computes inside."""
    run = zoo_run(name)
    probe = Probe(run.artifact, run.artifact.sites, run.data, OPTIONS, LocalExecutor(2))
    ranges = probe.ranges(tmp_path)
    scales = scales_of(ranges, RECIPES)
    measured = probe.errors(tmp_path, ranges, scales)
    assert measured.rows == ROWS
    values = capture_from(tmp_path / "ranges.onnx", activations_of(run), run.data, tmp_path)
    for tensor, stats in ranges.items():
        x = values[tensor].astype(np.float64)
        assert stats.count == x.size
        assert (stats.amax, stats.minimum, stats.maximum) == (np.abs(x).max(), x.min(), x.max())
        # Seen: 3e-8.
        assert stats.total_squares.value == pytest.approx(squares(x), rel=1e-6)
        assert stats.total.value == pytest.approx(x.sum(), abs=1e-6 * np.abs(x).sum())
    values = capture_from(tmp_path / "errors.onnx", activations_of(run), run.data, tmp_path)
    reference = Reference(run.graph(), values, scales)
    for site in run.artifact.sites:
        if site.kind is SiteKind.NORM:
            continue
        errors = measured.by_site[site.name]
        assert [e.recipe for e in errors] == [r.id for r in recipes_for(site, RECIPES)]
        for recipe, error in zip(recipes_for(site, RECIPES), errors, strict=True):
            assert error.activation_scale == scales[recipe.activation_id][site.activation.tensor]
            check_error(error, reference.output(site, None), reference.output(site, recipe))


def check_error(error: ErrorStats, exact: Any, low: Any) -> None:
    """Every number against float64, within 1e-6; seen: 7e-7, for noise, and 1e-7 for the others."""
    assert error.count == exact.size
    assert error.signal.value == pytest.approx(squares(exact), rel=1e-6)
    assert error.noise.value == pytest.approx(squares(low - exact), rel=1e-6)
    assert error.relative_error == pytest.approx(
        np.linalg.norm(low - exact) / np.linalg.norm(exact), rel=1e-6
    )
    assert error.relative_error > 1e-3


OTHERS = [(name, E4M3FN) for name in MODEL_NAMES if name != FAST_MODEL]


@pytest.mark.parametrize(("name", "format"), [
    (FAST_MODEL, E4M3FN),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (*OTHERS, ("wukong", E4M3FNUZ), ("wukong",
        E5M2))),
])  # fmt: skip
def test_errors_from_equal_activations(name, format, tmp_path):
    """The instrumented graph itself hands out the activations, so that nothing but its sums is in question.

    What remains is that its products are FP32 and the reference's float64.
    """
    run = zoo_run(name)
    plain = capture(run.graph(), tensors_of(run), run.inputs(), tmp_path)
    ranges = {t: range_of(v) for t, v in plain.items()}
    # A third of the range, so that some of the activations saturate.
    recipes = tuple(Recipe.of(format, recipe.weight) for recipe in RECIPES)
    rounding = recipes[0].activation_id
    scales = {rounding: {t: float(np.float32(r.amax / format.max / 3)) for t, r in ranges.items()}}
    graph = run.graph()
    observers = observe_errors(graph, run.artifact.sites, recipes, scales, ranges)
    measured = [output.name for output in graph.outputs]
    values = capture(graph, [*tensors_of(run), *measured], run.inputs(), tmp_path)
    reference = Reference(run.graph(), values, scales)
    totals = BatchTotals()
    totals.add(values, ROWS)
    saturated = 0
    for observer in observers:
        site, error = run.artifact.site(observer.site), observer.read(totals)
        if site.kind is SiteKind.NORM:
            continue
        recipe = next(r for r in recipes if r.id == observer.recipe)
        exact, low = reference.output(site, None), reference.output(site, recipe)
        check_error(error, exact, low)
        x = np.abs(values[site.activation.tensor] / np.float32(scales[rounding][site.activation.tensor]))
        assert error.activation_count == x.size
        assert error.saturated == int((x > format.max).sum())
        gone = x.astype(storage_type(format)).astype(np.float32) == 0
        assert error.underflowed == int(((x > 0) & gone).sum())
        saturated += error.saturated
    assert saturated > 0


@pytest.mark.parametrize("name", TWO_MODELS)
def test_norms_in_bfloat16(name, tmp_path):
    run = zoo_run(name)
    norms = tuple(site for site in run.artifact.sites if site.kind is SiteKind.NORM)
    assert norms
    probe = Probe(run.artifact, norms, run.data, PassOptions(batch_size=BATCH), LocalExecutor(1))
    measured = probe.errors(tmp_path, {}, {})
    values = capture(run.graph(), tensors_of(run), run.inputs(), tmp_path)
    reference = Reference(run.graph(), values, {})
    for site in norms:
        exact, low = reference.norm(site, narrow=False), reference.norm(site, narrow=True)
        (error,) = measured.by_site[site.name]
        assert (error.recipe, error.activation_scale, error.count) == ("bf16", None, exact.size)
        assert error.signal.value == pytest.approx(squares(exact), rel=1e-6)
        # FP32 statistics may put a result on the other side of a BF16 tie: one in some thousand results.
        assert error.noise.value == pytest.approx(squares(low - exact), rel=1e-3)
        assert 5e-4 < error.relative_error < 5e-3


@pytest.mark.parametrize(("body", "shown"), [
    # Exp overflows, and the logarithm of a negative number is NaN.
    ("[fc1] h = MatMul(x, w1)  e = Exp(h)  [fc2] y = MatMul(e, head)", "amax inf, sum of squares inf"),
    ("[fc1] h = MatMul(x, w1)  e = Log(h)  [fc2] y = MatMul(e, head)", "nan"),
])  # fmt: skip
def test_an_activation_that_is_not_finite_names_site_tensor_and_batch(body, shown, tmp_path):
    x = np.full((640, 16), 0.1)
    x[389] = 5.0 if shown.startswith("amax") else -0.1
    artifact, data = artifact_of(tmp_path, body, w1=np.full((16, 16), 10.0)), data_of(tmp_path, x)
    with pytest.raises(CalibrationError) as caught:
        calibrate(artifact, (LOGIT,), data, tmp_path, ProbeOptions(batch_size=64, threads=1))
    text = str(caught.value)
    assert caught.value.code == "E0506" and shown in text and "1024 elements" in text
    assert text.startswith("site 'fc2': its input 'e' is not finite in batch 7 of 10 of 'clicks-0412.npz'")


def test_dead_activations_have_no_error_and_an_infinite_weight_is_refused(tmp_path):
    """Zero everywhere: the scale is 1, and nothing divides by zero."""
    artifact = artifact_of(tmp_path, "z = Relu(x)  [fc1] h = MatMul(z, w1)  [fc2] y = MatMul(h, head)")
    profile = calibrate(
        artifact, (LOGIT,), data_of(tmp_path, -np.ones((64, 16))), tmp_path, ProbeOptions(threads=1)
    )
    error = profile.site("fc1").error(PER_TENSOR.id)
    assert (error.activation_scale, error.signal.parts) == (1.0, ())
    assert error.relative_error == 0.0
    assert (error.saturated, error.underflowed) == (0, 0)
    weight = W1.copy()
    weight[3, 4] = np.inf
    artifact = artifact_of(tmp_path, "[fc1] h = MatMul(x, w1)  [fc2] y = MatMul(h, head)", w1=weight)
    x = np.zeros((64, 16))
    with pytest.raises(CalibrationError) as caught:
        calibrate(artifact, (LOGIT,), data_of(tmp_path, x), tmp_path, ProbeOptions(threads=1))
    assert caught.value.code == "E0506"
    with pytest.raises(InternalError):
        ProbeOptions(recipes=(PER_CHANNEL_WEIGHT,))


def test_rows_and_sites_can_be_limited(tmp_path):
    artifact = artifact_of(tmp_path, TWO_SITES)
    x = np.random.default_rng(1).standard_normal((300, 16))
    x[200:] *= 100
    options = ProbeOptions(
        rows=200, sensitivity_rows=150, batch_size=64, threads=1, only=frozenset({"fc1"}), synthetic=True
    )
    seen: list[tuple[str, int, int]] = []
    data = data_of(tmp_path, x)
    profile = calibrate(artifact, (LOGIT,), data, tmp_path, options, lambda *step: seen.append(step))
    assert [entry.site for entry in profile.sites] == ["fc1"]
    assert (profile.rows, profile.error_rows, profile.sampling.rows) == (200, 200, 150)
    assert profile.synthetic
    assert profile.site("fc1").operands["x"].amax == pytest.approx(np.abs(x[:200]).max(), rel=1e-6)
    assert seen[3] == ("ranges", 200, 200) and seen[-1] == ("sensitivity", 150, 150)
    assert profile.site("fc1").sensitivities[0].kl.rows == 150


MEMORY = textwrap.dedent(
    """
    import sys, resource
    from pathlib import Path
    sys.path[:0] = sys.argv[1].split(":")
    import numpy as np
    from small_models import BINDINGS, LOGIT, TWO_SITES, artifact_of
    from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
    from loka_onnx.data.splits import open_dataset

    folder, batches = Path(sys.argv[2]), int(sys.argv[3])
    artifact = artifact_of(folder, TWO_SITES)
    data = open_dataset(folder / "rows.npz", BINDINGS, ("label",))
    # The rows of the sensitivity pass are capped, and equal here.
    options = ProbeOptions(batch_size=2048, rows=2048 * batches, threads=1, sensitivity_rows=20480)
    calibrate(artifact, (LOGIT,), data, folder, options)
    # Anonymous memory: mapped files are the page cache's business.
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(fields["VmHWM"].split()[0]) - int(fields["RssFile"].split()[0]))
    """
)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_batches(tmp_path):
    """Peak after 10 and after 200 batches of 2048 rows; the rows of the difference are 26 MB."""
    rows = 2048 * 200
    np.savez(
        tmp_path / "rows.npz",
        x=np.random.default_rng(0).standard_normal((rows, 16)).astype(np.float32),
        label=np.arange(rows) % 2,
    )
    here = Path(__file__).parent
    modules = f"{here}:{here.parents[1] / 'support'}"
    peaks = []
    for batches in (10, 200):
        result = subprocess.run(
            [sys.executable, "-c", MEMORY, modules, str(tmp_path), str(batches)],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout) / 1024)
    # Seen: below 1 MiB. Keeping the rows would cost 25 MiB, keeping every activation more.
    assert peaks[1] - peaks[0] < 6


BODY = """
    [left] a = MatMul(x, w_left)
    t = Transpose(a)  u = Transpose(t)
    b = Relu(u)  c = Exp(a)
    q = Div(b, c)
    [head] y = MatMul(q, w_head)
"""


def measure(artifact: ModelArtifact, data: Dataset, folder: Path, **options: int) -> dict[str, TensorRange]:
    return Probe(artifact, (), data, PassOptions(**options), LocalExecutor(2)).magnitudes(folder)


def test_every_tensor_that_is_no_constant_against_numpy(tmp_path):
    artifact = artifact_of(tmp_path, BODY)
    columns = columns_of(700)
    found = measure(artifact, dataset_of(tmp_path, columns), tmp_path, batch_size=128)
    model = onnx.load(artifact.path)
    computed = [name for node in model.graph.node for name in node.output]
    assert list(found) == ["x", *computed]
    del model.graph.output[:]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in computed)
    onnx.save(model, tmp_path / "all.onnx")
    values = OnnxSession(tmp_path / "all.onnx").run({"x": columns["x"]}) | {"x": columns["x"]}
    for name, known in found.items():
        magnitude = np.abs(values[name])
        # Batches of another size round sums in another order.
        assert known.amax == pytest.approx(magnitude.max(), rel=1e-5), name
        if name == "c":
            assert known.smallest == pytest.approx(magnitude.min(), rel=1e-5)
        else:
            assert known.smallest is None


def test_an_infinity_counts_as_the_largest_number_and_nan_is_named(tmp_path):
    body = "r = Relu(x) n = Neg(r) l = Log(r) e = Exp(l) [head] y = MatMul(e, w_head)"
    columns = columns_of(64)
    found = measure(artifact_of(tmp_path, body), dataset_of(tmp_path, columns), tmp_path)
    # Zeros do not count as the smallest of what a logarithm is taken of.
    assert found["r"].smallest == columns["x"][columns["x"] > 0].min()
    # Log(0) is -inf, and its exponential is 0 again.
    assert found["l"].amax == float(np.finfo(np.float32).max)
    assert found["e"].amax == pytest.approx(found["r"].amax, rel=1e-5)
    body = "l = Log(x) e = Exp(l) [head] y = MatMul(e, w_head)"
    with pytest.raises(CalibrationError) as caught:
        measure(artifact_of(tmp_path, body), dataset_of(tmp_path, columns_of(64)), tmp_path)
    assert caught.value.code == "E0507"
    assert caught.value.what.startswith("tensor 'l' is not a number in batch 1 of 1 of 'clicks-0412")


def test_calibration_measures_them_where_it_is_asked_to_and_rows_are_added(tmp_path):
    artifact = artifact_of(tmp_path)
    first = dataset_of(tmp_path / "one", columns_of(300, 1))
    options = ProbeOptions(threads=1, draws=1, magnitudes=True)
    profile = calibrate(artifact, (LOGIT,), first, tmp_path, options)
    assert set(profile.tensors) == {"x", "a", "b", "c", "d", "e", "f", "g", "y"}
    assert list(profile.seconds)[:2] == ["ranges", "magnitudes"]
    larger = columns_of(300, 2)
    larger["x"] *= 3
    more = dataset_of(tmp_path / "two", larger)
    # The options of an update are those of the profile.
    plain = ProbeOptions(threads=1, draws=1)
    both = update(profile, ProfiledModel(artifact, (LOGIT,)), more, tmp_path, plain)
    assert both.tensors["x"].amax == np.abs(larger["x"]).max() > profile.tensors["x"].amax
    assert calibrate(artifact, (LOGIT,), first, tmp_path, plain).tensors == {}

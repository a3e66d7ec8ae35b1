"""What calibration refuses, how much memory it takes, and magnitudes of every tensor against numpy."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_models import LOGIT, TWO_SITES, W1, artifact_of, columns_of, data_of, dataset_of

from loka_onnx.calibration.calibrate import ProbeOptions, ProfiledModel, calibrate, update
from loka_onnx.calibration.passes.executors import LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions, Probe
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.core.statistics import TensorRange
from loka_onnx.data.dataset import Dataset
from loka_onnx.errors import CalibrationError
from loka_onnx.sessions.onnx_session import OnnxSession


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        # Exp overflows, and the logarithm of a negative number is NaN.
        ("[fc1] h = MatMul(x, w1)  e = Exp(h)  [fc2] y = MatMul(e, head)", "amax inf, sum of squares inf"),
        ("[fc1] h = MatMul(x, w1)  e = Log(h)  [fc2] y = MatMul(e, head)", "nan"),
    ],
)
def test_an_activation_that_is_not_finite_names_site_tensor_and_batch(body, shown, tmp_path):
    x = np.full((640, 16), 0.1)
    x[389] = 5.0 if shown.startswith("amax") else -0.1
    artifact, data = artifact_of(tmp_path, body, w1=np.full((16, 16), 10.0)), data_of(tmp_path, x)
    with pytest.raises(CalibrationError) as caught:
        calibrate(artifact, (LOGIT,), data, tmp_path, ProbeOptions(batch_size=64, threads=1))
    text = str(caught.value)
    assert caught.value.code == "E0506" and shown in text and "1024 elements" in text
    assert text.startswith("site 'fc2': its input 'e' is not finite in batch 7 of 10 of 'clicks-0412.npz'")


def test_an_infinite_weight_is_refused(tmp_path):
    weight = W1.copy()
    weight[3, 4] = np.inf
    artifact = artifact_of(tmp_path, "[fc1] h = MatMul(x, w1)  [fc2] y = MatMul(h, head)", w1=weight)
    x = np.zeros((64, 16))
    with pytest.raises(CalibrationError) as caught:
        calibrate(artifact, (LOGIT,), data_of(tmp_path, x), tmp_path, ProbeOptions(threads=1))
    assert caught.value.code == "E0506"


def test_dead_activations_and_weights_have_no_error(tmp_path):
    """Zero everywhere: the scale is 1, and nothing divides by zero."""
    artifact = artifact_of(tmp_path, "z = Relu(x)  [fc1] h = MatMul(z, w1)  [fc2] y = MatMul(h, head)")
    profile = calibrate(
        artifact, (LOGIT,), data_of(tmp_path, -np.ones((64, 16))), tmp_path, ProbeOptions(threads=1)
    )
    error = profile.site("fc1").error(PER_TENSOR.id)
    assert (error.activation_scale, error.signal.parts) == (1.0, ())
    assert error.relative_error == 0.0
    assert (error.saturated, error.underflowed) == (0, 0)


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

"""What calibration refuses, and how much memory it takes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from small_models import LOGIT, TWO_SITES, W1, artifact_of, data_of

from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.errors import CalibrationError


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
    sys.path[:0] = [sys.argv[1]]
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
    peaks = []
    for batches in (10, 200):
        result = subprocess.run(
            [sys.executable, "-c", MEMORY, str(Path(__file__).parent), str(tmp_path), str(batches)],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout) / 1024)
    # Seen: below 1 MiB. Keeping the rows would cost 25 MiB, keeping every activation more.
    assert peaks[1] - peaks[0] < 6

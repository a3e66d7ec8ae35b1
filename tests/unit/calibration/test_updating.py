"""Rows that are added to a profile, against one calibration of all rows under the same scales."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_models import LOGIT, TWO_SITES, W1, artifact_of, data_of

from loka_onnx.calibration.calibrate import ProbeOptions, ProfiledModel, calibrate, update
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.formats import E4M3FN, E5M2
from loka_onnx.core.recipe import PER_TENSOR, Recipe
from loka_onnx.errors import CalibrationError

SIZE = 128
OPTIONS = ProbeOptions(batch_size=SIZE, threads=1, draws=1, error_precision=None)


def world(folder, name, rows):
    return data_of(folder / name, rows)


@pytest.fixture
def subject(tmp_path):
    return ProfiledModel(artifact_of(tmp_path, TWO_SITES), (LOGIT,))


@pytest.fixture
def rows():
    """The second part reaches four times as far as the first."""
    x = np.random.default_rng(1).standard_normal((10 * SIZE, 16))
    x[6 * SIZE :] *= 4
    return x


def test_parts_add_up_to_all_rows_to_the_last_bit(subject, rows, tmp_path):
    whole = calibrate(subject.model, (LOGIT,), world(tmp_path, "all", rows), tmp_path, OPTIONS)
    parts = [rows[: 4 * SIZE], rows[4 * SIZE : 7 * SIZE], rows[7 * SIZE :]]
    scaled = replace(OPTIONS, scales=whole.scales)
    profile = calibrate(subject.model, (LOGIT,), world(tmp_path, "0", parts[0]), tmp_path, scaled)
    for number, part in enumerate(parts[1:], 1):
        # The size of a batch is that of the profile, whatever is asked for.
        asked = replace(OPTIONS, batch_size=50)
        profile = update(profile, subject, world(tmp_path, str(number), part), tmp_path, asked)
    assert profile.rows == profile.error_rows == profile.sampling.rows == len(rows)
    assert profile.scales == whole.scales and profile.data_digest.count("+") == 2
    assert profile.baseline_loss == whole.baseline_loss
    for found, wanted in zip(profile.sites, whole.sites, strict=True):
        assert (found.operands, found.errors) == (wanted.operands, wanted.errors)
        assert found.sensitivities == wanted.sensitivities


def test_what_reaches_beyond_the_scales_saturates_and_is_counted(subject, rows, tmp_path):
    profile = calibrate(subject.model, (LOGIT,), world(tmp_path, "a", rows[: 6 * SIZE]), tmp_path, OPTIONS)
    assert all(error.saturated == 0 for entry in profile.sites for error in entry.errors)
    more = update(profile, subject, world(tmp_path, "b", rows[6 * SIZE :]), tmp_path, OPTIONS)
    scale = profile.scales[PER_TENSOR.activation_id]["x"]
    assert more.scales == profile.scales
    x = rows.astype(np.float32)
    limit = E4M3FN.max
    assert more.site("fc1").operands["x"].amax == np.abs(x).max() > 2 * limit * scale
    beyond = int((np.abs(x) / np.float32(scale) > limit).sum())
    assert more.site("fc1").error(PER_TENSOR.id).saturated == beyond > 0
    before, after = (p.site("fc1").error(PER_TENSOR.id).relative_error for p in (profile, more))
    assert after > 2 * before


@pytest.fixture
def measured(subject, rows, tmp_path):
    data = world(tmp_path, "a", rows[: 4 * SIZE])
    return calibrate(subject.model, (LOGIT,), data, tmp_path, OPTIONS), data


def test_what_is_of_something_else_is_refused(measured, subject, rows, tmp_path):
    model = ProfiledModel(artifact_of(tmp_path / "other", TWO_SITES, w1=2 * W1), (LOGIT,))
    unlabelled = replace(subject, outputs=(OutputSpec("y", OutputKind.LOGIT, None),))
    other = replace(OPTIONS, recipes=(Recipe.of(E5M2),))
    more = world(tmp_path, "b", rows)
    for asked, options, code in (
        (model, OPTIONS, "E0514"),
        (unlabelled, OPTIONS, "E0516"),
        (subject, other, "E0513"),
    ):
        with pytest.raises(CalibrationError) as caught:
            update(measured[0], asked, more, tmp_path, options)
        assert caught.value.code == code

"""How much of its error an unsafe site may keep follows from the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from planned_models import CTR, kl_of, profile_of, write_model

from loka_onnx.planning.loud import SHARED, errors_to_leave
from loka_onnx.planning.policy import PlanOptions

ALLOWED = CTR.budget / 2
"""KL of all products together."""


def test_unsafe_sites_share_a_part_of_what_is_allowed(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    profile = profile_of(model, {"fc0": kl_of(5 * ALLOWED), "fc2": kl_of(20 * ALLOWED)})
    left = errors_to_leave(model, profile, (CTR,), PlanOptions())
    assert left == pytest.approx({"fc0": SHARED / 2 / 5, "fc2": SHARED / 2 / 20})


def test_the_upper_bound_counts(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    profile = profile_of(model, {"fc0": kl_of(5 * ALLOWED, 0.1 * ALLOWED)})
    (left,) = errors_to_leave(model, profile, (CTR,), PlanOptions()).values()
    assert SHARED / 5.3 < left < SHARED / 5.1


def test_safe_kept_and_thin_sites_are_left_out(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    harm = kl_of(5 * ALLOWED)
    profile = profile_of(model, {"fc0": harm, "thin": harm, "dot": harm})
    assert set(errors_to_leave(model, profile, (CTR,), PlanOptions())) == {"fc0"}
    assert errors_to_leave(model, profile, (CTR,), PlanOptions(keep=("fc0",))) == {}
    assert errors_to_leave(model, profile_of(model, {}), (CTR,), PlanOptions()) == {}

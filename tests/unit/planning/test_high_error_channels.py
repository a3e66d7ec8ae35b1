"""How much of its error a site that does not fit may keep follows from the budget and the rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned_models import CTR, kl_of, profile_of

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT
from loka_onnx.planning.climbing import Goal, affordable_kl
from loka_onnx.planning.high_error_channels import LEAST, MOST, SURE, errors_to_leave
from loka_onnx.planning.policy import PlanOptions

ROWS = {"selection": 100_000, "certification": 100_000}
ALLOWED = affordable_kl(CTR.budget, Goal.of(0, 0.05), ROWS)
"""KL of all products together that certification should pass."""
SAFE = 0.99 * affordable_kl(CTR.budget, replace(Goal.of(0, 0.05), chance=SURE), ROWS)
"""And one that it is all but sure to pass."""


def left_of(model: ModelArtifact, profile: Profile, *keep: str) -> dict[str, float]:
    return errors_to_leave(model, profile, (CTR,), (PER_CHANNEL_WEIGHT,), PlanOptions(keep=keep), ROWS)


def test_sites_that_do_not_fit_share_a_part_of_what_the_others_leave(model):
    kl = {"fc0": kl_of(5 * ALLOWED), "fc1": kl_of(0.2 * ALLOWED), "fc2": kl_of(20 * ALLOWED)}
    left = left_of(model, profile_of(model, kl))
    assert left == pytest.approx({"fc0": 0.8 / 2 / 5, "fc2": 0.8 / 2 / 20})
    # Where little is left, a part of all is shared.
    kl = {"fc0": kl_of(5 * ALLOWED), "fc1": kl_of(SAFE)}
    room = max(LEAST, 1.0 - SAFE / ALLOWED)
    assert left_of(model, profile_of(model, kl)) == pytest.approx({"fc0": room / 5})
    # A site that would only just pass is cut down.
    profile = profile_of(model, {"fc0": kl_of(SAFE), "fc1": kl_of(0.98 * ALLOWED - SAFE)})
    assert list(left_of(model, profile).values()) == [MOST]


def test_fitting_kept_and_thin_sites_are_left_out(model: ModelArtifact) -> None:
    harm = kl_of(5 * ALLOWED)
    profile = profile_of(model, {"fc0": harm, "thin": harm, "dot": harm})
    assert set(left_of(model, profile)) == {"fc0"}
    assert left_of(model, profile, "fc0") == {}
    assert left_of(model, profile_of(model, {})) == {}

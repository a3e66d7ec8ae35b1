"""What is within: the budget, the guards beside it, and the units that intervals rest on."""

from dataclasses import replace

import numpy as np
import pytest
from judged_rows import LOGIT, kl_of, losses, one, sample, sigmoid

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.evaluation import Because, BudgetStatus
from loka_onnx.errors import ConfigError
from loka_onnx.evaluation.columns import Groups

BUDGET = 2e-4


def logits(rows=4000, noise=0.05):
    return sample(rows, noise, seed=0)


def lucky(rows=20_000):
    """Large noise whose labelled part happens to help: each change goes to the side of the label."""
    z, z_prime, y = logits(rows, noise=0.3)
    towards = np.where(y == 1, 1.0, -1.0) * np.abs(z_prime - z)
    share = np.random.default_rng(1).random(rows) < 0.6
    return z, np.where(share, z + towards, z_prime), y


def test_a_lucky_labelled_part_does_not_hide_large_changes():
    z, z_prime, y = lucky()
    found = one(z, z_prime, {"clicked": y}, replace(LOGIT, budget=BUDGET))
    assert found.difference.delta_ne.upper < 0
    assert found.difference.kl.lower > 5 * BUDGET
    assert found.budget_status == BudgetStatus.BEYOND
    assert found.because == (Because.MAX_KL,)
    assert found.verdict == "beyond: max_kl"
    assert found.upper == pytest.approx(found.difference.kl.upper / (5 * BUDGET))
    assert any("max_kl" in remark for remark in found.remarks)
    accepted = replace(LOGIT, budget=BUDGET, max_kl=1.0)
    assert one(z, z_prime, {"clicked": y}, accepted).budget_status == BudgetStatus.WITHIN


@pytest.mark.parametrize("kind", [OutputKind.LOGIT, OutputKind.PROBABILITY])
@pytest.mark.parametrize("label", ["clicked", None])
def test_the_upper_end_of_kl_is_held_against_its_limit(kind, label):
    z, z_prime, y = logits()
    if kind is OutputKind.PROBABILITY:
        z, z_prime = sigmoid(z), sigmoid(z_prime)
    kl = one(z, z_prime, {"clicked": y}, OutputSpec("p", kind, label)).difference.kl
    for limit, status in (
        (kl.upper * 1.001, BudgetStatus.WITHIN),
        (kl.upper * 0.999, BudgetStatus.UNDECIDED),
        (kl.lower * 0.999, BudgetStatus.BEYOND),
    ):
        found = one(z, z_prime, {"clicked": y}, OutputSpec("p", kind, label, budget=1.0, max_kl=limit))
        assert found.budget_status == found.guards[0].status == status
        assert (found.rows_to_decide is not None) == (status == BudgetStatus.UNDECIDED)


def test_the_decrease_of_auc_is_held_against_its_limit_and_warned_of():
    z, _, y = logits(20_000)
    z_prime = z + 0.4 * np.random.default_rng(3).normal(size=z.size)
    free = replace(LOGIT, budget=1.0, max_kl=1.0)
    found = one(z, z_prime, {"clicked": y}, free)
    change = found.difference.delta_auc
    assert change.upper < -1e-4
    assert found.budget_status == BudgetStatus.WITHIN
    assert any("AUC falls" in remark for remark in found.remarks)
    for limit, status in (
        (-change.lower * 1.001, BudgetStatus.WITHIN),
        (-change.lower * 0.999, BudgetStatus.UNDECIDED),
        (-change.upper * 0.999, BudgetStatus.BEYOND),
    ):
        spec = replace(LOGIT, budget=1.0, max_kl=1.0, max_auc_drop=limit)
        held = one(z, z_prime, {"clicked": y}, spec)
        assert held.budget_status == status
        assert held.because == (() if status == BudgetStatus.WITHIN else (Because.MAX_AUC_DROP,))
    assert not one(z, z.copy(), {"clicked": y}, free).remarks


def test_without_an_auc_its_limit_cannot_be_held():
    z, z_prime, _ = logits(400, noise=1e-4)
    spec = replace(LOGIT, budget=1.0, max_kl=1.0, max_auc_drop=0.5)
    found = one(z, z_prime, {"clicked": np.zeros(400)}, spec)
    assert (found.budget_status, found.because) == (BudgetStatus.UNDECIDED, (Because.MAX_AUC_DROP,))
    assert found.rows_to_decide is None


@pytest.mark.parametrize("limit", ["max_kl", "max_auc_drop"])
def test_a_regression_has_no_guards(limit):
    with pytest.raises(ConfigError):
        OutputSpec("spend", OutputKind.REGRESSION, "clicked", **{limit: 0.1})
    z, z_prime, y = logits(400, noise=1e-4)
    assert one(z, z_prime, {"clicked": y}, OutputSpec("s", OutputKind.REGRESSION, "clicked")).guards == ()


@pytest.mark.parametrize("noise", [1e-6, 3.0])
@pytest.mark.parametrize("is_grouped", [True, False])
def test_below_a_hundred_units_nothing_is_decided(noise, is_grouped):
    for units, is_open in ((99, True), (100, False)):
        z, z_prime, y = logits(units * (20 if is_grouped else 1), noise)
        users = np.arange(z.size) % units if is_grouped else None
        found = one(z, z_prime, {"clicked": y}, LOGIT, users)
        assert found.basis.units == units
        assert (Because.FEW_UNITS in found.because) == is_open
        assert found.remarks
        if is_open:
            assert found.budget_status == BudgetStatus.UNDECIDED
    assert (found.budget_status == BudgetStatus.WITHIN) == (noise < 1)


def test_up_to_a_thousand_units_carry_a_warning_and_a_unit_without_weight_is_none():
    z, z_prime, y = logits(3000, 1e-6)
    for units, is_warned in ((999, True), (1000, False)):
        found = one(z, z_prime, {"clicked": y}, LOGIT, np.arange(3000) % units)
        assert found.budget_status == BudgetStatus.WITHIN
        assert bool(found.remarks) == is_warned
    w = (np.arange(3000) < 99).astype(float)
    found = one(z, z_prime, {"clicked": y, "w": w}, replace(LOGIT, weight="w"))
    assert (found.basis.units, found.budget_status) == (99, BudgetStatus.UNDECIDED)


def test_a_group_with_a_tenth_of_the_rows_is_named():
    z, z_prime, y = logits(20_000, 1e-6)
    spec = LOGIT
    users = np.arange(20_000) % 2000
    assert not one(z, z_prime, {"clicked": y}, spec, users).remarks
    users[:2200] = 17
    found = one(z, z_prime, {"clicked": y}, spec, users)
    assert (found.basis.largest, found.basis.largest_share) == ("user 17", pytest.approx(0.11, abs=0.01))
    assert any("user 17" in remark for remark in found.remarks)


@pytest.mark.parametrize(
    "users",
    [
        np.array([7, None, 7, None, 8], dtype=object),
        np.array([7, np.nan, 7, np.nan, 8]),
        np.array(["7", "", "7", "", "8"]),
        np.array(["2026-01-01", "NaT", "2026-01-01", "NaT", "2026-01-02"], dtype="datetime64[D]"),
    ],
)
def test_rows_without_a_group_are_groups_of_their_own(users):
    found = Groups.of("user", users)
    assert found.ids.tolist() == [0, 2, 0, 3, 1]
    assert [found.name(group).split()[0] for group in range(4)] == ["user"] * 4
    assert found.name(2) == found.name(3) == "user null"


def test_heavy_tails_take_wider_intervals_and_say_so():
    z, z_prime, y = logits(20_000, noise=0.02)
    spec = replace(LOGIT, budget=0.01)
    light = one(z, z_prime, {"clicked": y}, spec)
    assert not light.basis.is_heavy and not light.remarks
    z_prime[::1000] += 0.6
    heavy = one(z, z_prime, {"clicked": y}, spec)
    assert heavy.basis.is_heavy and heavy.basis.top_share > 0.3
    assert any("tail" in remark for remark in heavy.remarks)
    kl, loss = kl_of(z, z_prime), losses(z, y)
    influence = (kl - kl.mean() / loss.mean() * loss) / loss.sum()
    log = np.log(80.0)
    half = np.sqrt(2 * log * np.var(influence * z.size, ddof=1) / z.size)
    half += 7 / 3 * log / (z.size - 1) * np.abs(influence * z.size).max()
    assert heavy.difference.kl.upper == pytest.approx(kl.mean() / loss.mean() + half, rel=1e-6)
    assert heavy.budget_status == BudgetStatus.WITHIN
    # So small a KL is within whatever its tail is.
    assert not one(z, z_prime, {"clicked": y}, replace(LOGIT, budget=1.0)).remarks


def test_an_engine_that_changes_nothing_has_no_tail():
    z, _, y = logits(400)
    found = one(z, z.copy(), {"clicked": y}, replace(LOGIT, budget=0.1))
    assert (found.basis.is_heavy, found.basis.top_share) == (False, 0.0)
    assert found.difference.kl.upper == 0.0
    few = z.copy()
    few[:3] += 0.1
    assert one(z, few, {"clicked": y}, LOGIT).basis.is_heavy

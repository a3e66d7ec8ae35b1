"""What sites cost: intervals, other draws of rounding noise, and sites that share a tensor."""

from __future__ import annotations

from math import inf, nan, sqrt

import numpy as np
import pytest
from planned_models import CTR, CVR, UNITS, bare_profile, group, kl_of
from scipy import stats

from loka_onnx.core.intervals import anytime_quantile
from loka_onnx.core.profile import Draws, Sampling
from loka_onnx.errors import PlanningError
from loka_onnx.planning.costs import LABELLED_ALLOWANCE, Cost, Costs, allowed_kl

MEASURED = {"a": {"ctr": kl_of(4e-5, 1e-6)}, "b": {"ctr": kl_of(9e-5, 2e-6)}}
A, BOTH = frozenset("a"), frozenset("ab")


def cost_of(sites: frozenset[str], risk: float = 0.05, **profile: object) -> Cost:
    (cost,) = Costs(bare_profile(MEASURED, **profile), (CTR,)).of(sites, risk)  # type: ignore[arg-type]
    return cost


@pytest.mark.parametrize("risk", [0.05, 0.05 / 40, 1e-7])
def test_the_interval_fails_with_the_risk_on_either_side_together(risk: float) -> None:
    kl = cost_of(A, risk).kl
    half = stats.t.isf(risk / 2, UNITS - 1) * 1e-6
    assert (kl.value, kl.lower, kl.upper) == pytest.approx((4e-5, 4e-5 - half, 4e-5 + half))


def test_rows_that_were_added_until_verdicts_were_reached_widen_it() -> None:
    kl = cost_of(A, 0.01, sampling=Sampling(UNITS, 7, 5000)).kl
    half = anytime_quantile(UNITS, 5000, 0.99) * 1e-6
    assert half > 1.2 * stats.norm.isf(0.005) * 1e-6
    assert (kl.lower, kl.upper) == pytest.approx((4e-5 - half, 4e-5 + half))


def test_the_worst_draw_scales_value_and_bounds() -> None:
    plain = cost_of(A)
    grown = cost_of(A, draws=Draws(4, 3e-5, 6e-5, 1.5))
    assert (grown.kl.value, grown.kl.lower, grown.kl.upper) == pytest.approx(
        (1.5 * 4e-5, 1.5 * plain.kl.lower, 1.5 * plain.kl.upper)
    )
    assert (plain.draws, grown.draws) == (0, 4)


def test_draws_that_are_all_better_do_not_make_a_site_cheaper() -> None:
    assert cost_of(A, draws=Draws(4, 3e-5, 4e-5, 1.0)) == cost_of(A)
    assert cost_of(A, draws=Draws(4, 3e-5, 4e-5, 0.7)) == cost_of(A)


def test_sites_that_were_measured_together_cost_what_was_measured() -> None:
    together = group("x", "ab", {"ctr": kl_of(1.1e-4, 1e-6)})
    cost = cost_of(BOTH, groups=(together,))
    assert cost.kl.value == pytest.approx(1.1e-4) and not cost.is_bound


def test_sites_that_were_not_are_bounded_by_what_each_costs_alone() -> None:
    cost, alone = cost_of(BOTH, 0.01), [cost_of(frozenset(name), 0.01).kl for name in "ab"]
    assert cost.is_bound
    assert cost.kl.value == pytest.approx((sqrt(4e-5) + sqrt(9e-5)) ** 2)
    assert cost.kl.upper == pytest.approx(sum(sqrt(kl.upper) for kl in alone) ** 2)
    assert cost.kl.lower == pytest.approx(sum(sqrt(kl.lower) for kl in alone) ** 2)


@pytest.mark.parametrize("correlation", [-1.0, -0.3, 0.0, 0.5, 1.0])
def test_the_bound_holds_for_any_correlation_of_the_errors(correlation: float) -> None:
    """Measured KL of joint logit changes of 100,000 rows, in float64."""
    random = np.random.default_rng(3)
    p = random.beta(1, 4, 100_000)
    first, other = random.normal(size=(2, p.size)) * [[0.02], [0.03]]
    second = correlation * 1.5 * first + sqrt(1 - correlation**2) * other
    logit = np.log(p / (1 - p))

    def kl(delta: np.ndarray) -> float:
        moved = 1 / (1 + np.exp(-logit - delta))
        return float(np.mean(p * np.log(p / moved) + (1 - p) * np.log((1 - p) / (1 - moved))))

    bound = (sqrt(kl(first)) + sqrt(kl(second))) ** 2
    # To first order only: where both are the same error the bound is met, up to third order in δ.
    assert kl(first + second) <= bound * 1.001
    if correlation == 1.0:
        assert kl(first + second) >= bound * 0.999
    if correlation >= 0.0:
        assert kl(first + second) >= (kl(first) + kl(second)) * 0.99


@pytest.mark.parametrize(("change", "times"), [(2.0, 2.70), (0.03, 1.01)])
def test_the_bound_holds_to_first_order_only(change: float, times: float) -> None:
    """The numbers of the docstring and of docs/concepts/loss-change.md, at p = .002."""
    p = 0.002

    def kl(delta: float) -> float:
        moved = 1 / (1 + np.exp(-np.log(p / (1 - p)) - delta))
        return float(p * np.log(p / moved) + (1 - p) * np.log((1 - p) / (1 - moved)))

    assert kl(2 * change) / (2 * sqrt(kl(change))) ** 2 == pytest.approx(times, abs=0.005)


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(PlanningError, match="nothing of site 'z' and output 'ctr'"):
        cost_of(frozenset("z"))
    profile = bare_profile(MEASURED, (group("x", "ab", {"cvr": kl_of(0.0)}),))
    with pytest.raises(PlanningError, match="nothing of the sites 'a', 'b' together and output 'ctr'"):
        Costs(profile, (CTR,)).of(BOTH, 0.05)
    with pytest.raises(PlanningError, match="site 'a' and output 'cvr'"):
        Costs(profile, (CVR,)).of(A, 0.05)


@pytest.mark.parametrize(
    ("value", "error", "units", "most", "least"),
    [
        (0.0, 0.0, UNITS, 0.0, 0.0),
        (5e-4, 0.0, UNITS, 1.0, 1.0),
        (1e-3, 1e-5, UNITS, 2.0392, 1.9608),
        (1e-6, 4e-7, UNITS, 0.003568, 0.000432),
        (1e-6, 1e-5, UNITS, 0.0412, 0.0),  # a KL is not negative
        (1e-9, 0.0, 7, inf, 0.0),  # too few units for an interval
    ],
)
def test_ends_as_parts_of_the_budget_less_the_allowance(
    value: float, error: float, units: int, most: float, least: float
) -> None:
    assert allowed_kl(CTR) == CTR.budget * (1 - LABELLED_ALLOWANCE) == 5e-4
    (cost,) = Costs(bare_profile({"a": {"ctr": kl_of(value, error, units)}}), (CTR,)).of(A, 0.05)
    assert (cost.most, cost.least) == pytest.approx((most, least), rel=1e-4)


def test_of_a_kl_that_is_not_a_number_nothing_is_known() -> None:
    for growth in (nan, inf):
        profile = bare_profile({"a": {"ctr": kl_of(0.0)}}, draws=Draws(4, 0.0, 1.0, growth))
        (cost,) = Costs(profile, (CTR,)).of(A, 0.05)
        assert (cost.most, cost.least) == (inf, 0.0)

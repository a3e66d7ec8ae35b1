"""What sites cost: intervals, other draws of rounding noise, and sites that share a tensor."""

from __future__ import annotations

from math import inf, nan, sqrt
from pathlib import Path

import numpy as np
import pytest
from planned_models import CTR, CVR, UNITS, bare_profile, graph_of, group, kl_of
from scipy import stats

from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.intervals import anytime_quantile
from loka_onnx.core.profile import Draws, Sampling
from loka_onnx.errors import PlanningError
from loka_onnx.graph.sites import find_sites
from loka_onnx.planning.costs import LABELLED_ALLOWANCE, Cost, Costs, allowed_kl, useful_flops

MEASURED = {"a": {"ctr": kl_of(4e-5, 1e-6)}, "b": {"ctr": kl_of(9e-5, 2e-6)}}
A, BOTH = frozenset("a"), frozenset("ab")


def cost_of(sites: frozenset[str], risk: float = 0.05, **profile: object) -> Cost:
    (cost,) = Costs(bare_profile(MEASURED, **profile), (CTR,)).of(sites, risk)  # type: ignore[arg-type]
    return cost


def test_the_interval_fails_with_the_risk_and_is_wider_where_rows_were_added_until_verdicts_were_reached():
    for risk in (0.05, 0.05 / 40, 1e-7):
        kl = cost_of(A, risk).kl
        half = stats.t.isf(risk / 2, UNITS - 1) * 1e-6
        assert (kl.value, kl.lower, kl.upper) == pytest.approx((4e-5, 4e-5 - half, 4e-5 + half))
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
    # Draws that are all better do not make a site cheaper.
    assert cost_of(A, draws=Draws(4, 3e-5, 4e-5, 1.0)) == cost_of(A, draws=Draws(4, 3e-5, 4e-5, 0.7)) == plain


def test_sites_that_were_measured_together_cost_that_and_others_are_bounded_by_what_each_costs_alone():
    together = group("x", "ab", {"ctr": kl_of(1.1e-4, 1e-6)})
    cost = cost_of(BOTH, groups=(together,))
    assert cost.kl.value == pytest.approx(1.1e-4) and not cost.is_bound
    cost, alone = cost_of(BOTH, 0.01), [cost_of(frozenset(name), 0.01).kl for name in "ab"]
    assert cost.is_bound
    assert cost.kl.value == pytest.approx((sqrt(4e-5) + sqrt(9e-5)) ** 2)
    assert cost.kl.upper == pytest.approx(sum(sqrt(kl.upper) for kl in alone) ** 2)
    assert cost.kl.lower == pytest.approx(sum(sqrt(kl.lower) for kl in alone) ** 2)


@pytest.mark.parametrize(("change", "times"), [(2.0, 2.70), (0.03, 1.01)])
def test_the_bound_holds_to_first_order_only(change: float, times: float) -> None:
    """The numbers of the docstring and of docs/concepts/loss-change.md, at p = .002."""
    p = 0.002

    def kl(delta: float) -> float:
        moved = 1 / (1 + np.exp(-np.log(p / (1 - p)) - delta))
        return float(p * np.log(p / moved) + (1 - p) * np.log((1 - p) / (1 - moved)))

    assert kl(2 * change) / (2 * sqrt(kl(change))) ** 2 == pytest.approx(times, abs=0.005)


@pytest.mark.parametrize(("sites", "spec"), [(frozenset("z"), CTR), (BOTH, CTR), (A, CVR)])
def test_what_was_not_measured_is_refused(sites: frozenset[str], spec: OutputSpec) -> None:
    profile = bare_profile(MEASURED, (group("x", "ab", {"cvr": kl_of(0.0)}),))
    with pytest.raises(PlanningError) as caught:
        Costs(profile, (spec,)).of(sites, 0.05)
    assert caught.value.code == "E0704"
    assert all(f"'{name}'" in caught.value.what for name in (*sites, spec.name))


@pytest.mark.parametrize(
    ("value", "error", "units", "growth", "most", "least"),
    [
        (0.0, 0.0, UNITS, None, 0.0, 0.0),
        (5e-4, 0.0, UNITS, None, 1.0, 1.0),
        (1e-3, 1e-5, UNITS, None, 2.0392, 1.9608),
        (1e-6, 4e-7, UNITS, None, 0.003568, 0.000432),
        (1e-6, 1e-5, UNITS, None, 0.0412, 0.0),  # a KL is not negative
        (1e-9, 0.0, 7, None, inf, 0.0),  # too few units for an interval
        (0.0, 0.0, UNITS, nan, inf, 0.0),  # of a KL that is not a number nothing is known
        (0.0, 0.0, UNITS, inf, inf, 0.0),
    ],
)
def test_ends_as_parts_of_the_budget_less_the_allowance(value, error, units, growth, most, least):
    assert allowed_kl(CTR) == CTR.budget * (1 - LABELLED_ALLOWANCE) == 5e-4
    draws = None if growth is None else Draws(4, 0.0, 1.0, growth)
    profile = bare_profile({"a": {"ctr": kl_of(value, error, units)}}, draws=draws)
    (cost,) = Costs(profile, (CTR,)).of(A, 0.05)
    assert (cost.most, cost.least) == pytest.approx((most, least), rel=1e-4)


def test_rows_and_columns_of_zeros_are_no_arithmetic_of_the_model(tmp_path: Path) -> None:
    text = """(float[batch,32] x, float[batch,2,32] z) => (float[batch,48] y, float[batch,2,48] u) {
        [fc] y = Gemm<transB=1>(x, wt) [towers] u = MatMul(z, w)
    }"""
    w = np.ones((32, 48), np.float32)
    for zeros, used in (
        ((), 32 * 48),
        ((5, 7), 32 * 48),
        (slice(16, None), 16 * 48),
        (np.s_[:, 40:], 16 * 40),
    ):
        w[zeros] = 0 if zeros != () else 1
        graph = graph_of(tmp_path / "m.onnx", text, {"w": w, "wt": np.ascontiguousarray(w.T)})
        found = {site.name: useful_flops(graph, site) for site in find_sites(graph)}
        assert found == {"fc": 2 * used, "towers": 2 * 2 * used}

"""Holm's step-down against the textbook, and the bounds that it leaves."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.planning.judging import step_down


def textbook(p_values: dict[str, float], alpha: float) -> set[str]:
    """Holm (1979): in the order of the p-values, reject until one is above α/(n − i)."""
    rejected: set[str] = set()
    for position, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        if p_values[name] > alpha / (len(p_values) - position):
            break
        rejected.add(name)
    return rejected


p_maps = st.dictionaries(
    st.text("abcdefghij", min_size=1, max_size=2), st.floats(0.0, 1.0) | st.floats(0.0, 0.02), max_size=12
)


@given(p_maps, st.floats(1e-4, 0.5))
def test_the_claims_that_are_shown_are_those_of_the_textbook(
    p_values: dict[str, float], alpha: float
) -> None:
    found = step_down(p_values, alpha, lambda name, risk: p_values[name] <= risk)
    assert set(found.shown) == textbook(p_values, alpha)
    left = len(p_values) - len(found.shown)
    if left:
        assert found.risk == pytest.approx(alpha / left)
    assert all(p_values[name] <= risk <= alpha for name, risk in found.shown.items())


def test_a_step_that_shows_several_does_not_skip_a_level() -> None:
    """α/4, then α/2 for what is left, which shows one more, and α for the last, which it does not."""
    p_values = {"a": 0.01, "b": 0.0125, "c": 0.025, "d": 0.06}
    found = step_down(p_values, 0.05, lambda name, risk: p_values[name] <= risk)
    assert found.shown == {"a": 0.0125, "b": 0.0125, "c": 0.025}
    assert found.risk == 0.05


def test_no_claims() -> None:
    assert step_down([], 0.05, lambda name, risk: True).shown == {}


@pytest.mark.parametrize("truth", [(1.0, 1.0, 1.0, 1.0), (1.05, 0.2, 1.3, 0.2), (1.02, 0.1, 0.1, 0.1)])
def test_all_bounds_hold_at_once(truth: tuple[float, ...]) -> None:
    """Estimates with a normal error of .2 around θ, limits at 1: in no more than α of 20,000 experiments is
    any θ above the bound that is left for it."""
    theta, error, alpha, repeats = np.array(truth), 0.2, 0.1, 20_000
    draws = np.random.default_rng(7).normal(theta, error, size=(repeats, len(truth)))
    names, missed, gained, quantile = range(len(truth)), 0, 0, NormalDist().inv_cdf
    for estimates in draws:

        def upper(name: int, risk: float, estimates: np.ndarray = estimates) -> float:
            return float(estimates[name] + error * quantile(1.0 - risk))

        found = step_down(names, alpha, lambda name, risk: upper(name, risk) <= 1.0)
        bounds = [1.0 if name in found.shown else upper(name, found.risk) for name in names]
        missed += bool((theta > bounds).any())
        gained += found.risk > alpha / len(truth)
    assert missed / repeats <= alpha + 3.0 * (alpha * (1 - alpha) / repeats) ** 0.5
    # Otherwise the step-down would have handed on nothing, and Bonferroni's bounds would pass as well.
    if min(truth) < 0.5:
        assert gained > repeats / 2

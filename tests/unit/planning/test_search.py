"""The search for the sites that save the most time inside the budget."""

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_onnx.planning import search
from loka_onnx.planning.search import Item, Problem, Sites, neighbours


def subsets(sites: Sites) -> Iterator[Sites]:
    names = sorted(sites)
    return (frozenset(c) for size in range(len(names) + 1) for c in combinations(names, size))


def solve(problem: Problem, fixed: Mapping[str, bool] | None = None) -> Sites | None:
    found = search.search(problem, fixed)
    return None if found is None else found.sites


def best_value(problem: Problem, fixed: Mapping[str, bool]) -> float | None:
    """By trying every subset; None where none fits."""
    values = [
        problem.value(chosen)
        for chosen in subsets(frozenset(problem.by_site))
        if all((site in chosen) is is_in for site, is_in in fixed.items()) and problem.fits(chosen)
    ]
    return max(values, default=None)


def cost_of(alone: Mapping[str, float], together: Mapping[Sites, float]) -> Callable[[Sites], float]:
    """Of units that were measured, and (Σ√c)² of the others, as in `costs`."""
    return lambda part: together.get(part, sum(sqrt(alone[site]) for site in part) ** 2)


def problem_of(
    saved, alone=None, *, tensors=None, quantize=None, units=None, together=None, errors=None, makers=None
):
    named = tensors or {}
    return Problem(
        tuple(
            Item(site, us, (errors or {}).get(site, 0.0), named.get(site, site)) for site, us in saved.items()
        ),
        quantize or {},
        units or tuple(frozenset({site}) for site in saved),
        cost_of(alone or dict.fromkeys(saved, 0.0), together or {}),
        makers=makers or {},
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to 10 sites that share tensors, in units that need not be those of the tensors."""
    count = draw(st.integers(1, 10))
    sites = [f"s{number}" for number in range(count)]
    saved = {site: draw(st.integers(-50, 100)) / 10 for site in sites}
    alone = {site: draw(st.integers(0, 700)) / 1000 for site in sites}
    tensors = {site: f"t{draw(st.integers(0, 4))}" for site in sites}
    quantize = {tensor: draw(st.integers(0, 100)) / 10 for tensor in sorted({*tensors.values()})}
    unit_of = {site: draw(st.integers(0, 6)) for site in sites}
    units = tuple(
        frozenset(site for site in sites if unit_of[site] == unit) for unit in sorted({*unit_of.values()})
    )
    # Below the sum of each alone, above it, or beyond the budget.
    together = {unit: draw(st.integers(0, 1200)) / 1000 for unit in units if len(unit) > 1}
    makers = {}
    for tensor in quantize:
        others = [site for site in sites if tensors[site] != tensor]
        if others and draw(st.booleans()):
            makers[tensor] = draw(st.sampled_from(others))
    return problem_of(
        saved, alone, tensors=tensors, quantize=quantize, units=units, together=together, makers=makers
    )


@settings(max_examples=40, deadline=None)
@given(problems(), st.data())
def test_nothing_inside_the_budget_saves_more(problem, data):
    fixed = data.draw(st.dictionaries(st.sampled_from(sorted(problem.by_site)), st.booleans(), max_size=2))
    found, best = solve(problem, fixed), best_value(problem, fixed)
    assert (found is None) is (best is None)
    if found is None:
        return
    assert problem.fits(found)
    assert all((site in found) is is_in for site, is_in in fixed.items())
    assert problem.value(found) == pytest.approx(best, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_large_units_stay_inside_the_budget_and_near_the_best(problem):
    """With one variable for each site of a unit, as for units of more than `LARGEST_UNIT`."""
    largest, search.LARGEST_UNIT = search.LARGEST_UNIT, 1
    try:
        found = solve(problem)
    finally:
        search.LARGEST_UNIT = largest
    assert problem.fits(found)
    best = best_value(problem, {})
    assert problem.value(found) <= best + 1e-9


def test_a_large_unit_is_taken_whole_and_forced_sites_that_do_not_fit_have_no_solution():
    sites = [f"s{number}" for number in range(search.LARGEST_UNIT + 2)]
    unit = frozenset(sites)
    alone, saved = dict.fromkeys(sites, 0.05), dict.fromkeys(sites, 1.0)
    whole = problem_of(saved, alone, units=(unit,), together={unit: 0.9})
    assert solve(whole) == unit
    # Each alone costs .05; of n together no more is known than n²·.05, and by the linear bound n·10·.05.
    dear = problem_of(saved, alone, units=(unit,), together={unit: 1.1})
    found = solve(dear)
    assert len(found) == 2
    problem = problem_of({"a": 1.0, "b": 1.0}, {"a": 1.5, "b": 0.1})
    assert solve(problem, {"a": True}) is None
    assert solve(problem, {"a": False}) == {"b"}


def hard() -> Problem:
    """Sixty sites of which each costs a little over what it saves: a bound alone proves nothing."""
    saved = {f"s{number}": 1.0 + (37 * number % 61) / 1000 for number in range(60)}
    return problem_of(
        saved, {site: us / 7.5 + (17 * n % 13) / 3e4 for n, (site, us) in enumerate(saved.items())}
    )


def test_a_search_that_is_cut_short_says_so(monkeypatch):
    easy = problem_of({"a": 1.0, "b": -1.0})
    assert search.search(easy) == search.Solution(frozenset({"a"}), is_proven=True)
    monkeypatch.setattr(search, "SECONDS", 0.0)
    found = search.search(hard())
    assert not found.is_proven
    assert hard().fits(found.sites)
    forced = search.search(hard(), {"s0": True})
    assert "s0" in forced.sites and not forced.is_proven


def test_uncertain_tensors_are_toggled_first_then_what_saves_most():
    saved = {"sure": 10.0, "maybe_in": 1.0, "maybe_out": -1.0, "never": -50.0}
    errors = {"sure": 1.0, "maybe_in": 2.0, "maybe_out": 3.0, "never": 1.0}
    problem = problem_of(saved, errors=errors)
    chosen = solve(problem)
    assert chosen == {"sure", "maybe_in"}
    assert neighbours(problem, chosen, 9) == ({"sure", "maybe_in", "maybe_out"}, {"sure"}, {"maybe_in"})


def test_neighbours_use_the_room_keep_what_is_fixed_and_toggle_sites_of_one_tensor_together():
    problem = problem_of({"a": 10.0, "b": 4.0, "c": 4.0}, {"a": 0.9, "b": 0.5, "c": 0.5})
    assert solve(problem) == {"a"}
    assert neighbours(problem, frozenset({"a"}), 1) == ({"b", "c"},)
    problem = problem_of({"a": 3.0, "b": 2.0, "c": 1.0}, {"a": 0.5, "b": 0.5, "c": 0.6})
    assert neighbours(problem, frozenset({"a", "b"}), 5, {"a": True}) == ({"a"},)
    problem = problem_of({"a": 3.0, "b": 1.0, "c": 2.0}, tensors={"a": "x", "b": "x", "c": "y"})
    assert neighbours(problem, frozenset("abc"), 5) == ({"c"}, {"a", "b"})

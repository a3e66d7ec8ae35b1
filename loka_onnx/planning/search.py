"""Search the sites that save the most time inside the accuracy budget: plans `fp8-fast`, `int8-fast`.

Each site saves the time of its product; each quantized tensor costs its quantize step once, whoever reads it,
or nothing where the kernel in front of it quantizes as well:

    value(S) = Σ_{i ∈ S} saved(i) − Σ_{t read by S} quantize(t),

where a tensor that a site of S makes costs nothing: a product in FP8 ends with the Q of the next one (a
chain).

The cost of S is added over units (sites that share a quantized tensor were measured together; `costs`), and
is a function of the whole subset within one. With a 0/1 variable z for each non-empty subset of each unit,
and y ≥ Σ z of each site that reads a tensor (less Σ z of the site that makes it),

    maximize Σ z·saved − Σ y·quantize   subject to   Σ z·cost ≤ room,   Σ_{z of one unit} ≤ 1,

which HiGHS solves exactly (`scipy.optimize.milp`, gap 0), or as far as it gets in `SECONDS`: `Solution` says
which. A unit of more than `LARGEST_UNIT` sites has a variable for each site and one for all of them: (Σ√c)² ≤
|S|·Σc (Cauchy, Schwarz) bounds the cost of a part.

Costs are upper ends that hold simultaneously (Bonferroni: one bound for each measured unit and, in units of
several sites, for each site and output), on the output where the cost is largest. So the chance that the
chosen sites exceed the allowance is at most half of the risk, and the search may see all bounds first. Sites
that do not pay spend nothing, so a site beyond its share in `fp8-safe` may be chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations
from math import fsum, sqrt

import numpy as np
import scipy

from loka_onnx.core.plan import SpeedVerdict
from loka_onnx.errors import InternalError
from loka_onnx.planning.costs import Costs
from loka_onnx.planning.judging import percent, units_of
from loka_onnx.planning.site_speed import SiteSpeeds

Sites = frozenset[str]
CostOf = Callable[[Sites], float]

LARGEST_UNIT = 8
"""Sites of a unit up to which each of its subsets has a variable: 255 of them."""
REFINEMENTS = 4
"""Plans beside a fast one that are worth building and timing."""
SECONDS = 30.0
"""Time limit of one search; what was found by then stands."""
_LIMIT_REACHED = 1
"""Status of `scipy.optimize.milp`: it ran into its time limit."""
_ROUNDING = 1e-12
"""By how much sums of parts may exceed the room, relative to it."""
_VALUE_SCALE = 1e4
"""Largest saving as the solver sees it: it stops 1e-6 short of the optimum, in its own units."""


@dataclass(frozen=True)
class Item:
    """A site that may run in FP8, the tensor it reads, and time `saved` (negative if slower, any unit)."""

    site: str
    saved: float
    error: float
    tensor: str


@dataclass(frozen=True)
class Problem:
    """Items to choose from, and their costs: `cost` of each part of a unit, `room` for all.

    `quantize` is the time of each tensor's quantize step, 0 if missing. `units` are sites whose cost is known
    together; each site is in one. `makers` are sites that make a tensor, and quantize it if they run in FP8.
    """

    items: tuple[Item, ...]
    quantize: Mapping[str, float]
    units: tuple[Sites, ...]
    cost: CostOf
    room: float = 1.0
    makers: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_site(self) -> Mapping[str, Item]:
        """The items by name."""
        return {item.site: item for item in self.items}

    @cached_property
    def readers(self) -> Mapping[str, Sites]:
        """Sites by the tensor that they read."""
        tensors = dict.fromkeys(item.tensor for item in self.items)
        return {t: frozenset(item.site for item in self.items if item.tensor == t) for t in tensors}

    def value(self, chosen: Sites) -> float:
        """Return the time saved, quantize steps counted once for each tensor."""
        saved = [self.by_site[site].saved for site in chosen]
        tensors = {self.by_site[site].tensor for site in chosen}
        return fsum([*saved, *(-self.paid(tensor, chosen) for tensor in tensors)])

    def paid(self, tensor: str, chosen: Sites) -> float:
        """Return the time of the quantize step of a tensor that some of the chosen sites read."""
        return 0.0 if self.makers.get(tensor) in chosen else self.quantize.get(tensor, 0.0)

    def spent(self, chosen: Sites) -> float:
        """Return the part of the budget."""
        return fsum(self.cost(unit & chosen) for unit in self.units if unit & chosen)

    def fits(self, chosen: Sites) -> bool:
        """True if the choice is inside the budget."""
        return self.spent(chosen) <= self.room * (1.0 + _ROUNDING)


@dataclass(frozen=True)
class Solution:
    """The sites in FP8; `is_proven` unless `SECONDS` ended the search."""

    sites: Sites
    is_proven: bool = True


def search(problem: Problem, fixed: Mapping[str, bool] | None = None) -> Solution | None:
    """Return the sites that save the most time inside the budget, as far as `SECONDS` go.

    `fixed` sites are in (True) or out (False) whatever they save. None where the sites fixed to be in do not
    fit. No other site is in without saving time.
    """
    fixed = fixed or {}
    columns = _columns(problem)
    room = problem.room
    # The solver tolerates 1e-6 in a constraint: narrow the room where that exceeds the budget.
    for _ in range(8):
        solution = _solve_once(problem, columns, fixed, room)
        if solution is None or problem.fits(solution.sites):
            return solution and replace(solution, sites=_without_idle(problem, solution.sites, fixed))
        room -= 2.0 * (problem.spent(solution.sites) - problem.room)
    raise InternalError("the search does not stay inside of the budget")


def neighbours(
    problem: Problem, chosen: Sites, count: int, fixed: Mapping[str, bool] | None = None
) -> tuple[Sites, ...]:
    """Return at most `count` other choices worth measuring, the most informative first.

    Each toggles the sites of one tensor against `chosen` and is otherwise the best: first tensors whose
    saving has an uncertain sign (by falling uncertainty over saving), then by falling saving the others that
    save time. Sure losses are not tried, nor `fixed` sites toggled.
    """
    fixed = dict(fixed or {})

    def prospect(tensor: str) -> tuple[bool, float]:
        """Return whether the net saving is uncertain, and uncertainty over saving, or else the saving."""
        items = [problem.by_site[site] for site in sorted(problem.readers[tensor])]
        gains = [item for item in items if item.saved > 0.0] or [max(items, key=lambda item: item.saved)]
        net = fsum(item.saved for item in gains) - problem.paid(tensor, chosen)
        error = sqrt(fsum(item.error**2 for item in gains))
        is_open = abs(net) < error
        return is_open, error / max(abs(net), 1e-12) if is_open else net

    choices: list[Sites] = []
    prospects = {tensor: prospect(tensor) for tensor in problem.readers}
    # Names settle ties.
    for tensor in sorted(prospects, key=lambda t: (not prospects[t][0], -prospects[t][1], t)):
        is_open, telling = prospects[tensor]
        readers = problem.readers[tensor] - set(fixed)
        if len(choices) == count or not readers or not (is_open or telling > 0.0):
            continue
        if readers & chosen:
            toggled = dict.fromkeys(sorted(readers), False)
        else:
            toggled = {max(sorted(readers), key=lambda site: problem.by_site[site].saved): True}
        other = search(problem, {**fixed, **toggled})
        if other is not None and other.sites != chosen and other.sites not in choices:
            choices.append(other.sites)
    return tuple(choices)


@dataclass(frozen=True)
class _Column:
    """One variable: these sites of a unit, at this cost."""

    unit: int
    sites: Sites
    cost: float


@dataclass(frozen=True)
class _Row:
    """Limits of a sum of variables; one without entries that cannot hold makes the whole infeasible."""

    entries: Mapping[int, float]
    least: float
    most: float


def _columns(problem: Problem) -> list[_Column]:
    columns: list[_Column] = []
    for number, unit in enumerate(problem.units):
        names = sorted(unit)
        if len(names) <= LARGEST_UNIT:
            parts = [
                frozenset(part) for size in range(1, len(names) + 1) for part in combinations(names, size)
            ]
            columns += [_Column(number, part, problem.cost(part)) for part in parts]
        else:
            columns.append(_Column(number, unit, problem.cost(unit)))
            alone = [frozenset({name}) for name in names]
            columns += [_Column(number, part, len(names) * problem.cost(part)) for part in alone]
    return [column for column in columns if column.cost <= problem.room * (1.0 + _ROUNDING)]


def _solve_once(
    problem: Problem, columns: Sequence[_Column], fixed: Mapping[str, bool], room: float
) -> Solution | None:
    tensors = [tensor for tensor in problem.readers if problem.quantize.get(tensor, 0.0) > 0.0]
    rows: list[_Row] = []
    with_site = {
        item.site: [at for at, column in enumerate(columns) if item.site in column.sites]
        for item in problem.items
    }
    for number, unit in enumerate(problem.units):
        mine = {at: 1.0 for at, column in enumerate(columns) if column.unit == number}
        if len(unit) <= LARGEST_UNIT:
            rows.append(_Row(mine, 0.0, 1.0))
        else:  # all sites together have their measured cost, not the sum of parts
            parts = {at: 1.0 for at in mine if columns[at].sites != unit}
            rows.append(_Row(parts, 0.0, len(unit) - 1.0))
    for site, places in with_site.items():
        least = 1.0 if fixed.get(site) is True else 0.0
        most = 0.0 if fixed.get(site) is False else 1.0
        rows.append(_Row(dict.fromkeys(places, 1.0), least, most))
    for position, tensor in enumerate(tensors, start=len(columns)):
        for site in sorted(problem.readers[tensor]):
            row = {**dict.fromkeys(with_site[site], 1.0), position: -1.0}
            for at in with_site.get(problem.makers.get(tensor, ""), ()):
                row[at] = row.get(at, 0.0) - 1.0
            rows.append(_Row(row, -2.0, 0.0))
    rows.append(_Row({at: column.cost for at, column in enumerate(columns)}, 0.0, max(room, 0.0)))

    saved = [fsum(problem.by_site[site].saved for site in sorted(column.sites)) for column in columns]
    values = np.array([*(-value for value in saved), *(problem.quantize[tensor] for tensor in tensors)])
    scale = _VALUE_SCALE / max(float(np.abs(values).max(initial=0.0)), 1e-30)
    if not columns:
        return None if any(fixed.values()) else Solution(frozenset())
    result = scipy.optimize.milp(
        values * scale,
        integrality=np.array([1] * len(columns) + [0] * len(tensors)),
        bounds=scipy.optimize.Bounds(0.0, 1.0),
        constraints=_constraint(rows, len(columns) + len(tensors)),
        options={"mip_rel_gap": 0.0, "time_limit": SECONDS},
    )
    is_proven = result.status != _LIMIT_REACHED
    if result.x is None:
        forced = frozenset(site for site, is_in in fixed.items() if is_in)
        return Solution(forced, is_proven) if not is_proven and problem.fits(forced) else None
    picked = (column for at, column in enumerate(columns) if result.x[at] > 0.5)
    return Solution(frozenset(site for column in picked for site in column.sites), is_proven)


def _without_idle(problem: Problem, chosen: Sites, fixed: Mapping[str, bool]) -> Sites:
    """Leave out sites that save nothing, as long as the rest still fits."""
    for site in sorted(chosen - {name for name, is_in in fixed.items() if is_in}):
        rest = chosen - {site}
        if problem.value(rest) >= problem.value(chosen) and problem.fits(rest):
            chosen = rest
    return chosen


def _constraint(rows: Sequence[_Row], width: int) -> scipy.optimize.LinearConstraint:
    entries = [(at, *entry) for at, row in enumerate(rows) for entry in row.entries.items()]
    places, columns, values = np.array(entries).reshape(-1, 3).T
    at = (places.astype(np.int64), columns.astype(np.int64))
    matrix = scipy.sparse.csr_array((values, at), shape=(len(rows), width))
    return scipy.optimize.LinearConstraint(matrix, [row.least for row in rows], [row.most for row in rows])


class FastSearch:
    """The search over the sites of one model, on one device; `risk`: that any interval of costs fails."""

    def __init__(
        self, free: Sequence[str], forced: Sequence[str], speeds: SiteSpeeds, costs: Costs, risk: float
    ) -> None:
        self.speeds = speeds
        timed = [site for site in free if site in speeds.known]
        self._forced: Sites = frozenset(forced)
        self._fixed = dict.fromkeys(sorted(self._forced), True)
        sites = list(dict.fromkeys([*timed, *forced]))
        units = units_of(sites, costs.groups)
        measured = sum(costs.is_measured(unit) for unit in units)
        parting = sum(len(unit) for unit in units if len(unit) > 1)
        each = risk / max(measured + parting * len(costs.outputs), 1)
        self.problem = Problem(
            items=tuple(
                Item(
                    site, speeds.saved_per_row(site), speeds.error_per_row(site), speeds.sources[site].tensor
                )
                if site in speeds.known
                # Forced: it spends budget; its saving is unknown.
                else Item(site, 0.0, 0.0, site)
                for site in sites
            ),
            quantize={
                speeds.sources[site].tensor: speeds.quantize_per_row(site)
                for site in sites
                if site in speeds.known
            },
            units=units,
            cost=cache(lambda sites: max(cost.most for cost in costs.of(sites, each))),
            makers={
                source.tensor: source.made_by
                for site, source in speeds.sources.items()
                if site in sites and source.made_by in sites
            },
        )

    @cached_property
    def _found(self) -> Solution:
        # The forced sites alone where those exceed the budget.
        return search(self.problem, self._fixed) or Solution(self._forced)

    @property
    def best(self) -> Sites:
        """Sites that save the most time."""
        return self._found.sites

    @property
    def note(self) -> str:
        """Caveat of `best`; empty where it is proven optimal."""
        if self._found.is_proven:
            return ""
        return (
            f"the search for {self.speeds.device} ended at its limit of {SECONDS:g} s: other sites inside of "
            "the budget may save more time"
        )

    @property
    def saves(self) -> bool:
        """True if the best choice saves time at all."""
        return bool(self.best) and self.problem.value(self.best) > 0.0

    def refinements(self) -> tuple[Sites, ...]:
        """Return other choices worth building."""
        return neighbours(self.problem, self.best, REFINEMENTS, self._fixed)

    def why_in(self, site: str, chosen: Sites) -> str:
        """Return why a site is chosen."""
        beside = len(chosen) - 1
        together = (
            f", at most {percent(self.problem.spent(chosen))} together with the {beside} other"
            f"{'s' if beside > 1 else ''} of this plan"
            if beside
            else ""
        )
        speed = self.speeds.speed(site).reason if site in self.speeds.known else "its time is not known"
        return f"{speed}; {self._cost_in_words(site)}{together}"

    def why_out(self, site: str, chosen: Sites) -> str:
        """Return why a site is not chosen."""
        speed = self.speeds.speed(site)
        if speed.verdict is not SpeedVerdict.FAST:
            return f"{'slow' if speed.verdict is SpeedVerdict.SLOW else 'not timed'}: {speed.reason}"
        if not self.problem.fits(frozenset({site})):
            return f"fast, but {self._cost_in_words(site)}; {speed.reason}"
        if not self.problem.fits(chosen | {site}):
            cost = self._cost_in_words(site)
            return f"fast, but there is no room beside the sites that save more: {cost}; {speed.reason}"
        return f"pays only together with others that read the tensor: {speed.reason}"

    def why_nothing(self) -> str:
        """Return the note of a plan that is left out."""
        verdicts = [self.speeds.speed(item.site).verdict for item in self.problem.items]
        fast = sum(verdict is SpeedVerdict.FAST for verdict in verdicts)
        inside = "none of them fits the budget" if fast else "at none of them eight bits save time"
        count = f"of {len(verdicts)} sites with known times {fast} {'is' if fast == 1 else 'are'} fast"
        return f"no set of sites inside of the budget saves time on {self.speeds.device}: {count}, {inside}"

    def _cost_in_words(self, site: str) -> str:
        return f"its KL is at most {percent(self.problem.cost(frozenset({site})))} of what is allowed"

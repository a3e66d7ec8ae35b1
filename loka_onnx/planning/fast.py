"""The plan `fp8-fast` of one device, and its refinements: the most time saved inside the budget.

Costs of the chosen sites are upper ends that hold simultaneously (Bonferroni: one bound for each measured
unit and, in units of several sites, for each site and output), on the output where the cost is largest. So
the chance that the chosen sites exceed the allowance is at most half of the risk, whichever they are, and the
search may see all bounds first. Sites that do not pay spend nothing, so a site beyond its share in `fp8-safe`
may be chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property

from loka_onnx.core.plan import SpeedVerdict
from loka_onnx.planning.costs import Costs
from loka_onnx.planning.judging import units_of
from loka_onnx.planning.search import SECONDS, Item, Problem, Sites, Solution, neighbours, search
from loka_onnx.planning.site_speed import SiteSpeeds

REFINEMENTS = 4
"""Plans beside `fp8-fast` that are worth building and timing."""


class FastSearch:
    """The search over the sites of one model, on one device; `risk` is that any
    interval of the costs fails.
    """

    def __init__(
        self, free: Sequence[str], forced: Sequence[str], speeds: SiteSpeeds, costs: Costs, risk: float
    ) -> None:
        self.speeds, self._costs = speeds, costs
        timed = [site for site in free if site in speeds.known]
        self._forced: Sites = frozenset(forced)
        self._fixed = dict.fromkeys(sorted(self._forced), True)
        sites = list(dict.fromkeys([*timed, *forced]))
        units = units_of(sites, costs.groups)
        measured = sum(costs.is_measured(unit) for unit in units)
        parting = sum(len(unit) for unit in units if len(unit) > 1)
        self._risk = risk / max(measured + parting * len(costs.outputs), 1)
        self.problem = Problem(
            items=tuple(self._item(site) for site in sites),
            quantize={
                speeds.sources[site].tensor: speeds.quantize_per_row(site)
                for site in sites
                if site in speeds.known
            },
            units=units,
            cost=cache(self._cost),
            makers={
                source.tensor: source.made_by
                for site, source in speeds.sources.items()
                if site in sites and source.made_by in sites
            },
        )

    @cached_property
    def best(self) -> Sites:
        """Sites that save the most time; the forced ones alone where those exceed the budget."""
        return self._forced if self._found is None else self._found.sites

    @cached_property
    def _found(self) -> Solution | None:
        return search(self.problem, self._fixed)

    @property
    def note(self) -> str:
        """Caveat of `best`; empty where it is proven optimal."""
        if self._found is None or self._found.is_proven:
            return ""
        return (
            f"the search for {self.speeds.device} ended at its limit of {SECONDS:g} s: other sites inside of "
            "the budget may save more time"
        )

    @property
    def saves(self) -> bool:
        """True if the best choice saves time at all."""
        return bool(self.best) and self.problem.value(self.best) > 0.0

    def refinements(self, count: int = REFINEMENTS) -> tuple[Sites, ...]:
        """Return other choices worth building: each toggles what saves most, or what is least certain to
        save.
        """
        return neighbours(self.problem, self.best, count, self._fixed)

    def why_in(self, site: str, chosen: Sites) -> str:
        """Return why a site is chosen."""
        beside = len(chosen) - 1
        together = (
            f", at most {_percent(self.problem.spent(chosen))} together with the {beside} other"
            f"{'s' if beside > 1 else ''} of this plan"
            if beside
            else ""
        )
        return f"{self._speed_of(site)}; {self._cost_in_words(site)}{together}"

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
        inside = "none of them fits the budget" if fast else "at none of them FP8 saves time"
        count = f"of {len(verdicts)} sites with known times {fast} {'is' if fast == 1 else 'are'} fast"
        return f"no set of sites inside of the budget saves time on {self.speeds.device}: {count}, {inside}"

    def _item(self, site: str) -> Item:
        if site not in self.speeds.known:
            # Forced: it spends budget; its saving is unknown.
            return Item(site, 0.0, 0.0, site)
        speeds = self.speeds
        return Item(site, speeds.saved_per_row(site), speeds.error_per_row(site), speeds.sources[site].tensor)

    def _cost(self, sites: Sites) -> float:
        return max(cost.most for cost in self._costs.of(sites, self._risk))

    def _speed_of(self, site: str) -> str:
        return self.speeds.speed(site).reason if site in self.speeds.known else "its time is not known"

    def _cost_in_words(self, site: str) -> str:
        return f"its KL is at most {_percent(self.problem.cost(frozenset({site})))} of what is allowed"


def _percent(part: float) -> str:
    return f"{100.0 * part:.3g} %"
